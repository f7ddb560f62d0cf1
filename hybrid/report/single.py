"""The page about one run folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybrid.data import Dataset
from hybrid.errors import format_error, one_line, tell
from hybrid.files import check_folder, write_atomically
from hybrid.folder import checkpoint, traces
from hybrid.folder.runfolder import RunFolder
from hybrid.links.registry import LINKS
from hybrid.models import NAME, Chain
from hybrid.ranks import launch
from hybrid.report import tables
from hybrid.report.comparison import compared
from hybrid.report.curves import curves
from hybrid.report.diagnosis import diagnosis
from hybrid.report.factors import has_dictionary, layers, responses
from hybrid.report.page import Html, drawing, heading, note, page, paragraph, row
from hybrid.report.pictures import section
from hybrid.report.records import Record, read
from hybrid.report.timeline import Span, spans, timeline
from hybrid.runs.restore import OwnCode, restore
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


def write(run: Path, data_dir: str | None = None) -> Path:
    """Write RUN/report/index.html, whole or not at all; give its path.

    Raises ValueError or FileNotFoundError for a folder that holds no run, for a file in it that
    cannot be read, and for missing test images, which only a factorized model needs.
    """
    other, events = command_of(run), traces.join(run)
    content = other[2].content(run) if other else _content(read(run), data_dir, events)
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


def _content(record: Record, data_dir: str | None, events: Sequence[Mapping[str, Any]]) -> bytes:
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
    parts += [heading(2, "Curves"), row(drawn), *_factors(record, data_dir)]
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


def _factors(record: Record, data_dir: str | None) -> list[Html]:
    """The factors in the newest checkpoint; empty for a model without a factorization layer."""
    folder = RunFolder(record.run).newest()
    if folder is None:
        return []
    manifest = checkpoint.read_manifest(folder)
    # only a model with such a layer needs the test data, which may not be here
    if not has_dictionary(checkpoint.load_model(folder, manifest)):
        return []
    if record.settings is None or NAME.fullmatch(record.settings.model.name) is None:
        return [note("The factors are not shown: the settings cannot rebuild a model of your own.")]
    restored = restore(record.run, OwnCode(data_dir=data_dir))
    if not (isinstance(restored.network, Chain) and isinstance(restored.test, Dataset)):
        return []
    device = launch.device("auto")
    restored.network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return factor_sections(restored.network, restored.test)


def factor_sections(model: nn.Sequential, test: Dataset) -> list[Html]:
    """What the factors of each of a model's factorization layers respond to."""
    found = [responses(model, name, layer, test) for name, layer in layers(model)]
    return [part for one in found for part in section(one)]
