"""How a process learns that it was started by mpirun or srun, and what it may use."""

import ctypes
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from hybrid import launch

LAUNCHER = (*launch._SIZES, *launch._RANKS, *launch._LOCAL_SIZES)
SLURM = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and nothing remembered of one."""
    for name in LAUNCHER + SLURM:
        monkeypatch.delenv(name, raising=False)
    launch.communicator.cache_clear()
    yield
    launch.communicator.cache_clear()


def test_a_process_started_by_hand_has_no_communicator():
    assert (launch.launched_size(), launch.launched_rank()) == (0, 0)
    assert launch.communicator() is None
    assert launch.local_rank() == 0


@pytest.mark.parametrize(("size", "rank"), [*zip(launch._SIZES, launch._RANKS, strict=True)])
def test_every_launchers_variables_are_understood(monkeypatch, size, rank):
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "3")
    assert (launch.launched_size(), launch.launched_rank()) == (4, 3)


def test_a_variable_that_is_no_number_is_ignored(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "many")
    assert launch.launched_size() == 0


def test_srun_of_several_tasks_is_a_launcher(monkeypatch):
    for name, value in zip(SLURM, ("0", "4", "2"), strict=True):
        monkeypatch.setenv(name, value)
    assert (launch.launched_size(), launch.launched_rank()) == (4, 2)


def test_a_single_task_of_slurm_is_no_launcher(monkeypatch):
    for name, value in zip(SLURM, ("0", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert launch.launched_size() == 0


def test_ranks_that_do_not_find_each_other_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=1))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    with pytest.raises(ValueError, match=r"^the launcher started 4 ranks but MPI sees 1: use srun"):
        launch.communicator()


def test_a_launcher_without_mpi4py_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match=r"^2 ranks were started but .*: pip install 'hybrid\[mpi"):
        launch.communicator()


@pytest.mark.parametrize(
    ("usable", "there", "ranks", "local", "threads"),
    [
        (8, 8, 1, 1, 8),  # one process
        (8, 8, 2, 1, 4),  # two threads of one process
        (2, 2, 5, 1, 1),  # more blocks than cores
        (8, 8, 4, 4, 2),  # four unbound MPI ranks
        (2, 8, 4, 4, 2),  # four ranks, each bound to two cores
        (3, 8, 1, 1, 3),  # a container
    ],
)
def test_the_cores_are_shared_among_the_ranks_of_a_host(
    monkeypatch, usable, there, ranks, local, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.setattr(os, "cpu_count", lambda: there)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(local))
    assert launch.threads_per_rank(ranks) == threads


def test_cuda_without_a_gpu_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch.device("auto") == launch.device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"torch sees no GPU; use auto or cpu$"):
        launch.device("cuda")


def test_large_buffers_are_not_handed_back_to_the_system():
    class MallInfo(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
            ("mapped_bytes", ctypes.c_size_t),
            *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uord", "ford", "keep")),
        ]

    statistics = ctypes.CDLL(None).mallinfo2
    statistics.restype = MallInfo
    launch.keep_memory()
    before = statistics().mapped_bytes
    buffer = torch.empty(1 << 26, dtype=torch.uint8)  # glibc's own threshold is 32 MB at most
    assert statistics().mapped_bytes < before + len(buffer)
