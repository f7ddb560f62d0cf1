"""The progress line: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from hybrid.errors import tell
from hybrid.ranks.launch import launched_size
from hybrid.rounds.report import PhaseReport

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress:
    """Tells how a run goes. Ranks other than 0, and library runs with `quiet`, say nothing."""

    def __init__(
        self,
        epochs: int,
        steps_per_epoch: int,
        start_step: int,
        quiet: bool,
        tests: int = 0,
        test_steps: float = 0.0,
    ) -> None:
        self.epochs, self.steps_per_epoch, self.quiet = epochs, steps_per_epoch, quiet
        self.start_step = start_step
        self.tests, self.test_steps = tests, test_steps
        """Tests to come, and what one takes in units of steps."""
        self.tested = 0.0
        """Tests so far, in units of steps."""
        self.images = 0
        """Of the newest reports."""
        self.begun = self.spoken = perf_counter()
        self._bar: tuple[RichProgress, TaskID] | None = None
        plain = any(name in os.environ for name in ("CI", "NO_COLOR", "SLURM_JOB_ID"))
        if not quiet and not plain and _terminal():
            self._bar = self._live(start_step)

    def step(self, step: int, reports: list[PhaseReport], images: int) -> None:
        """Show the newest losses, of so many images; as a plain line every 30 seconds at most."""
        self.images = images
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
        """While the accuracy is measured, the bar says so."""
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, status="testing")
        yield
        self.tested += self.test_steps
        if self._bar is not None:
            bar, task = self._bar
            bar.advance(task, self.test_steps)

    def epoch(self, epoch: int, reports: list[PhaseReport], test: float | None) -> None:
        """One line an epoch."""
        if not self.quiet:
            text = self._text(epoch * self.steps_per_epoch, reports)
            shown = "" if test is None else f"test {test:6.2%}  "
            self._say(f"epoch {epoch}/{self.epochs}  {shown}{text}")

    def say(self, text: str) -> None:
        """A plain line."""
        if not self.quiet:
            self._say(text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar[0].stop()

    def _text(self, step: int, reports: list[PhaseReport]) -> str:
        serial = reports[0]
        elapsed = perf_counter() - self.begun
        done = step - self.start_step
        left = elapsed / max(1, done) * (self.epochs * self.steps_per_epoch - step)
        seconds = sum(report.seconds for report in reports)
        parts = [
            f"loss {serial.loss:.4f}",
            f"accuracy {serial.accuracy:6.2%}",
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
        total = self.epochs * self.steps_per_epoch + self.tests * self.test_steps
        task = bar.add_task("", total=total, completed=start_step, status="")
        bar.start()
        return bar, task


def _terminal() -> bool:
    """Whether a person watches; mpirun gives its ranks a terminal even when it has none itself."""
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
