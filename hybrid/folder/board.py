"""TensorBoard's events of a run, which continues with a notice if they cannot be written."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from hybrid.errors import one_line


class _Records(RecordWriter):  # type: ignore[misc]
    """Writes a new local file; tensorboardX's class follows links and opens s3: folders."""

    def __init__(self, file: Path) -> None:
        self._writer = file.open("xb", buffering=0)


_ABOUT = ("step", "epoch", "phase")


class Board:
    """One file of events, each written at once, so that no failure stays unseen."""

    def __init__(self, folder: Path, from_step: int) -> None:
        self.notice = ""
        """Why nothing is written from here on; empty while events are written."""
        self._records: _Records | None = None
        with self._guarded():
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
            self._records = _Records(folder / f"{name}.{len(list(folder.iterdir()))}")
        self._write(Event(file_version="brain.Event:2"))
        if from_step:
            # events of later steps belong to a course that the run has discarded
            start = SessionLog(status=SessionLog.SessionStatus.START)
            self._write(Event(step=from_step + 1, session_log=start))

    def add(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line of metrics."""
        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in scalars(line)]
        self._write(Event(step=line["step"], summary=Summary(value=values)))

    def close(self) -> None:
        """End the file."""
        if self._records is not None:
            with self._guarded():
                self._records.close()
            self._records = None

    def _write(self, event: Event) -> None:
        if self._records is not None:
            event.wall_time = time.time()
            with self._guarded():
                self._records.write(event.SerializeToString())

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._records = None
            self.notice = (
                f"TensorBoard's events end here ({one_line(error)}); the run continues without"
            )


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The tag and the value of each number in a line of metrics, and the rate of its phase."""
    if line.get("samples") and line.get("seconds"):
        yield f"{line['phase']}/samples_per_second", line["samples"] / line["seconds"]
    for key, value in line.items():
        if key in _ABOUT:
            continue
        # ranks count from 0, cuts from 1
        first = 0 if key == "idle" else 1
        for i, number in enumerate(value if isinstance(value, list) else [value], first):
            if isinstance(number, int | float):
                tag = key if key.startswith(f"{line['phase']}_") else f"{line['phase']}/{key}"
                yield tag + (f"/{i}" if isinstance(value, list) else ""), number
