"""Signs of life: a rank whose launcher or fellow ranks are gone says so and ends.

A rank that waits inside MPI for a lost one waits for ever, so a thread beside it watches:

    host A                                 host B
      launcher <-- every rank                launcher <-- every rank      process descriptors
      lead <--> the other ranks              lead <--> the other ranks    process descriptors
      lead, rank 0 <=====================>   lead                         TCP, kept alive

The kernels do the beating, by TCP's keep-alive: it takes no time from the ranks, and one that is
stopped, by a debugger or with its whole job, still answers. Without its launcher, or with a silent
host, a rank ends at once. A rank that has ended may belong to a job that the launcher is ending,
for a reason given elsewhere: the others leave it `GRACE_SECONDS` for that. That a host's ranks have
ended is said at once, and once, by rank 0.
"""

import os
import select
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from time import monotonic

from hybrid.links.communicator import Communicator
from hybrid.ranks import hosts
from hybrid.ranks.launcher import Launcher, open_process

GRACE_SECONDS = 5.0
_MOST_SECONDS = 86_400
TIMEOUT_VARIABLE = "HYBRID_HOST_TIMEOUT"


class Heartbeat:
    """What watches over one rank, from here to `stop`. All ranks must make one.

    `unwatched` names the hosts that could not be connected, and may fail unnoticed. Raises
    ValueError, on all ranks, if rank 0's `HYBRID_HOST_TIMEOUT` is no number of seconds.
    """

    def __init__(self, comm: Communicator, host: Sequence[int]) -> None:
        """`host`: the ranks of this rank's host, of which the first is its lead."""
        self._comm, self._host, self._lead = comm, host, comm.rank == host[0]
        self.timeout = _seconds(comm.bcast(os.environ.get(TIMEOUT_VARIABLE, "10")))
        self._launcher = Launcher()
        self._mates = self._open_mates()
        connections, names = hosts.connect(comm, self._lead, self.timeout)
        self._connections = {c.fileno(): (c, names[rank]) for rank, c in connections.items()}
        met = comm.bcast({0, *connections})
        self.num_hosts = len(names)
        self.unwatched = [name for rank, name in names.items() if rank not in met]
        self._leaving = self._stopped = False
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Watch until every rank is here, then no more."""
        self._leaving = True
        self._comm.barrier()
        self._stopped = True

    def _open_mates(self) -> dict[int, str]:
        """Descriptors of the host's other ranks; all but the lead have the lead's only."""
        # a number means the same process in the same container only
        space = os.stat("/proc/self/ns/pid").st_ino
        found = {}
        everyone = self._comm.allgather((os.getpid(), space))
        for rank in self._host:
            pid, theirs = everyone[rank]
            watched = rank != self._comm.rank and (self._lead or rank == self._host[0])
            if watched and theirs == space:
                descriptor = open_process(pid)
                if descriptor is not None:
                    found[descriptor] = f"rank {rank} (process {pid})"
        return found

    def _watch(self) -> None:
        """Wait until something ends, and then for as long as the launcher may deal with it."""
        poll = select.poll()
        for descriptor in (*self._connections, *self._mates, *self._launcher.descriptors):
            poll.register(descriptor, select.POLLIN)
        lost, end = "", inf
        while (left := end - monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * min(left, 1)):
                poll.unregister(descriptor)
                if descriptor not in self._launcher.descriptors:
                    lost = lost or self._what_ended(descriptor)
                    end = min(end, monotonic() + GRACE_SECONDS)
            if self._launcher.is_gone():
                # a rank that ended just now did so for this reason
                earlier = lost and end - monotonic() < GRACE_SECONDS - 1
                before = f"{lost}, and " if earlier else ""
                self._end(f"{before}the launcher ({self._launcher}) is gone", self._lead)
        # where the lead has ended, another rank of its host speaks for it
        reason = f"{lost}, and the launcher ({self._launcher}) has not ended the job"
        self._end(reason, self._comm.rank in self._host[:2])

    def _what_ended(self, descriptor: int) -> str:
        if descriptor in self._mates:
            return f"{self._mates[descriptor]} has ended"
        connection, name = self._connections[descriptor]
        try:
            connection.recv(1)
        except ConnectionResetError:
            pass
        except OSError:
            silence = f"no sign of life from host {name} for {self.timeout} s"
            self._end(f"{silence}: the network or the node has failed", self._lead)
        reason = f"the ranks of host {name} have ended"
        if self._comm.rank == 0 and not self._leaving:
            # mpirun may end this rank, and itself, before anybody has said why
            self._launcher.say(f"hybrid: {reason}\n", ends=True)
        return reason

    def _end(self, reason: str, speaks: bool) -> None:
        """End this rank; the one that speaks for its host ends its mates and launcher, too."""
        if self._stopped:
            return
        try:
            if speaks:
                self._launcher.say(f"hybrid: error: {reason}; go on with --resume\n")
                for mate in self._mates:
                    with suppress(OSError):
                        signal.pidfd_send_signal(mate, signal.SIGKILL)
                self._launcher.end()
        finally:  # whatever fails: a rank that waits for a lost one must not stay
            os._exit(1)


def _seconds(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > _MOST_SECONDS:
        raise ValueError(
            f"{TIMEOUT_VARIABLE} is {text!r}; write whole seconds, up to {_MOST_SECONDS}, or 0 to "
            "watch no other host"
        )
    return int(text)
