"""How a process learns that it was started by mpirun or srun, and what it may use."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from answers import assert_one_line, refusal
from trainings import digits, trainer

from hybrid.ranks import launch
from hybrid.solvers import Backprop

SLURM = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
VARIABLES = (
    *SLURM,
    launch._TORCHRUN,
    "SLURM_NTASKS",
    *(name for pair in (*launch._MPI, launch._TORCH) for name in pair),
)
TRAIN = ("train", "--epochs", 1, "--set", "data.limit=64", "--out")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and nothing remembered of one."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cached = launch.ranks
    cached.cache_clear()
    yield
    cached.cache_clear()


@pytest.fixture
def mpi_of_one(monkeypatch):
    """An MPI library in which this process is alone."""
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=1))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))


def step(size, rank):
    """The variables of a task of srun."""
    return {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": size, "SLURM_PROCID": rank}


def mpirun(size, rank):
    return {"OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_RANK": rank}


def torch_ranks(size, rank):
    return {"WORLD_SIZE": size, "RANK": rank}


TORCHRUN = {**torch_ranks("8", "5"), "TORCHELASTIC_RUN_ID": "none"}
STARTS = {
    "by hand": ({}, (0, 0)),
    "MPICH": ({"PMI_SIZE": "4", "PMI_RANK": "3"}, (4, 3)),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3"}, (4, 3)),
    "torch's variables alone": (torch_ranks("4", "3"), (4, 3)),
    "a number that is none": ({"OMPI_COMM_WORLD_SIZE": "many"}, (0, 0)),
    "a batch script": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (0, 0)),
    "a batch script with a step": (
        {"SLURM_NTASKS": "4", "SLURM_STEP_ID": str(0xFFFFFFFB)},
        (0, 0),
    ),
    "an interactive step": (
        {**step("1", "0"), "SLURM_NTASKS": "4", "SLURM_STEP_ID": str(0xFFFFFFFA)},
        (0, 0),
    ),
    "a shell of salloc": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, (0, 0)),
    "one torch process": (torch_ranks("1", "0"), (0, 0)),
    "a number that is left": ({"WORLD_SIZE": "2"}, (0, 0)),
    "srun of several tasks": (step("4", "2"), (4, 2)),
    "srun of one task": (step("1", "0"), (0, 0)),
    "a task whose step has no number": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, (2, 1)),
    "mpirun of one rank, whose daemons are tasks": ({**step("2", "1"), **mpirun("1", "0")}, (1, 0)),
    "mpirun, whatever torch is told": ({**mpirun("4", "3"), **torch_ranks("2", "1")}, (4, 3)),
    "mpirun, and torch is told the same": ({**mpirun("4", "3"), **torch_ranks("4", "3")}, (4, 3)),
    "torchrun whose agents mpirun started": ({**mpirun("2", "1"), **TORCHRUN}, (8, 5)),
    "torchrun whose agents srun started": ({**step("2", "1"), **TORCHRUN}, (8, 5)),
}
"""Variables of a process, and its (size, rank)."""


@pytest.mark.parametrize("kind", STARTS)
def test_the_launcher_is_the_one_that_has_started_this_process(kind, monkeypatch):
    variables, place = STARTS[kind]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launch.launched_size(), launch.launched_rank()) == place
    if not any(place):
        assert launch.communicator() is None


OF_MPI = "started 2 ranks but MPI sees 1: use mpirun of the MPI library that mpi4py is built for"
OF_TORCH = "2 ranks were started, but MASTER_ADDR= and MASTER_PORT= are not an address"
APART = {
    "mpiexec of another MPI": ({"PMI_SIZE": "2", "PMI_RANK": "0"}, OF_MPI),
    "srun": (step("2", "0"), OF_MPI),
    "torchrun under mpirun": ({**mpirun("1", "0"), **TORCHRUN, **torch_ranks("2", "0")}, OF_TORCH),
}


@pytest.mark.usefixtures("mpi_of_one")
@pytest.mark.parametrize("kind", APART)
def test_ranks_that_do_not_find_each_other_are_refused_once_with_the_remedy(
    kind, monkeypatch, hybrid, tmp_path
):
    variables, said = APART[kind]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_one_line(hybrid(*TRAIN, tmp_path / "run"), said)
    for name in ("PMI_RANK", "SLURM_PROCID", "RANK"):
        monkeypatch.setenv(name, "1")
    assert hybrid(*TRAIN, tmp_path / "run") == (1, "", "")
    assert said in refusal(trainer(Backprop()).fit, *digits(1))
    assert not (tmp_path / "run").exists()


def test_a_launcher_without_mpi4py_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match=r"^2 ranks were started but .*: pip install mpi4py"):
        launch.communicator()


@pytest.mark.parametrize(
    ("usable", "blocks", "sharing", "threads"),
    [
        (8, 2, None, 4),  # two threads of one process
        (2, 5, None, 1),  # more blocks than cores
        (8, 8, 4, 2),  # four unbound ranks on a host
        (2, 8, 1, 2),  # bound to two cores of its own
        (4, 8, 4, 1),  # a cpuset of four cores, four unbound ranks
    ],
)
def test_the_cores_are_shared_among_the_blocks_or_the_ranks_that_have_the_same(
    monkeypatch, usable, blocks, sharing, threads
):
    here = sharing and launch.Ranks(None, 0, sharing)
    monkeypatch.setattr(launch, "ranks", lambda: here)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch.threads_per_rank(blocks) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch.threads_per_rank(blocks) == 3


def test_cuda_without_a_gpu_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch.device("auto") == launch.device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"torch sees no GPU; use auto or cpu$"):
        launch.device("cuda")


MAPPED = """
import ctypes
import torch
from hybrid.ranks import launch

class MallInfo(ctypes.Structure):
    names = "arena ordblks smblks hblks mapped_bytes usmblks fsmblks uord ford keep"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

statistics = ctypes.CDLL(None).mallinfo2
statistics.restype = MallInfo
if {kept}:
    launch.keep_memory()
before = statistics().mapped_bytes
buffer = torch.empty(1 << 26, dtype=torch.uint8)  # glibc's own threshold is 32 MB at most
print(statistics().mapped_bytes - before >= len(buffer))
"""


@pytest.mark.parametrize("kept", [True, False])
def test_large_buffers_are_not_handed_back_to_the_system(kept):
    # in a process of its own: where a heap cannot grow, glibc maps memory all the same
    script = MAPPED.replace("{kept}", str(kept))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == str(not kept)


def test_ranks_of_mpirun_wait_for_the_last(mpirun, tmp_path):
    program = Path(__file__).parents[2] / "support/ranks/late_rank.py"
    done = mpirun(2, sys.executable, program, tmp_path / "begun")
    assert done.returncode == 0, done.stderr
    waited = dict(line.split() for line in done.stdout.splitlines())
    assert float(waited["1"]) > 0.4


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in launch._CACHES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return tmp_path / f"hybrid-{os.getuid()}"


def test_the_caches_lie_in_a_folder_of_mode_700(folder, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", "/elsewhere")
    for _ in range(2):
        launch.keep_caches_private()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert os.environ["CUPY_CACHE_DIR"] == "/elsewhere"


@pytest.mark.parametrize("made", ["open to the group", "another's", "a link", "a file"])
def test_a_folder_that_another_may_have_made_is_refused(made, folder, tmp_path):
    if made == "a link":
        (tmp_path / "mine").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "mine")
    elif made == "a file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
    if made == "open to the group":
        folder.chmod(0o770)
    elif made == "another's":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    with pytest.raises(OSError if made == "a file" else ValueError, match=str(folder)):
        launch.keep_caches_private()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
