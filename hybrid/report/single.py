"""The page about one run: its facts, what each rank did when, curves, and its settings."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from hybrid.report.curves import RUN, Group, curves
from hybrid.report.page import (
    UNKNOWN,
    Html,
    amount,
    details,
    drawing,
    heading,
    note,
    page,
    row,
    table,
)
from hybrid.report.records import Record, Summary
from hybrid.report.timeline import spans, timeline
from hybrid.settings.config import Config
from hybrid.settings.methods import NAMED
from hybrid.settings.resolve import resolve, to_toml

_METHODS = ("solver", *NAMED)
"""Sections whose other settings follow from a name."""


def content(record: Record, events: Sequence[Mapping[str, Any]]) -> bytes:
    """The page; `events` are the spans of all ranks."""
    summary = record.summary
    known = [summary.model, summary.data and f"on {summary.data}", summary.solver]
    title = f"{record.run.resolve().name}: {', '.join(filter(None, known))}"
    drawn = [drawing(chart, name) for name, chart in curves(RUN, [Group("", [record])])]
    parts = [
        *([] if record.ended else [note(_how_far(record))]),
        row([_facts(summary, record.ended), *_ranks(summary), *_cuts(summary)]),
        *_timeline(events, summary),
        heading("Curves"),
        row(drawn),
        *([] if record.settings is None else _settings(record.settings)),
    ]
    return page(title, parts)


def _how_far(record: Record) -> str:
    last, epochs = record.lines[-1], record.summary.epochs
    asked = f" of {epochs}" if epochs else ""
    return (
        "This run has not ended (there is no summary.json). The report is about its part up to "
        f"step {last.step}, after {last.epoch}{asked} epochs."
    )


def _timeline(events: Sequence[Mapping[str, Any]], summary: Summary) -> list[Html]:
    chart = timeline(spans(events), f"m{summary.seconds}", summary.idle_share)
    title = "What each rank did in steps of usual length (trace.json has all, for ui.perfetto.dev)"
    return [drawing(chart, title)] if chart else []


def _facts(summary: Summary, ended: bool) -> Html:
    """What was run and how it went, without rows of which nothing is known."""
    seconds = summary.seconds
    returns = "; ".join(f"from step {x.step} to {x.to}: {x.reason}" for x in summary.rollbacks)
    rows = [
        ("solver", summary.solver, "{}"),
        ("model", summary.model, "{}"),
        ("data", summary.data, "{}"),
        ("blocks", summary.blocks, "{}"),
        ("replicas", summary.replicas, "{}"),
        ("joined by", summary.links, "{}"),
        ("epochs" if ended else "epochs asked for", summary.epochs, "{}"),
        ("stopped early", summary.stopped_early, "{}"),
        ("seed", summary.seed, "{}"),
        ("test accuracy", summary.test_accuracy, "{:.2%}"),
        ("test loss", summary.test_loss, "{:.4g}"),
        *((f"test {k}", v, "{:.4g}") for k, v in summary.test_metrics.items() if k != "accuracy"),
        ("training", summary.train_seconds, f"{{:.1f}} {seconds}"),
        ("of it, serial phases", summary.serial_seconds or None, f"{{:.1f}} {seconds}"),
        ("of it, parallel phases", summary.parallel_seconds or None, f"{{:.1f}} {seconds}"),
        ("images per second", summary.images_per_second, "{:,.1f}"),
        ("waited for checkpoints", max(summary.checkpoint_seconds, default=None), "{:.2f} s"),
        ("returns to a checkpoint", returns or None, "{}"),
    ]
    shown = [(name, form.format(value)) for name, value, form in rows if value is not None]
    return table("Run" if ended else "Run so far", (), shown)


def _ranks(summary: Summary) -> list[Html]:
    """A row for each rank, if the summary has anything about ranks."""
    columns: list[tuple[str, list[str]]] = [
        ("idle share", [f"{idle:.1%}" for idle in summary.idle_share]),
        ("sent", [*map(amount, summary.bytes_sent)]),
        ("peak memory", [*map(amount, summary.peak_memory_bytes)]),
    ]
    if any(summary.gap_steps):
        columns.append(("local steps in gaps", [f"{steps:,}" for steps in summary.gap_steps]))
        times = [f"{spent:.1f} {summary.seconds}" for spent in summary.gap_seconds]
        columns.append(("their time", times))
    if any(summary.delay):
        columns.append(("delay", [f"{delay:g} steps" for delay in summary.delay]))
    rows = zip_longest(*(cells for _, cells in columns), fillvalue=UNKNOWN)
    numbered = [(str(rank), *row) for rank, row in enumerate(rows)]
    header = ("rank", *(name for name, _ in columns))
    return [table("Ranks", header, numbered)] if numbered else []


def _cuts(summary: Summary) -> list[Html]:
    """A row for each cut."""
    residuals = [f"{residual:.3g}" for residual in summary.residual]
    cells = zip_longest(summary.cuts, residuals, fillvalue=UNKNOWN)
    rows = [(str(number), *row) for number, row in enumerate(cells, 1)]
    header = ("cut", "before unit", "residual ‖λ - x‖ / ‖x‖")
    return [table("Cuts", header, rows)] if rows else []


def _settings(config: Config) -> list[Html]:
    """The settings that are not the defaults of their method, and below them all of them."""
    methods = {section: {"name": getattr(config, section)["name"]} for section in _METHODS}
    plain = resolve(methods).model_dump()
    rows = [
        (f"{section}.{key}", _value(value), _value(plain[section].get(key)))
        for section, settings in config.model_dump().items()
        for key, value in settings.items()
        if value != plain[section].get(key)
    ]
    shown = table("Settings other than the defaults", ("", "this run", "default"), rows)
    all_settings = details("All settings: config.toml", to_toml(config))
    return [heading("How it was made"), *([shown] if rows else []), all_settings]


def _value(value: object) -> str:
    return UNKNOWN if value is None or value == "" else str(value)
