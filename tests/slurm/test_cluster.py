"""The cluster that the other tests run on, and what the doctor says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from slurm_cluster import Slurm
from trainings import digests


def test_the_doctor_sees_the_cluster_and_the_ranks_that_srun_starts(slurm: Slurm) -> None:
    said = slurm("srun", "--mpi=pmix", "--nodes=2", "hybrid", "doctor", seconds=120)
    assert "2 started, 2 in MPI" in said
    assert said.count("thread(s)") == 2


def test_ranks_that_srun_starts_wait_for_the_last_before_their_first_message(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Slurm's own fence after MPI_Init holds none, and a message then ends the late rank."""
    program = Path(__file__).parents[1] / "support" / "late_rank.py"
    words = (sys.executable, program, tmp_path / "begun")
    said = slurm("srun", "--mpi=pmix", "--nodes=2", *words, seconds=120)
    waited = dict(line.split() for line in said.splitlines())
    assert float(waited["1"]) > 0.4


def test_ranks_of_srun_without_an_mpi_in_common_train_to_the_bits_of_threads(
    slurm: Slurm, tmp_path: Path
) -> None:
    words = ["hybrid", "train", "--set", "split.replicas=2", "--set", "data.limit=64"]
    words += ["--set", "train.epochs=1", "--set", "train.threads=1", "--batch-size", 32]
    slurm(*words, "--blocks", 2, "--out", tmp_path / "threads", seconds=120)
    srun = ("env", "MASTER_ADDR=127.0.0.1", "srun", "--mpi=none", "--nodes=4")
    slurm(*srun, *words, "--out", tmp_path / "srun", seconds=120)
    assert digests(tmp_path / "srun") == digests(tmp_path / "threads")
    with pytest.raises(RuntimeError) as failure:
        slurm(*srun, *words, "--blocks", 3, "--out", tmp_path / "three", seconds=120)
    assert str(failure.value).count("3 blocks x 2 replicas") == 1
