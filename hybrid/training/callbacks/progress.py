"""The progress of a run, in plain lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from time import perf_counter

from hybrid.errors import tell
from hybrid.rounds.report import PhaseReport
from hybrid.training.callbacks.base import Callback, RunInfo

SECONDS = 30
"""The least time between two lines within an epoch."""


class ProgressPrinter(Callback):
    """Prints the progress of a run, on rank 0 and unless the run is `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.images = 0
        """Number of images in the newest reports."""
        self.reports: Sequence[PhaseReport] = ()
        self.start_time = self.last_line_time = perf_counter()

    def on_start(self, run: RunInfo) -> None:
        self.epochs, self.steps_per_epoch = run.epochs, run.steps_per_epoch
        self.batch_size, self.start_step = run.batch_size, run.step
        self.on_rollback(run)
        self.start_time = self.last_line_time = perf_counter()

    def on_rollback(self, run: RunInfo) -> None:
        self.step, self.newest = run.step, select_test_results(run.results)

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        """Print the newest losses, at most one line in `SECONDS`."""
        self.images, self.step = (step - self.step) * self.batch_size, step
        self.reports = reports
        if perf_counter() - self.last_line_time > SECONDS:
            total = self.epochs * self.steps_per_epoch
            self.say(f"step {step}/{total}  {self._describe(step, reports)}")

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        """Print one line for each epoch, with the newest test."""
        self.newest = select_test_results(results) or self.newest
        text = self._describe(epoch * self.steps_per_epoch, self.reports)
        shown = f"test {format_test(self.newest)}  " if self.newest else ""
        self.say(f"epoch {epoch}/{self.epochs}  {shown}{text}")

    def say(self, text: str) -> None:
        """Print a line, unless the run is quiet."""
        self.last_line_time = perf_counter()
        if not self.quiet and not tell(text, sys.stdout):
            self.quiet = True
            tell("hybrid: nobody reads the output any more; the run goes on")

    def _describe(self, step: int, reports: Sequence[PhaseReport]) -> str:
        serial = reports[0]
        elapsed = perf_counter() - self.start_time
        done = step - self.start_step
        left = elapsed / max(1, done) * (self.epochs * self.steps_per_epoch - step)
        seconds = sum(report.seconds for report in reports)
        parts = [
            f"loss {serial.loss:.4f}",
            *([] if serial.accuracy is None else [f"accuracy {serial.accuracy:6.2%}"]),
            f"{self.images / max(seconds, 1e-9):,.0f} images/s",
        ]
        if any(reports[-1].residual):
            parts.append(f"residual {max(reports[-1].residual):.3f}")
        return "  ".join([*parts, f"left {_format_seconds(left)}"])


def select_test_results(results: Mapping[str, float | None]) -> dict[str, float]:
    """Loss and metrics of the test, if it was made."""
    found = {k.removeprefix("test_"): v for k, v in results.items() if k.startswith("test_")}
    return {name: value for name, value in found.items() if value is not None}


def format_test(tested: Mapping[str, float]) -> str:
    """The accuracy in percent, other metrics by name and, without any, the loss by name."""
    shown = [
        f"{value:6.2%}" if name == "accuracy" else f"{name} {value:.4g}"
        for name, value in tested.items()
        if name != "loss" or len(tested) == 1
    ]
    return "  ".join(shown)


def _format_seconds(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
