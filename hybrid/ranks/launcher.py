"""The process that started this rank: mpirun, its daemon on another host, or Slurm's."""

import os
import select
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

_OF_A_RANK = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    *("PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"),
)
_MPIRUNS = ("mpirun", "mpiexec", "prterun", "prte", "prted", "orterun", "orted")

# mpirun waits for a lost host until it is asked to end three times, and its ssh waits longer
_END = """
sleep 1
for signal in TERM TERM TERM KILL; do
    sleep 1
    agents=$(cat /proc/$0/task/$0/children)
    kill -$signal $0 || exit
done
sleep 1
kill $agents
"""


class Launcher:
    """The launcher of this process, which must be one of its ranks."""

    def __init__(self) -> None:
        self._pid = outside_the_rank()
        self._name = _read(self._pid, "comm").decode().strip()
        self._parent = os.getppid()
        descriptor = open_process(self._pid)
        self.descriptors = [] if descriptor is None else [descriptor]
        self._stderr: int | None = None
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
            self._stderr = os.open(f"/proc/{self._pid}/fd/2", flags)

    def __str__(self) -> str:
        return f"{self._name} process {self._pid}".strip()

    def is_gone(self) -> bool:
        """Whether it has ended; without process descriptors, whether this process's parent has."""
        if not self.descriptors:
            return os.getppid() != self._parent
        return bool(select.select(self.descriptors, [], [], 0)[0])

    def say(self, line: str, ends: bool = False) -> None:
        """Write to this process's stderr or, where that ended with the launcher, to its.

        A launcher that stands still would pass nothing on, nor may one that `ends` just now.
        """
        directly = (self._stands_still() or (ends and self._appends())) and not _is_file(2)
        for descriptor in (self._stderr, 2) if directly else (2, self._stderr):
            if descriptor is not None:
                with suppress(OSError):
                    os.write(descriptor, line.encode())
                    return

    def _stands_still(self) -> bool:
        """Whether a signal has stopped it."""
        return _read(self._pid, "stat").rpartition(b")")[2].split()[:1] == [b"T"]

    def _appends(self) -> bool:
        """Whether what it writes to its stderr goes to the end, not over what others wrote."""
        if self._stderr is None or not _is_file(self._stderr):
            return True
        told = dict(line.split(b":", 1) for line in _read(self._pid, "fdinfo/2").splitlines())
        return bool(int(told.get(b"flags", b"0"), 8) & os.O_APPEND)

    def end(self) -> None:
        """Let a process of its own end the launcher, unless it soon ends by itself.

        torchrun does, or starts its ranks again; but no launcher does while it is stopped.
        """
        if (self._name in _MPIRUNS or self._stands_still()) and not self.is_gone():
            null = subprocess.DEVNULL
            with suppress(OSError):
                subprocess.Popen(
                    ["sh", "-c", _END, str(self._pid)],
                    stdin=null,
                    stdout=null,
                    stderr=null,
                    start_new_session=True,
                )


def open_process(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended; None on Linux before 5.3."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


def _is_file(descriptor: int) -> bool:
    """Whether it is open, and a file on a disk."""
    with suppress(OSError):
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    return False


def outside_the_rank() -> int:
    """The nearest ancestor without the rank's variables: a wrapper script has them, too."""
    mine = {f"{name}={os.environ[name]}".encode() for name in _OF_A_RANK if name in os.environ}
    pid = os.getppid()
    while pid > 1 and mine <= set(_read(pid, "environ").split(b"\0")):
        pid = int(_read(pid, "stat").rpartition(b")")[2].split()[1])
    return pid


def _read(pid: int, name: str) -> bytes:
    """What /proc tells of a process, empty where it does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
