"""What is called while a run trains, and may ask it to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.rounds.phase_report import PhaseReport


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first step, or when it is resumed."""

    names: Mapping[str, str]
    """Of model, data and solver."""
    cuts: Sequence[str]
    """The first unit of every block but the first."""
    epochs: int
    """The number of epochs to train, in all."""
    steps_per_epoch: int
    step: int
    """Steps done so far: 0 at a start, those of the checkpoint when resumed."""
    results: Mapping[str, float | None]
    """Newest metrics of the validation set, or without one of the test set; empty: none yet."""
    settings: Mapping[str, Any]
    """section.key -> value of [train], [optimizer] and [schedule]."""
    out: Path | None
    """Run folder; None keeps nothing."""


class Callback:
    """Its methods are called on the first rank only, and training waits until they return.

    An exception that it raises ends the run on all ranks, with one line that names its class. So
    does a change of the network that other ranks would not see: of attributes or modes of modules,
    of weights or buffers. What it needs to stop at the same epoch after a resume is kept in
    checkpoints by `state`.
    """

    reason: str = ""
    """Why the run shall stop; empty if it shall not. Set by `on_epoch` and `load_state`."""

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step; a resumed run has called `load_state` before."""

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        """Called after every `train.report_every` mini-batches; `epoch` counts from 0."""

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> bool | None:
        """Called after `epoch` epochs; True asks the run to stop after all callbacks were called.

        `results` has "step", "loss" (of the last report), "epoch_loss" (its mean over the epoch),
        "learning_rate" (of the last step) and the metrics of the validation set, such as
        "validation_accuracy", or without one those of the test set, such as "test_accuracy"; None
        means not measured in this epoch.
        """
        return None

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called when the run has ended without an error and its folder is complete."""

    def close(self) -> None:
        """Called last, also after a failure: close what is open. What it raises is ignored."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON can hold it; empty: nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave, when a run is resumed or goes back to a checkpoint.

        It is not called where a checkpoint has nothing of it.
        """
