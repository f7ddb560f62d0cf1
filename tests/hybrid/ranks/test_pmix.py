"""The barrier between MPI_Init and the first message."""

import sys
from pathlib import Path

from hybrid.ranks import pmix

SUPPORT = Path(__file__).parents[2] / "support"


def test_ranks_of_mpirun_wait_for_the_last(mpirun, tmp_path):
    done = mpirun(2, sys.executable, SUPPORT / "late_rank.py", tmp_path / "begun")
    assert done.returncode == 0, done.stderr
    waited = dict(line.split() for line in done.stdout.splitlines())
    assert float(waited["1"]) > 0.4


def test_nothing_is_waited_for_where_mpi_does_without_pmix(monkeypatch):
    monkeypatch.setattr(pmix, "_LIBRARY", "libpmix-of-nobody.so")
    pmix.wait_for_all()
