"""A rank that tells its process, then waits for a message that nobody sends; without torch."""

import os
import sys
from pathlib import Path

from hybrid.cli.failure import run_command
from hybrid.ranks import launch


def wait() -> None:
    here = launch.ranks()
    assert here is not None
    Path(sys.argv[1], f"rank{here.comm.rank}").write_text(str(os.getpid()))
    here.comm.mpi.recv(source=(here.comm.rank + 1) % here.comm.size)


sys.exit(run_command(wait))
