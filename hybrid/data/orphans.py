"""Worker processes end with the process that they work for, whatever ended that one."""

import fcntl
import os
import select
import signal
import threading
from contextlib import suppress
from multiprocessing import parent_process


def end_with_parent() -> None:
    """End this process when the one that has it started, by multiprocessing, is gone.

        its end of a pipe is closed     the kernel sends SIGKILL, whatever this process is doing
        its descriptor is readable      a thread ends this process: another process may have that
                                        end of the pipe, too, as one that it forked

    Its direct parent is no sign, since a fork server lives as long as its workers. Neither is the
    kernel's signal of a parent's death, which comes when the thread that started the worker ends.
    """
    parent = parent_process()
    assert parent is not None, "no process has started this one"
    pipe = int(parent.sentinel)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    descriptor: int | None = None
    with suppress(OSError, AttributeError):  # Linux before 5.3 has none
        descriptor = os.pidfd_open(parent.pid or 0)
    if _is_readable(pipe):  # it had gone before; its number may be another's by now
        os._exit(1)
    if descriptor is not None:
        threading.Thread(target=_end_after, args=(descriptor,), name="parent", daemon=True).start()


def _end_after(descriptor: int) -> None:
    _is_readable(descriptor, None)
    os._exit(1)


def _is_readable(descriptor: int, milliseconds: int | None = 0) -> bool:
    """Whether a descriptor becomes readable in that time; None waits for as long as it takes."""
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds))
