"""A callback: what is told of a run while it trains, and may ask it to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.rounds.report import PhaseReport


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before it goes on."""

    names: Mapping[str, str]
    """Of model, data and solver."""
    cuts: Sequence[str]
    """The first unit of every block but the first."""
    epochs: int
    """To train in all."""
    steps_per_epoch: int
    batch_size: int
    step: int
    """After which it goes on: 0 at a start, that of a checkpoint when resumed or rolled back."""
    results: Mapping[str, float | None]
    """Newest test metrics; None: not measured yet."""
    settings: Mapping[str, Any]
    """section.key -> value of [train], [optimizer] and [schedule]."""
    out: Path | None
    """Run folder; None keeps nothing."""

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1


class Callback:
    """Is called on the first rank alone (among threads: in the first block's), and waited for.

    An exception that it raises ends the run on all ranks, with one line that names its class. What
    a run needs to stop at the same epoch after a resume is kept in its checkpoints by `state`.
    """

    reason: str = ""
    """Why the run shall stop, where it shall: set when `on_epoch` or `load_state` find it so."""

    def on_start(self, run: RunInfo) -> None:
        """Before the first step of this start; a resumed run has called `load_state` before."""

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        """After every `train.report_every` mini-batches, in epoch `epoch`, counted from 0."""

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> bool | None:
        """After so many epochs; True asks the run to stop, once every callback was told.

        `results` has "step", "loss" (of the last report), "learning_rate" (of the last step) and
        the test metrics, such as "test_accuracy"; None: not measured in this epoch.
        """
        return None

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """When the checkpoint of a step is whole, told with the next report."""

    def on_rollback(self, run: RunInfo) -> None:
        """The run diverged, and goes on from an earlier checkpoint; after `load_state`."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run has ended well, and its folder is complete."""

    def close(self) -> None:
        """Last of all, after a failure too: let go of what is open. What it raises is dropped."""

    def state(self) -> dict[str, Any]:
        """JSON-able: what a checkpoint keeps; empty: nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; not called where a checkpoint has nothing."""
