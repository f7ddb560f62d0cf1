"""The summary that a training returns, shown in notebooks as a table and as curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.files import write_atomically
from hybrid.report import single
from hybrid.report.page import page
from hybrid.report.records import MetricsLine, Results, RunRecord, complete, read


class Summary(Results):
    """The contents of summary.json, as keys and as attributes: `summary.test_accuracy`.

    Every metric is there as `validation_NAME` and `test_NAME`. A notebook shows a table.
    """

    history: Sequence[Mapping[str, Any]]
    """An entry for each epoch of this training: "epoch", the results for `Callback.on_epoch`, and
    "seconds" and "samples" of training since the run's start. It is not in summary.json."""
    out: Path | None
    """The run folder; None without one."""

    def __init__(
        self, values: Mapping[str, Any], history: Sequence[Mapping[str, Any]], out: Path | None
    ) -> None:
        super().__init__(values)
        vars(self).update(history=history, out=out)

    def _repr_html_(self) -> str:
        return single.facts(RunRecord(Path(), None, complete(self), True, []))

    def plot(self, file: str | Path | None = None) -> "Drawing":
        """Draw the curves of `hybrid report` for a notebook; also write them as a page to `file`.

        With a run folder they show the whole run, else the epochs of this training.
        """
        curves = single.charts(self._record())
        if file is not None:
            write_atomically(Path(file), page(f"{self.model} on {self.data}", curves))
        return Drawing("".join(curves))

    def _record(self) -> RunRecord:
        if self.out is not None and (self.out / "metrics.jsonl").is_file():
            return read(self.out)
        lines, seconds, samples = list[MetricsLine](), 0.0, 0
        for epoch in self.history:
            trained = {**epoch, "loss": epoch["epoch_loss"]}
            trained["seconds"], seconds = epoch["seconds"] - seconds, epoch["seconds"]
            trained["samples"], samples = epoch["samples"] - samples, epoch["samples"]
            on = "validation" if "validation_loss" in epoch else "test"
            tested = {**epoch, "phase": on, "seconds": 0.0, "samples": 0}
            lines += map(MetricsLine.model_validate, (trained, tested))
        return RunRecord(Path(), None, complete(self), True, lines)


class Drawing(str):
    """The HTML of curves, each with its title and a chart in SVG, which a notebook shows."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<curves, {len(self):,} characters of HTML>"

    def _repr_html_(self) -> str:
        return f'<div style="display: flex; flex-wrap: wrap; gap: 1.5rem">{self}</div>'
