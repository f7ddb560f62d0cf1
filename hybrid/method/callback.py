"""Callbacks of a run, which may ask it to stop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.rounds.phase_report import PhaseReport


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run before its first step or after a resume."""

    names: Mapping[str, str]
    """The names of model, data and solver."""
    cuts: Sequence[str]
    """The first unit of every block but the first."""
    epochs: int
    """The total number of epochs to train."""
    steps_per_epoch: int
    step: int
    """Steps done so far: 0 at a start, those of the checkpoint when resumed."""
    results: Mapping[str, float | None]
    """The newest metrics of the validation set, else of the test set; empty: none yet."""
    settings: Mapping[str, Any]
    """section.key -> value of [train], [optimizer] and [schedule]."""
    out: Path | None
    """Run folder; None keeps nothing."""


class Callback:
    """Base of callbacks, which run on the first rank only; training waits until they return.

    An exception ends the run on all ranks, with one line that names the callback's class. So does a
    change of the network that other ranks would not see: of attributes or modes of modules, weights
    or buffers. `state` is kept in checkpoints, so that a resumed run stops at the same epoch.
    """

    reason: str = ""
    """Why the run shall stop; empty: go on. Set by `on_epoch` and `load_state`."""

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
        """Called last, also after a failure, to close files. Its exceptions are ignored."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON types; empty: nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state` when a run is resumed or goes back to a checkpoint.

        It is not called if the checkpoint has no state of this callback.
        """
