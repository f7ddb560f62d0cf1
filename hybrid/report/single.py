"""The page about one run: facts, ranks and cuts, curves, settings."""

from itertools import zip_longest

from hybrid.errors import counted
from hybrid.report.curves import RUN, Group, curves
from hybrid.report.page import UNKNOWN, Html, amount, drawing, heading, note, page, row, table
from hybrid.report.records import Results, RunRecord, results_model, subject
from hybrid.settings.config import Config
from hybrid.settings.methods import NAMED
from hybrid.settings.resolve import resolve

ON_TEST = (
    "The weights or the learning rates were selected on the test set, so its figures are "
    "optimistic. A validation set (data.validation) keeps the test set apart."
)


def content(record: RunRecord) -> bytes:
    """Make the page."""
    summary = record.summary
    parts = [
        *([] if record.ended else [note(_how_far(record))]),
        *([note(ON_TEST)] if summary.selected_on == "test" else []),
        row([facts(record), *_ranks(summary), *_cuts(summary)]),
        heading("Curves"),
        row(charts(record)),
        *([] if record.settings is None else _settings(record.settings)),
    ]
    return page(f"{record.run.resolve().name}: {subject(summary)}", parts)


def charts(record: RunRecord) -> list[Html]:
    """Draw the curves of a run."""
    return [drawing(chart, name) for name, chart in curves(RUN, [Group("", [record])])]


def _how_far(record: RunRecord) -> str:
    last, epochs = record.lines[-1], record.summary.epochs
    after = (
        f"{last.epoch} of {counted(epochs, 'epoch')}" if epochs else counted(last.epoch, "epoch")
    )
    return (
        "This run has not ended (there is no summary.json). The report is about its part up to "
        f"step {last.step}, after {after}."
    )


_GRID = [("split", name) for name in ("blocks", "cuts", "replicas")]


def facts(record: RunRecord) -> Html:
    """Make the table of a run's facts, without rows of unknown values."""
    summary, seconds, ended = record.summary, record.time_unit, record.ended
    phases = [("serial", summary.serial_seconds), ("parallel", summary.parallel_seconds)]
    two = all(value for _, value in phases)
    returns = "; ".join("from step {step} to {to}: {reason}".format(**x) for x in summary.rollbacks)
    rows = [
        *((k, summary[k], "{}") for k in ("solver", "model", "data", "blocks", "replicas")),
        ("joined by", summary.links, "{}"),
        ("epochs" if ended else "epochs asked for", summary.epochs, "{}"),
        ("stopped early", summary["stopped_early"], "{}"),
        ("seed", summary.seed, "{}"),
        ("validation accuracy", summary.validation_accuracy, "{:.2%}"),
        ("validation loss", summary.validation_loss, "{:.4g}"),
        ("test accuracy", summary.test_accuracy, "{:.2%}"),
        ("test loss", summary.test_loss, "{:.4g}"),
        *((k.replace("_", " ", 1), v, "{:.4g}") for k, v in _metrics(summary)),
        ("weights", _selection(summary), "{}"),
        ("start, with imports", summary.get("start_seconds"), "{:.1f} s"),
        ("training", summary.train_seconds, f"{{:.1f}} {seconds}"),
        *((f"of which {name}", value, f"{{:.1f}} {seconds}") for name, value in phases if two),
        ("samples per second", summary.images_per_second, "{:,.1f}"),
        ("waited for checkpoints", max(summary.checkpoint_seconds, default=None), "{:.2f} s"),
        ("returns to a checkpoint", returns or None, "{}"),
        ("gradient against the undivided network's", summary.proof, "{}"),
    ]
    cells = [(name, form.format(value)) for name, value, form in rows if value is not None]
    return table("Run" if ended else "Run so far", (), cells)


def _metrics(summary: Results) -> list[tuple[str, float]]:
    """List metrics of the validation and test set that have no field."""
    extra = [(k, v) for k, v in summary.items() if k not in results_model().model_fields]
    sets = ("validation_", "test_")
    return [(k, v) for k, v in extra if k.startswith(sets) and isinstance(v, int | float)]


def _selection(summary: Results) -> str | None:
    if not summary.selected_on or summary.selected_epoch is None:
        return None
    on = "training" if summary.selected_on == "training" else f"{summary.selected_on} set's"
    return f"after epoch {summary.selected_epoch}, selected by the {on} {summary.selected_by}"


def _ranks(summary: Results) -> list[Html]:
    columns: list[tuple[str, list[str]]] = [
        ("idle share", [f"{idle:.1%}" for idle in summary.idle_share]),
        ("sent", [*map(amount, summary.bytes_sent)]),
        ("peak memory", [*map(amount, summary.peak_memory_bytes)]),
    ]
    if summary.fill not in (None, "none"):
        name = f"{summary.fill}, local samples per tick"
        columns.append((name, [f"{count:,}" for count in summary.local_samples]))
    if any(summary.delay):
        columns.append(("delay", [f"{delay:g} steps" for delay in summary.delay]))
    rows = zip_longest(*(cells for _, cells in columns), fillvalue=UNKNOWN)
    numbered = [(str(rank), *row) for rank, row in enumerate(rows)]
    header = ("rank", *(name for name, _ in columns))
    return [table("Ranks", header, numbered)] if numbered else []


def _cuts(summary: Results) -> list[Html]:
    """Make a table with a row for each cut; a residual that was not measured is unknown."""
    residuals = [f"{residual:.3g}" for residual in summary.residual if any(summary.residual)]
    cells = zip_longest(summary.cuts, residuals, fillvalue=UNKNOWN)
    rows = [(str(number), *row) for number, row in enumerate(cells, 1)]
    header = ("cut", "before unit", "residual ‖λ - x‖ / ‖x‖")
    return [table("Cuts", header, rows)] if rows else []


def _settings(config: Config) -> list[Html]:
    """Make a table of settings that differ from the defaults, without the grid, shown above."""
    methods = {s: {"name": getattr(config, s)["name"]} for s in ("solver", *NAMED)}
    plain = resolve(methods).model_dump()
    rows = [
        (f"{section}.{key}", str(value), str(plain[section].get(key, UNKNOWN)))
        for section, settings in config.model_dump().items()
        for key, value in settings.items()
        if value != plain[section].get(key) and (section, key) not in _GRID
    ]
    shown = table("Settings other than the defaults", ("", "this run", "default"), rows)
    return [heading("How it was made"), shown] if rows else []
