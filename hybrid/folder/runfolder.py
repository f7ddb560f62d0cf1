"""The run folder: what a run leaves behind. Only rank 0 writes here, checkpoints apart."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from hybrid.folder import checkpoint
from hybrid.folder.files import (
    check_file,
    check_folder,
    check_link,
    naming,
    read_whole,
    write_atomically,
)

_MOST_BYTES = 1 << 26
"""Of a summary or a trace that is read."""
_MOST_SPANS = 100_000
"""Of earlier runs that a trace goes on from."""
_FILES = ("config.toml", "metrics.jsonl", "summary.json", "trace.json")


class RunFolder:
    """`config.toml`, `metrics.jsonl`, `summary.json`, `trace.json`, `checkpoints/`, `events/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.events = path / "events"
        self._metrics: Any = None
        self._board: Any = None

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = checkpoint.complete(self.checkpoints)
        return found[-1] if found else None

    def summary(self) -> dict[str, Any] | None:
        """What summary.json tells of a run that has ended; None without one."""
        return self._read("summary.json")

    def confirm(self) -> None:
        """Let who waits for the end see a summary that is told again: its file's time changes."""
        with suppress(OSError):
            os.utime(self.path / "summary.json")

    def check(self, resume: bool) -> None:
        """ValueError if there is a run where a new one shall start, or none to resume.

        So it is for a link within the folder where the run would write: it may lead to anywhere.
        The folder itself may be one, to a scratch disk for instance.
        """
        self._check_places()
        if resume and self.newest() is None:
            raise ValueError(f"{self.path} has no checkpoint to resume from: start a new --out")
        if not resume and (self.path / "metrics.jsonl").exists():
            way = "add --resume to go on with it" if self.newest() else "remove it (no checkpoint)"
            raise ValueError(f"{self.path} already holds a run: {way}; or choose another --out")

    def _check_places(self) -> None:
        for name in _FILES:
            check_file(self.path / name)
        for folder in (self.checkpoints, self.events):
            check_folder(folder)
            for inside in folder.iterdir() if folder.exists() else ():
                check_link(inside)

    def open(self, config: str, from_step: int, rollbacks: int = 0) -> None:
        """Make the folder, write the settings, and go on after step `from_step`.

        `rollbacks` is how often the run had gone back by then.
        """
        checkpoint.clear_partial(self.checkpoints)
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.toml", config)
        (self.path / "summary.json").unlink(missing_ok=True)
        metrics = self.path / "metrics.jsonl"
        write_atomically(metrics, "".join(_course(self._lines(), from_step, rollbacks)))
        self._metrics = metrics.open("a", buffering=1)
        self._open_board(from_step)

    def rewind(self, to_step: int) -> None:
        """Go on after step `to_step`, to which the run has gone back.

        What was logged since stays until the run has ended: a resumed one may go on from there.
        """
        self._board.close()
        self._open_board(to_step)

    def _open_board(self, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = from_step + 1 if from_step else None
        self._board = SummaryWriter(str(self.events), purge_step=purge)

    def metric(self, line: Mapping[str, Any]) -> None:
        """Append one object to metrics.jsonl and its numbers to TensorBoard."""
        with naming(self.path / "metrics.jsonl"):
            self._metrics.write(json.dumps(line) + "\n")
        for key, value in line.items():
            if key in ("step", "epoch", "phase"):
                continue
            values = value if isinstance(value, list) else [value]
            for i, number in enumerate(values):
                if not isinstance(number, int | float):
                    continue
                name = f"{line['phase']}/{key}" + (f"/{i + 1}" if isinstance(value, list) else "")
                self._board.add_scalar(name, number, line["step"])

    def close(self, summary: Mapping[str, Any] | None, trace: list[dict[str, Any]]) -> None:
        """Write the summary (of a run that ended well) and the trace."""
        if summary is not None:
            write_atomically(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")
        spans = [*self._earlier_spans(), *trace]
        write_atomically(self.path / "trace.json", json.dumps({"traceEvents": spans}))
        self._metrics.close()
        self._board.close()
        if summary is not None:
            write_atomically(self.path / "metrics.jsonl", "".join(_course(self._lines())))

    def _earlier_spans(self) -> list[Any]:
        """Of the run before it was resumed; none if a trace is no longer readable."""
        found = (self._read("trace.json") or {}).get("traceEvents")
        return found if isinstance(found, list) and len(found) < _MOST_SPANS else []

    def _read(self, name: str) -> dict[str, Any] | None:
        """The object in a file; None where it cannot be read."""
        try:
            found = json.loads(read_whole(self.path / name, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _lines(self) -> list[str]:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def _course(lines: list[str], last_step: float = inf, most_rollbacks: float = inf) -> list[str]:
    """The lines of the way to `last_step`, without those of ways the run has left."""
    kept: list[tuple[int, str]] = []
    rollbacks = 0
    for number, line in enumerate(lines, 1):
        try:
            told = json.loads(line)
            step, phase = int(told["step"]), told["phase"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(
                f"line {number} of metrics.jsonl is no metric: remove the line to go on"
            ) from None
        if phase == "rollback":
            rollbacks += 1
            if rollbacks > most_rollbacks:
                break
            kept = [one for one in kept if one[0] <= step]
        kept.append((step, line))
    return [line for step, line in kept if step <= last_step]
