"""The report of a run, or of several: one HTML page of tables and curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid.errors import format_error, tell
from hybrid.files import check_folder, write_atomically
from hybrid.folder import traces
from hybrid.report import comparison, single
from hybrid.report.records import read
from hybrid.solvers.named import Named

__all__ = ["command_of", "compare", "write"]
REPORTS = Named("report", {})
"""By command, the modules by which other packages report runs of their own.

The module has `is_run(folder) -> bool` and `content(run) -> bytes`, the page.
"""


def command_of(*runs: Path) -> tuple[Path, str, Any] | None:
    """The first run that a command of another package made, this command, and its report's module.

    A package that cannot be imported, or fails to tell, is left out and named on stderr.
    """
    modules: dict[str, Any] = REPORTS.added(_say)
    for name, module in modules.items():
        for run in runs:
            try:
                if module.is_run(run):
                    return run, name, module
            except (Exception, SystemExit) as error:  # whatever the code of another package raises
                _say(f"report {name!r} fails at {run}: {format_error(error)} (it is left out)")
    return None


def _say(text: str) -> None:
    tell(f"hybrid: {text}")


def write(run: Path) -> Path:
    """Write RUN/report/index.html, whole or not at all; give its path.

    Raises ValueError for a folder that holds no run, and for a file in it that cannot be read.
    """
    other = command_of(run)
    traces.join(run)
    content = other[2].content(run) if other else single.content(read(run))
    return _written(content, run / "report" / "index.html")


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Write OUT/index.html about several runs, whole or not at all; give its path."""
    return _written(comparison.content([read(run) for run in runs]), out / "index.html")


def _written(content: bytes, file: Path) -> Path:
    check_folder(file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)
    return file
