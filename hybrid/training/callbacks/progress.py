"""The progress of a run, in plain lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from time import perf_counter

from hybrid.errors import tell
from hybrid.rounds.report import PhaseReport
from hybrid.training.callbacks import Callback, RunInfo

SECONDS = 30
"""The least time between two lines within an epoch."""


class ProgressPrinter(Callback):
    """Prints the progress of a run, on rank 0 and unless the run is `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.images = 0
        """Number of images in the newest reports."""
        self.reports: Sequence[PhaseReport] = ()
        self.tested = ""
        """The newest test metrics."""
        self.start_time = self.last_line_time = perf_counter()

    def on_start(self, run: RunInfo) -> None:
        self.epochs, self.steps_per_epoch = run.epochs, run.steps_per_epoch
        self.batch_size = run.settings["train.batch_size"]
        self.step = self.start_step = run.step
        self.tested = format_test(run.results)
        self.start_time = self.last_line_time = perf_counter()

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        """Print the newest losses, at most one line in `SECONDS`."""
        self.images, self.step = (step - self.step) * self.batch_size, step
        self.reports = reports
        if perf_counter() - self.last_line_time > SECONDS:
            total = self.epochs * self.steps_per_epoch
            self.say(f"step {step}/{total}  {self._describe()}")

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        """Print one line for each epoch, with the newest test."""
        self.tested = format_test(results) or self.tested
        tested = f"test {self.tested}  " if self.tested else ""
        self.say(f"epoch {epoch}/{self.epochs}  {tested}{self._describe()}")

    def say(self, text: str) -> None:
        """Print a line, unless the run is quiet."""
        self.last_line_time = perf_counter()
        if not self.quiet and not tell(text, sys.stdout):
            self.quiet = True
            tell("hybrid: nobody reads the output any more; the run goes on")

    def _describe(self) -> str:
        first, last = self.reports[0], self.reports[-1]
        elapsed = perf_counter() - self.start_time
        steps_left = self.epochs * self.steps_per_epoch - self.step
        left = elapsed / max(1, self.step - self.start_step) * steps_left
        seconds = sum(report.seconds for report in self.reports)
        parts = [
            f"loss {first.loss:.4f}",
            *([] if first.accuracy is None else [f"accuracy {first.accuracy:6.2%}"]),
            f"{self.images / max(seconds, 1e-9):,.0f} images/s",
            *([f"residual {max(last.residual):.3f}"] if any(last.residual) else []),
        ]
        return "  ".join([*parts, f"left {timedelta(seconds=round(left))}"])


def format_test(results: Mapping[str, float | None]) -> str:
    """The accuracy in percent, other test metrics by name and, without any, the loss by name."""
    tested = {
        name.removeprefix("test_"): value
        for name, value in results.items()
        if name.startswith("test_") and value is not None
    }
    shown = [
        f"{value:6.2%}" if name == "accuracy" else f"{name} {value:.4g}"
        for name, value in tested.items()
        if name != "loss" or len(tested) == 1
    ]
    return "  ".join(shown)
