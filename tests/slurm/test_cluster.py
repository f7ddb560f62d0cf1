"""The cluster that the other tests run on."""

from __future__ import annotations

import pytest
from slurm_cluster import Slurm


@pytest.mark.slow
def test_two_clusters_live_beside_each_other_and_leave_no_process(slurm: Slurm, tmp_path) -> None:
    other = Slurm(tmp_path / "other", nodes=1)
    try:
        other.start()
        other("sbatch", "--output=/dev/null", "--wrap=sleep 600")
        other.wait_for("1", "RUNNING")
        assert other.processes()
    finally:
        other.stop()
    assert other.processes() == []
    assert slurm("srun", "--nodes=4", "true") == ""
