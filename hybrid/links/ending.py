"""How a rank that is a process ends its job: after a failure, or a wait that is too long."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import sleep

from hybrid.errors import PeerError, reason
from hybrid.links.base import RankLinks
from hybrid.links.communicator import Communicator

IN_SLURM_SECONDS = 1800.0
"""In Slurm a rank that has waited so long ends its job, unless links.timeout is set."""


@contextmanager
def waits_limited(links: RankLinks, comm: Communicator, timeout: float | None) -> Iterator[None]:
    """Within it the job ends when this rank has waited `timeout` seconds for another; 0: never."""
    ended, seconds = Event(), limit_of_waits(timeout)
    if seconds:
        Thread(target=_watch, args=(links, comm, seconds, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def limit_of_waits(timeout: float | None) -> float:
    """The seconds of links.timeout, which is None where it is not set; 0: no limit."""
    if timeout is None:
        return IN_SLURM_SECONDS if "SLURM_JOB_ID" in os.environ else 0.0
    return timeout


def _watch(links: RankLinks, comm: Communicator, timeout: float, ended: Event) -> None:
    """End the job when this rank has waited too long: another rank, or its host, is stuck."""
    seen = goes_on = links.now()
    while not ended.wait(min(1.0, timeout / 4)):
        before, seen = seen, links.now()
        if seen - before > timeout / 2:
            goes_on = seen  # this rank was suspended itself
        since = links.waits_since
        # a second more for each rank: the first to speak ends the others
        if since is not None and seen - max(since, goes_on) > timeout + min(links.place.number, 10):
            waited = f"it has waited for another rank for {timeout:g} s (links.timeout)"
            remedy = "find out why that rank is stuck, then continue with --resume"
            abort(comm, TimeoutError(f"{waited}: {remedy}"))


def abort(comm: Communicator, error: BaseException) -> None:
    """Print the reason once, and end every rank of the job."""
    # where all ranks fail at the same point, the first to speak ends the others, which takes time
    lost = isinstance(error, PeerError)
    sleep(min(1.0 + 0.2 * comm.rank, 3.0) if comm.rank else 2.0 * lost)
    try:
        if comm.is_aborted():
            return  # another rank has given its reason
        interrupted = isinstance(error, KeyboardInterrupt)
        why = "interrupted" if interrupted else f"rank {comm.rank}: {reason(error)}"
        print(f"hybrid: error: {why}", file=sys.stderr, flush=True)
    finally:  # even if stderr is closed
        comm.abort(1)
