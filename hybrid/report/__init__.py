"""Reports of one or several runs: an HTML page of tables and curves."""

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
"""By command, the modules by which other packages report their runs.

A module has `is_run(folder) -> bool` and `content(run) -> bytes`, the page.
"""


def command_of(*runs: Path) -> tuple[Path, str, Any] | None:
    """Find the first run of another package's command; return it, the command and its module.

    A package that cannot be imported, or fails, is left out and named on stderr.
    """
    modules: dict[str, Any] = REPORTS.added(_say)
    for name, module in modules.items():
        for run in runs:
            try:
                if module.is_run(run):
                    return run, name, module
            except (Exception, SystemExit) as error:  # of another package's code
                _say(f"report {name!r} fails at {run}: {format_error(error)} (it is left out)")
    return None


def _say(text: str) -> None:
    tell(f"hybrid: {text}")


def write(run: Path) -> Path:
    """Write RUN/report/index.html atomically; return its path.

    Raises ValueError for a folder that is not a run, and for an unreadable file in it.
    """
    other = command_of(run)
    traces.join(run)
    content = other[2].content(run) if other else single.content(read(run))
    return _write_page(content, run / "report" / "index.html")


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Write OUT/index.html about several runs atomically; return its path."""
    return _write_page(comparison.content([read(run) for run in runs]), out / "index.html")


def _write_page(content: bytes, file: Path) -> Path:
    check_folder(file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)
    return file
