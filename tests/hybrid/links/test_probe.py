"""Whether MPI takes GPU memory is tried in a child, whatever becomes of it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hybrid.links import mpi
from hybrid.links.mpi import Answer, agreed, try_in_child

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def child(program):
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("pass", Answer(True, "a trial on this host came back whole")),
        ("print('torch sees no GPU'); exit(1)", Answer(False, "torch sees no GPU")),
        ("exit(3)", Answer(False, "a trial ended with 3")),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            Answer(False, "a trial was ended by SIGSEGV"),
        ),
    ],
)
def test_the_end_of_the_child_is_the_answer(program, answer):
    assert try_in_child(child(program)) == answer


def test_a_child_that_hangs_is_a_no():
    answer = try_in_child(child("import time; time.sleep(60)"), seconds=0.5)
    assert answer == Answer(False, "a trial gave no answer in 0.5 s")


def test_the_child_is_no_rank(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    program = (
        "import os; names = ('OMPI_COMM_WORLD_SIZE', 'PMIX_RANK', 'SLURM_PROCID')\n"
        "exit(any(n in os.environ for n in names) or os.environ['OMPI_MCA_pml'] != 'ucx')"
    )
    assert try_in_child(child(program)).direct


NO, YES = Answer(False, "a trial was ended by SIGSEGV"), Answer(True, "whole")


@pytest.mark.parametrize(
    ("setting", "device", "other", "rank", "answer"),
    [
        ("auto", GPU, YES, 0, YES),
        ("auto", GPU, NO, 0, NO),
        ("auto", GPU, YES, 1, True),  # another rank tried
        ("mpi", GPU, YES, 0, True),
        ("host", GPU, YES, 0, False),
        ("auto", CPU, YES, 0, Answer(False, "no GPU")),
        ("mpi", None, YES, 0, Answer(False, "no GPU")),
    ],
)
def test_all_ranks_do_what_the_least_able_can(monkeypatch, setting, device, other, rank, answer):
    monkeypatch.setattr(mpi, "try_in_child", lambda: YES)
    comm = SimpleNamespace(allgather=lambda mine: [mine, other])
    found = agreed(setting, device, comm, rank)
    assert (found.direct if isinstance(answer, bool) else found) == answer


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_real_trial_says_so():
    assert try_in_child() == Answer(False, "torch sees no GPU")
