"""What a machine gives its ranks: shared memory, and a folder for runs that all of them see."""

import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from hybrid.errors import one_line
from hybrid.links.communicator import Communicator

T = TypeVar("T")
PATIENCE_SECONDS = 10.0
LEAST_SHARED_BYTES = 256 << 20


class Finding(NamedTuple):
    """One line of the report; a remedy marks something to mend."""

    subject: str
    value: str
    remedy: str = ""


def soon(look: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """What `look` gives, or raises; OSError if that takes longer, as on a server that is down."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(look())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([answer], seconds).done:
        raise OSError(f"no answer in {seconds:g} s")
    return answer.result()


def shared_memory() -> list[Finding]:
    """The shared memory of a host's ranks, where there is as little as in a container."""
    total = os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks
    remedy = "ranks of a node communicate through it: give more, docker run --shm-size=1g"
    little = Finding("/dev/shm", f"{total >> 20:,} MB", remedy)
    return [little] if total < LEAST_SHARED_BYTES else []


def run_folder(folder: Path, comm: Communicator | None) -> list[Finding]:
    """Whether rank 0 can write there, and all ranks see what it writes. All ranks call it."""
    remedy = "name a folder that can be written to, on a file system all nodes see, with --out"
    name = why = ""
    with ExitStack() as files:
        try:
            make = partial(tempfile.NamedTemporaryFile, prefix=".hybrid-doctor-")
            there = soon(lambda: _existing(folder))
            name = files.enter_context(soon(partial(make, dir=there))).name
        except OSError as error:
            why = one_line(error)
        seen = [True]
        if comm is not None:
            written = Path(str(comm.bcast(name)))
            with suppress(OSError):
                seen = [soon(written.exists)]
            seen = [sees for (sees,) in comm.allgather(seen)]
    if why:
        return [Finding("run folder", why, remedy)]
    if False in seen:
        text = f"rank {seen.index(False)} does not see what rank 0 writes to {folder}"
        return [Finding("run folder", text, remedy)]
    return [Finding("run folder", f"{folder.absolute()}, seen by all ranks: {len(seen)}")]


def _existing(path: Path) -> Path:
    """The nearest folder of `path` that is there."""
    path = Path(os.path.abspath(path.expanduser()))
    return next(folder for folder in (path, *path.parents) if folder.exists()).resolve()
