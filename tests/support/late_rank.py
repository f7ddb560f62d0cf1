"""Rank 0 comes a second late; all print "rank seconds" that they waited for each other."""

import time

from mpi4py import MPI

from hybrid.ranks import launch, pmix

if launch.launched_rank() == 0:
    time.sleep(1)
before = time.monotonic()
pmix.wait_for_all()
print(launch.launched_rank(), time.monotonic() - before, flush=True)
assert MPI.COMM_WORLD.size == launch.launched_size()
