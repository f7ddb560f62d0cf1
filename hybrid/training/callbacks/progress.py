"""The progress line: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hybrid.errors import tell
from hybrid.ranks.launch import launched_size
from hybrid.rounds.report import PhaseReport
from hybrid.training.callbacks.base import Callback, RunInfo

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class ProgressPrinter(Callback):
    """Prints the progress of a run, on rank 0 and unless the run is `quiet`."""

    def __init__(self, quiet: bool, evaluate_every: int = 1, test_steps: float = 0.0) -> None:
        self.quiet, self.evaluate_every = quiet, evaluate_every
        self.test_steps = test_steps
        """The duration of a test, in units of steps."""
        self.tested = 0.0
        """Tests so far, in units of steps."""
        self.images = 0
        """Of the newest reports."""
        self.reports: Sequence[PhaseReport] = ()
        self.begun = self.spoken = perf_counter()
        self._bar: tuple[RichProgress, TaskID] | None = None

    def on_start(self, run: RunInfo) -> None:
        self.epochs, self.steps_per_epoch = run.epochs, run.steps_per_epoch
        self.batch_size, self.start_step = run.batch_size, run.step
        self.on_rollback(run)
        self.begun = self.spoken = perf_counter()
        plain = any(name in os.environ for name in ("CI", "NO_COLOR", "SLURM_JOB_ID"))
        if not self.quiet and not plain and _terminal():
            self._bar = self._live(run.step)

    def on_rollback(self, run: RunInfo) -> None:
        self.step, self.newest = run.step, tested_of(run.results)

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        """Show the newest losses; as a plain line every 30 seconds at most."""
        self.images, self.step = (step - self.step) * self.batch_size, step
        self.reports = reports
        if self.quiet:
            return
        text = self._text(step, reports)
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=step + self.tested, status=text)
        elif perf_counter() - self.spoken > 30:
            self._say(f"step {step}/{self.epochs * self.steps_per_epoch}  {text}")

    def tick(self, steps: int) -> None:
        """Move the bar between reports."""
        if self._bar is not None:
            bar, task = self._bar
            bar.advance(task, steps)

    @contextmanager
    def testing(self) -> Iterator[None]:
        """The bar shows that the accuracy is being measured."""
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, status="testing")
        yield
        self.tested += self.test_steps
        if self._bar is not None:
            bar, task = self._bar
            bar.advance(task, self.test_steps)

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        """Print one line for each epoch, with the newest test."""
        self.newest = tested_of(results) or self.newest
        if not self.quiet:
            text = self._text(epoch * self.steps_per_epoch, self.reports)
            shown = f"test {shown_test(self.newest)}  " if self.newest else ""
            self._say(f"epoch {epoch}/{self.epochs}  {shown}{text}")

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.close()

    def say(self, text: str) -> None:
        """A plain line."""
        if not self.quiet:
            self._say(text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar[0].stop()

    def _text(self, step: int, reports: Sequence[PhaseReport]) -> str:
        serial = reports[0]
        elapsed = perf_counter() - self.begun
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
        return "  ".join([*parts, f"left {_clock(left)}"])

    def _say(self, text: str) -> None:
        self.spoken = perf_counter()
        if self._bar is not None:
            self._bar[0].console.print(text, highlight=False, soft_wrap=True)
        elif not tell(text, sys.stdout):
            self.quiet = True
            tell("hybrid: nobody reads the output any more; the run goes on")

    def _live(self, start_step: int) -> tuple[RichProgress, TaskID]:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            BarColumn(20), TextColumn("{task.percentage:3.0f}%  {task.fields[status]}")
        )
        every, done = self.evaluate_every, start_step // self.steps_per_epoch
        tests = -(-self.epochs // every) - done // every
        total = self.epochs * self.steps_per_epoch + tests * self.test_steps
        task = bar.add_task("", total=total, completed=start_step, status="")
        bar.start()
        return bar, task


def tested_of(results: Mapping[str, float | None]) -> dict[str, float]:
    """Loss and metrics of the test, if it was made."""
    found = {k.removeprefix("test_"): v for k, v in results.items() if k.startswith("test_")}
    return {name: value for name, value in found.items() if value is not None}


def shown_test(tested: Mapping[str, float]) -> str:
    """The accuracy in percent, other metrics by name and, without any, the loss by name."""
    shown = [
        f"{value:6.2%}" if name == "accuracy" else f"{name} {value:.4g}"
        for name, value in tested.items()
        if name != "loss" or len(tested) == 1
    ]
    return "  ".join(shown)


def _terminal() -> bool:
    """Whether output goes to a terminal; mpirun gives its ranks one even if it has none."""
    if not launched_size():
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
