"""The doctor in a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from slurm_cluster import Slurm

WAITING = Path(__file__).parents[1] / "support" / "waiting_program.py"


def test_the_doctor_sees_the_cluster_and_the_ranks_that_srun_starts(slurm: Slurm) -> None:
    said = slurm("srun", "--mpi=pmix", "--nodes=2", "hybrid", "doctor", seconds=120)
    assert "2 started, 2 in MPI" in said
    assert "pmix_v4 listed" in said
    assert "Slurm        slurm-wlm " in said
    assert "requeue      allowed" in said
    assert "preempt_send_user_signal" in said
    assert "of job" in said
    assert said.count("thread(s)") == 2


def test_processes_that_do_not_find_each_other_say_so_once(slurm: Slurm, tmp_path) -> None:
    words = (sys.executable, WAITING, tmp_path)
    with pytest.raises(RuntimeError) as failure:
        slurm("srun", "--mpi=none", "--nodes=2", *words, seconds=120)
    assert str(failure.value).count("started 2 ranks but MPI sees 1: use srun --mpi=pmix") == 1
