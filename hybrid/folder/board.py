"""TensorBoard's events of a run, which continues with a notice if they cannot be written."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from hybrid.errors import one_line, silence

_FLUSH_SECONDS = 10.0


class _Records(RecordWriter):  # type: ignore[misc]
    """Writes a new local file; tensorboardX's own class follows links and opens s3: folders."""

    def __init__(self, file: Path) -> None:
        self._writer = file.open("xb")

    def flush(self) -> None:
        self._writer.flush()

    def discard(self) -> None:
        silence(self._writer.fileno())


_ABOUT = ("step", "epoch", "phase")


class Board:
    """One file of events, written by the calling thread, so that no failure stays unseen."""

    def __init__(self, folder: Path, from_step: int) -> None:
        self.folder, self._flushed = folder, 0.0
        self._records: _Records | None = None
        self.notice = self._guarded(self._open, from_step)
        """Why nothing is written from here on, given once; empty while events are written."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line of metrics."""
        if self._records is not None:
            self.notice = self._guarded(self._add, line)

    def close(self) -> None:
        """Write what is left."""
        if self._records is not None:
            self.notice = self._guarded(self._records.close)
            self._records = None

    def discard(self) -> None:
        """Write nothing more, not even what is buffered."""
        if self._records is not None:
            self._records.discard()
            self._records = None

    def _open(self, from_step: int) -> None:
        self.folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        number = len(list(self.folder.iterdir()))
        self._records = _Records(self.folder / f"{name}.{number}")
        self._write(Event(file_version="brain.Event:2"))
        if from_step:
            # events of later steps belong to a course that the run has discarded
            start = SessionLog(status=SessionLog.SessionStatus.START)
            self._write(Event(step=from_step + 1, session_log=start))
        self._records.flush()

    def _add(self, line: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in scalars(line)]
        self._write(Event(step=line["step"], summary=Summary(value=values)))
        assert self._records is not None
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._records.flush()
            self._flushed = time.monotonic()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        assert self._records is not None
        self._records.write(event.SerializeToString())

    def _guarded(self, act: Any, *given: Any) -> str:
        try:
            act(*given)
        except (OSError, ValueError) as error:
            self._records = None
            return f"TensorBoard's events end here ({one_line(error)}); the run continues without"
        return ""


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The tag and the value of each number in a line of metrics, and the rate of its phase."""
    if line.get("samples") and line.get("seconds"):
        yield f"{line['phase']}/images_per_second", line["samples"] / line["seconds"]
    for key, value in line.items():
        if key in _ABOUT:
            continue
        # ranks count from 0, cuts from 1
        first = 0 if key == "idle" else 1
        for i, number in enumerate(value if isinstance(value, list) else [value], first):
            if isinstance(number, int | float):
                yield (
                    f"{line['phase']}/{key}" + (f"/{i}" if isinstance(value, list) else ""),
                    number,
                )
