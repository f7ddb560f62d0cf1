"""The process that started this rank: mpirun, its daemon on another host, torchrun, or Slurm's.

The launcher ends the job when a rank is lost. If the launcher itself is lost, a rank that waits
inside MPI would wait forever. So a thread of each rank ends the rank when its launcher ends.
"""

import os
import select
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from hybrid.errors import given_by

_OF_A_RANK = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    *("PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"),
)


def end_with_launcher(speaks: bool) -> None:
    """End this rank when its launcher ends; one rank of a host `speaks` for all of them."""
    pid = outside_the_rank()
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):  # Linux before 5.3 has none
        return
    stderr = 2
    with suppress(OSError):  # the launcher itself no longer forwards output
        stderr = _output(pid, 2)
    reason = f"the launcher ({_read(pid, 'comm').decode().strip()} process {pid}) is gone"
    again = given_by("--resume", "resume=True")
    line = f"hybrid: error: {reason}; go on with {again}\n" if speaks else ""
    arguments = (descriptor, stderr, line.encode())
    threading.Thread(target=_end_after, args=arguments, name="launcher", daemon=True).start()


def _end_after(descriptor: int, stderr: int, line: bytes) -> None:
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    try:
        os.write(stderr, line)
    finally:
        os._exit(1)


def screen(by_mpirun: bool) -> os.terminal_size | None:
    """Return the size of the terminal that shows standard output, if there is one.

    mpirun always gives its ranks a terminal, so its own output decides.
    """
    with suppress(OSError, ValueError, AttributeError):  # a closed output is None
        if not by_mpirun:
            return os.get_terminal_size(sys.stdout.fileno())
        with os.fdopen(_output(outside_the_rank(), 1), "wb", 0) as output:
            return os.get_terminal_size(output.fileno())
    return None


def say(line: str) -> None:
    """Write a line to the launcher's stderr: it forwards nothing once it ends its ranks."""
    with suppress(OSError), os.fdopen(_output(outside_the_rank(), 2), "wb", 0) as output:
        output.write(f"\n{line}\n".encode())


def _output(pid: int, number: int) -> int:
    how = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
    return os.open(f"/proc/{pid}/fd/{number}", how)


def outside_the_rank() -> int:
    """Find the nearest ancestor without the rank's variables, which a wrapper script has, too."""
    variables = {f"{name}={os.environ[name]}".encode() for name in _OF_A_RANK if name in os.environ}
    pid = os.getppid()
    while pid > 1 and variables <= set(_read(pid, "environ").split(b"\0")):
        pid = int(_read(pid, "stat").rpartition(b")")[2].split()[1])
    return pid


def _read(pid: int, name: str) -> bytes:
    """Read a file of /proc/PID; empty if it cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def process_seconds() -> float | None:
    """The seconds since this process began; None where the system does not tell."""
    fields = _read(os.getpid(), "stat").rpartition(b")")[2].split()
    if not fields:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def resident_bytes() -> int:
    """This process's memory in use; 0 where the system does not tell."""
    fields = _read(os.getpid(), "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0
