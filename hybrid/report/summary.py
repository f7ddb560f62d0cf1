"""What a training gives back: its summary, which a notebook shows as a table and as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.files import write_atomically
from hybrid.report import records, single
from hybrid.report.page import page


class Summary(dict[str, Any]):
    """The contents of summary.json, as keys and as attributes: `summary.test_accuracy`.

    Every metric is there as `validation_NAME` and `test_NAME`. A notebook shows a table.
    """

    solver: str
    model: str
    data: str
    blocks: int
    cuts: list[str]
    """The first unit of every block but the first."""
    replicas: int
    sync: str
    """The strategy of replicas; empty without any."""
    fill: str
    local_samples: list[int]
    """Of each block, the samples of local work in a tick."""
    epochs: int
    """Those that were trained, from the run's start on."""
    seed: int
    validation_accuracy: float | None
    """None without a validation set, or without a metric of that name."""
    validation_loss: float | None
    selected_on: str
    """The set by which weights were selected: validation, test or training; empty: none were."""
    selected_by: str
    """The metric of that selection."""
    selected_epoch: int
    """The epoch after which the weights were that the network now has, and that were tested."""
    test_accuracy: float | None
    """None without a test set, or without a metric of that name."""
    test_loss: float | None
    """None without a test set."""
    train_seconds: float
    """serial_seconds + parallel_seconds, without evaluation and checkpoints."""
    serial_seconds: float
    parallel_seconds: float
    images_per_second: float
    """Samples, of whichever kind, in a second of training."""
    idle_share: list[float]
    """Of each rank, the share of the time in which it waited."""
    fill_steps: list[int]
    """Of each rank, its local steps while it waited."""
    fill_seconds: list[float]
    bytes_sent: list[int]
    delay: list[float]
    """Of each rank, the steps by which its gradients are late."""
    peak_memory_bytes: list[int]
    gpu_memory_bytes: list[int]
    checkpoint_seconds: list[float]
    """Of each rank, how long it waited for checkpoints."""
    kernels: str
    links: str
    residual: list[float]
    """Of each cut, the relative primal residual after the last round."""
    returns_to_serial: int
    rollbacks: list[dict[str, Any]]
    proof: str
    """Whether the gradient was compared with the undivided network's: passed, or why not."""
    history: Sequence[Mapping[str, Any]]
    """Of each epoch that this training has trained: "epoch", what `Callback.on_epoch` gets, and
    "seconds" and "samples" of training since the run's start. It is not in summary.json."""
    out: Path | None
    """The run folder; None without one."""

    def __init__(
        self, values: Mapping[str, Any], history: Sequence[Mapping[str, Any]], out: Path | None
    ) -> None:
        super().__init__(values)
        vars(self).update(history=history, out=out)

    if not TYPE_CHECKING:  # which would let any name pass

        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                raise AttributeError(
                    f"a summary has no {name!r}; it has {', '.join(self)}"
                ) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def _repr_html_(self) -> str:
        return single.facts(records.SummaryFile.model_validate(self), ended=True)

    def plot(self, file: str | Path | None = None) -> Drawing:
        """The curves of `hybrid report`, which a notebook shows; `file` gets them as a page.

        With a run folder they are of the whole run, else of the epochs of this training.
        """
        drawn = single.drawn(self._record())
        if file is not None:
            write_atomically(Path(file), page(f"{self.model} on {self.data}", drawn))
        return Drawing("".join(drawn))

    def _record(self) -> records.Record:
        """The run as a report takes it."""
        if self.out is not None and (self.out / "metrics.jsonl").is_file():
            return records.read(self.out)
        lines, seconds, samples = list[records.Line](), 0.0, 0
        for epoch in self.history:
            trained = {**epoch, "loss": epoch["epoch_loss"]}
            trained["seconds"], seconds = epoch["seconds"] - seconds, epoch["seconds"]
            trained["samples"], samples = epoch["samples"] - samples, epoch["samples"]
            on = "validation" if "validation_loss" in epoch else "test"
            tested = {**epoch, "phase": on, "seconds": 0.0, "samples": 0}
            lines += map(records.Line.model_validate, (trained, tested))
        return records.Record(Path(), None, records.SummaryFile.model_validate(self), True, lines)


@dataclass(frozen=True, repr=False)
class Drawing:
    """Curves that a notebook shows."""

    html: str
    """Figures, each with its title and a chart in SVG."""

    def __repr__(self) -> str:
        return f"<curves, {len(self.html):,} characters of HTML>"

    def _repr_html_(self) -> str:
        return f'<div style="display: flex; flex-wrap: wrap; gap: 1.5rem">{self.html}</div>'
