"""The page about one run folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.errors import format_error, one_line, tell
from hybrid.files import check_folder, write_atomically
from hybrid.folder import traces
from hybrid.registries import LINKS
from hybrid.report import tables
from hybrid.report.comparison import compared
from hybrid.report.curves import curves
from hybrid.report.diagnosis import diagnosis
from hybrid.report.page import Html, drawing, heading, note, page, paragraph, row
from hybrid.report.records import Record, read
from hybrid.report.timeline import Span, spans, timeline
from hybrid.solvers.named import Added

GROUP = "hybrid.reports"
"""The entry points by which another package reports runs of its own: COMMAND = "its.module".

The module has `is_run(folder) -> bool` and `content(run) -> bytes`, the page.
"""
REPORTS = Added("report", GROUP)


def command_of(*runs: Path) -> tuple[Path, str, Any] | None:
    """The first run that a command of another package made, this command, and its report's module.

    A package that cannot be imported, or fails to tell, is left out and named on stderr.
    """
    modules: dict[str, Any] = REPORTS.usable(_say)
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

    Raises ValueError or FileNotFoundError for a folder that holds no run, and for a file in it that
    cannot be read.
    """
    other, events = command_of(run), traces.join(run)
    content = other[2].content(run) if other else _content(read(run), events)
    return _written(content, run / "report" / "index.html")


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Write OUT/index.html about several runs, whole or not at all; give its path."""
    return _written(compared(runs), out / "index.html")


def _written(content: bytes, file: Path) -> Path:
    check_folder(file.parent)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    except OSError as error:
        raise ValueError(
            f"{one_line(error)}: a report of {tables.amount(len(content))} goes to {file}: make "
            "room there, or correct the permissions"
        ) from None
    return file


def _content(record: Record, events: Sequence[Mapping[str, Any]]) -> bytes:
    summary, lines = record.summary, record.lines
    known = [summary.model, summary.data and f"on {summary.data}", summary.solver]
    title = f"{record.run.resolve().name}: {', '.join(filter(None, known))}"
    found = spans(events)
    parts = [] if record.ended else [note(_how_far(record))]
    parts += map(paragraph, diagnosis(record, found))
    facts = [tables.facts(summary, record.ended), tables.ranks(summary), tables.cuts(summary)]
    parts += [
        row(filter(None, [*facts, tables.rollbacks(summary)])),
        *_timeline(found, summary.links),
    ]
    drawn = [drawing(chart, name, name) for name, chart in curves(lines).items()]
    parts += [heading(2, "Curves"), row(drawn)]
    origin = [*([] if record.settings is None else tables.settings(record.settings))]
    origin += filter(None, [tables.starts(record.starts)])
    return page(title, [*parts, *([heading(2, "How it was made")] if origin else []), *origin])


def _timeline(found: Sequence[Span], links: str | None) -> list[Html]:
    clocked = links is not None and links in LINKS and LINKS[links].clocked
    if (chart := timeline(found, "ms, simulated" if clocked else "ms")) is None:
        return []
    said = "Steps of usual length; all spans are in trace.json, for ui.perfetto.dev or Chrome."
    what = "what each rank did when"
    return [heading(2, "What each rank did when"), drawing(chart, what), paragraph(said)]


def _how_far(record: Record) -> str:
    last, epochs = record.lines[-1], record.summary.epochs
    asked = f" of {epochs}" if epochs else ""
    return (
        "This run has not ended (there is no summary.json). The report is about its part up to "
        f"step {last.step}, after {last.epoch}{asked} epochs."
    )
