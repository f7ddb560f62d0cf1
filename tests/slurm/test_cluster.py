"""The cluster that the other tests run on, and what the doctor says of it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.slurm.cluster import Slurm


def test_the_doctor_sees_the_cluster_and_the_ranks_that_srun_starts(slurm: Slurm) -> None:
    said = slurm("srun", "--mpi=pmix", "--nodes=2", "hybrid", "doctor", seconds=120)
    assert "2 started, 2 in MPI" in said
    assert said.count("thread(s)") == 2


def test_ranks_that_srun_starts_wait_for_the_last_before_their_first_message(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Slurm's own fence after MPI_Init holds none, and a message then ends the late rank."""
    program = Path(__file__).parents[1] / "support/ranks/late_rank.py"
    words = (sys.executable, program, tmp_path / "begun")
    said = slurm("srun", "--mpi=pmix", "--nodes=2", *words, seconds=120)
    waited = dict(line.split() for line in said.splitlines())
    assert float(waited["1"]) > 0.4
