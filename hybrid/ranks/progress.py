"""A progress bar in a terminal or a notebook; elsewhere nothing is drawn."""

import os
import sys
from contextlib import AbstractContextManager, suppress
from threading import RLock
from time import monotonic
from typing import TYPE_CHECKING, Any

from hybrid.ranks import launch

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS = 0.1
"""The least time between two drawings."""
PLAIN = ("CI", "NO_COLOR", "SLURM_JOB_ID")
"""Environment variables that disable the bar."""
_open: "Bar | None" = None
"""The bar on the screen; a second one is not drawn."""


class Bar(AbstractContextManager["Bar"]):
    """Counts to `total` on the first rank's screen; other ranks draw nothing.

    The thread that reports draws, at most ten times a second. So no other thread disturbs a
    training, and a bench times no drawing. Printed lines appear above the bar.
    """

    def __init__(self, total: int, done: int = 0, text: str = "", quiet: bool = False) -> None:
        self.total, self.done, self.text, self.rate = total, done, text, ""
        self._drawn_at = 0.0
        self._progress: Progress | None = None
        self._cell: Any = None
        """The notebook's display handle."""
        self._lock = RLock()
        """Ctrl-C closes the bar of another thread."""
        if not (quiet or _open or launch.launched_rank()):
            self._begin()

    @property
    def shown(self) -> bool:
        return self._progress is not None

    def update(
        self, done: int | None = None, text: str | None = None, rate: str = "", now: bool = False
    ) -> None:
        """Update the count, text and rate; `now` draws at once, before a long step."""
        self.done = self.done if done is None else done
        self.text = self.text if text is None else text
        self.rate = rate or self.rate
        if self.shown and (now or monotonic() - self._drawn_at >= SECONDS):
            self._draw()

    def count(self, done: int, total: int) -> None:
        self.total = total
        self.update(done)

    def close(self) -> None:
        """Remove the bar from the terminal; a notebook keeps its last state."""
        global _open
        with self._lock:
            if self._progress is None:
                return
            if self._cell is not None:
                self._draw()
            progress, self._progress, _open = self._progress, None, None
            with suppress(OSError, ValueError):  # the terminal may be closed
                progress.stop()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> None:
        global _open
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        notebook = hasattr(shell, "kernel")  # as in Jupyter and Colab
        size = None if notebook or any(map(os.environ.get, PLAIN)) else launch.screen()
        if not notebook and (size is None or os.environ.get("TERM") in (None, "", "dumb")):
            return
        from rich import progress
        from rich.console import Console

        class Screen(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return False  # a killed run cannot show a hidden one again

        # a terminal echoes ^C behind the bar, which must still fit on the line
        width = 100 if notebook else max(20, (size.columns if size else 0) or 80) - 4
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(max(4, min(40, width - 64))),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}", markup=False),
            progress.TimeRemainingColumn(compact=True),
            # printed lines are not wrapped
            console=Screen(force_terminal=not notebook, width=width, soft_wrap=True),
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._progress.add_task(self.text, total=self.total, completed=self.done, rate="")
        _open = self
        if notebook:
            from IPython.display import display

            self._cell = display(self._table(self._progress), display_id=True)
        else:
            self._progress.start()
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = monotonic()
        with self._lock:
            if (progress := self._progress) is None:
                return
            (task,) = progress.task_ids
            progress.update(
                task, total=self.total, completed=self.done, description=self.text, rate=self.rate
            )
            try:
                if self._cell is not None:
                    self._cell.update(self._table(progress))
                else:
                    progress.refresh()
            except (OSError, ValueError):  # the terminal is closed, and the work goes on
                self.close()

    @staticmethod
    def _table(progress: "Progress") -> Any:
        return progress.make_tasks_table(progress.tasks)


def close() -> None:
    """Remove the bar, if there is one, before a last line is printed."""
    if _open is not None:
        _open.close()
