"""Rank 0 comes when the last one has waited a while; all print "rank seconds" that they waited.

late_rank.py FILE    the last rank makes the file when it begins to wait
"""

import sys
import time
from pathlib import Path

from mpi4py import MPI

from hybrid.ranks import launch

begun = Path(sys.argv[1])
before = time.monotonic()
if launch.launched_rank() == launch.launched_size() - 1:
    begun.touch()
elif launch.launched_rank() == 0:
    while not begun.exists():
        time.sleep(0.01)
    time.sleep(0.5)
launch.wait_for_all()
print(launch.launched_rank(), time.monotonic() - before, flush=True)
assert MPI.COMM_WORLD.size == launch.launched_size()
