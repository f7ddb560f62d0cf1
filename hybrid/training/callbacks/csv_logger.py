"""A run's curves as a table for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.files import naming, read_whole, write_atomically
from hybrid.rounds.report import PhaseReport
from hybrid.training.callbacks.base import Callback, RunInfo

_ABOUT = ["step", "epoch", "phase"]
_COLUMNS = [*_ABOUT, "samples", "loss", "accuracy", "seconds", "residual"]
_MOST_BYTES = 1 << 30


class CSVLogger(Callback):
    """Writes a CSV file: one row for each phase of a report, and one of phase `epoch` per epoch.

    `residual` is that of the worst cut, and each test metric has a column. A row is written at
    once. When the run is resumed, an incomplete last row and the rows of later steps are dropped.
    Raises ValueError if there is another file of that name, OSError if it cannot be written.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        self._columns = list(_COLUMNS)

    def on_start(self, run: RunInfo) -> None:
        if not self.file.parent.is_dir():
            raise ValueError(f"{self.file.parent} is not a folder: make it, or choose another file")
        self._drop_rows_after(run.step)

    def on_rollback(self, run: RunInfo) -> None:
        self._drop_rows_after(run.step)

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        for report in reports:
            row = {key: getattr(report, key) for key in _COLUMNS[2:-1]}
            residual = max(report.residual, default=None)
            self._add_row({"step": step, "epoch": epoch, **row, "residual": residual})

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        self._add_row({"epoch": epoch, "phase": "epoch", **results})

    def _add_row(self, row: dict[str, Any]) -> None:
        new = [key for key in row if key not in self._columns]
        if new:
            rows = self._read_rows()
            self._columns += new
            self._write_rows(rows)
        with naming(self.file), self.file.open("a", newline="") as file:
            file.write(_format_rows(self._columns, [row]))

    def _drop_rows_after(self, last_step: int) -> None:
        """Keep the rows up to a step; without a file there are none."""
        rows = self._read_rows() if self.file.exists() else []
        try:
            kept = [row for row in rows if int(row["step"]) <= last_step]
        except (ValueError, TypeError):
            raise ValueError(f"{self.file} has a row without a step: choose another name") from None
        if not kept:
            self._columns = list(_COLUMNS)
        self._write_rows(kept)

    def _read_rows(self) -> list[dict[str, str]]:
        """The complete rows of the file, whose columns are taken over."""
        text = read_whole(self.file, _MOST_BYTES).decode(errors="replace")
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        reader = csv.DictReader(lines)
        columns = list(reader.fieldnames or [])
        if text and columns[: len(_COLUMNS)] != _COLUMNS:
            raise ValueError(f"{self.file} is no file of CSVLogger: choose another name")
        self._columns = columns or list(_COLUMNS)
        return list(reader)

    def _write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        header = dict(zip(self._columns, self._columns, strict=True))
        write_atomically(self.file, _format_rows(self._columns, [header, *rows]))


def _format_rows(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore").writerows(rows)
    return text.getvalue()
