"""A line of the doctor's report, and how to ask programs and file systems that may not answer."""

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
PATIENCE_SECONDS = 10.0


class Finding(NamedTuple):
    """One line of the report; a remedy marks something to mend."""

    subject: str
    value: str
    remedy: str = ""


def said(*command: str, seconds: float = PATIENCE_SECONDS) -> str | None:
    """What a program says on stdout and stderr; None if it is not there, fails or takes longer."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        return str(subprocess.check_output(command, timeout=seconds, errors="replace", **streams))
    except (OSError, subprocess.SubprocessError):
        return None


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
