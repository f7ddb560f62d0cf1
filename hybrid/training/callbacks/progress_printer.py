"""The progress of a run on the screen: a line for each epoch, and a bar or lines between."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from time import perf_counter
from typing import Any

from hybrid.errors import tell
from hybrid.method.callback import Callback, RunInfo
from hybrid.ranks.progress import Bar
from hybrid.rounds.evaluation import format_results
from hybrid.rounds.phase_report import PhaseReport
from hybrid.solvers.block import Block
from hybrid.solvers.numerics.draws import Key

SECONDS = 30
"""The least time between two lines of progress within an epoch."""


class ProgressPrinter(Callback):
    """Shows the progress of a run, on rank 0 and unless the run is `quiet`.

    That is a line for each epoch and, between these, a bar, or lines where there is no screen.
    """

    def __init__(self, quiet: bool, unit: str = "samples") -> None:
        self.quiet, self.unit = quiet, unit
        """`unit` is the word for samples, such as images."""
        self.reports: Sequence[PhaseReport] = ()
        self.rate = ""
        """Samples per second in the newest reports."""
        self.tested = ""
        """The newest metrics of the validation or test set, with its name."""
        self.bar = Bar(0, quiet=True)
        self.start_time = self.last_line_time = perf_counter()

    def on_start(self, run: RunInfo) -> None:
        self.epochs, self.steps_per_epoch = run.epochs, run.steps_per_epoch
        self.batch_size = run.settings["train.batch_size"]
        self.step = self.start_step = run.step
        self.tested = format_results(run.results)
        self.start_time = self.last_line_time = perf_counter()
        self.bar = Bar(self.epochs * self.steps_per_epoch, self.step, self._where(), self.quiet)

    def follow(self, block: Block, stop: Callable[[], str]) -> None:
        """Let the bar move with each mini-batch that a block begins, until the run shall stop."""
        inner = block.watch or (lambda name, key: nullcontext())

        def watch(name: str, key: Key = ()) -> AbstractContextManager[None]:
            if stop():
                self.bar.close()
            elif len(key) > 1 and key[1] > self.bar.done:
                self.bar.update(key[1], self._where(key[1]))
            return inner(name, key)

        if self.bar.shown:
            block.watch = watch

    def go_back(self, step: int) -> None:
        """Count on from an earlier step."""
        self.step = step
        if self.bar.shown:
            self.bar.update(step, self._where())

    def count_tests(self, done: int, total: int) -> None:
        """Show how far a test has come."""
        if self.bar.shown:
            self.bar.update(text=f"{self._where(self.step - 1)}, evaluation {done}/{total}")

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        """Show the newest losses; without a bar print at most one line in `SECONDS`."""
        seconds = sum(report.seconds for report in reports)
        rate = (step - self.step) * self.batch_size / max(seconds, 1e-9)
        self.rate, self.step, self.reports = f"{rate:,.0f} {self.unit}/s", step, reports
        if self.bar.shown:
            self.bar.update(step, rate=f"loss {reports[0].loss:.4f}  {self.rate}")
        elif perf_counter() - self.last_line_time > SECONDS:
            total = self.epochs * self.steps_per_epoch
            self.say(f"step {step}/{total}  {self._describe()}")

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        """Print one line for each epoch, with the newest test."""
        self.tested = format_results(results) or self.tested
        self.bar.update(text=self._where(self.step - 1))
        tested = f"{self.tested}  " if self.tested else ""
        self.say(f"epoch {epoch}/{self.epochs}  {tested}{self._describe()}")

    def close(self) -> None:
        self.bar.close()

    def say_selected(self, results: Mapping[str, Any]) -> None:
        """Print the results of a test at the end, or that weights were selected on the test set."""
        if "validation_loss" in results and "test_loss" in results:
            tested = {k: v for k, v in results.items() if k.startswith("test_")}
            epoch = results["selected_epoch"]
            self.say(f"{format_results(tested)}  with the weights after epoch {epoch}")
        elif results["selected_on"] == "test":
            self.say(
                f"selected on the test set, by {results['selected_by']}, so its figures are "
                "optimistic: hold out a share of the training set with --set data.validation=0.1, "
                "or give fit(..., validation=...)"
            )

    def say(self, text: str) -> None:
        """Print a line, unless the run is quiet."""
        self.last_line_time = perf_counter()
        if not self.quiet and not tell(text, sys.stdout):
            self.quiet = True
            tell("hybrid: nobody reads the output any more; the run goes on")

    def _where(self, step: int | None = None) -> str:
        """The epoch of a step; None: of the next one."""
        epoch = (self.step if step is None else step) // self.steps_per_epoch + 1
        return f"epoch {min(epoch, self.epochs)}/{self.epochs}"

    def _describe(self) -> str:
        first, last = self.reports[0], self.reports[-1]
        elapsed = perf_counter() - self.start_time
        steps_left = self.epochs * self.steps_per_epoch - self.step
        left = elapsed / max(1, self.step - self.start_step) * steps_left
        parts = [
            f"train loss {first.loss:.4f}",
            *([] if first.accuracy is None else [f"accuracy {first.accuracy:6.2%}"]),
            self.rate,
            *([f"residual {max(last.residual):.3f}"] if any(last.residual) else []),
        ]
        return "  ".join([*parts, f"left {timedelta(seconds=round(left))}"])
