"""The facts of a run as tables."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from hybrid.report.page import Html, details, table
from hybrid.report.records import Start, Summary
from hybrid.settings.config import Config
from hybrid.settings.methods import NAMED
from hybrid.settings.resolve import resolve, to_toml

UNKNOWN = "-"
_METHODS = ("solver", *NAMED)
"""Sections whose other settings follow from a name."""


def facts(summary: Summary, ended: bool) -> Html:
    """What was run and how it went, without rows of which nothing is known."""
    before = f", cut before {', '.join(summary.cuts)}" if summary.cuts else ""
    waited = max(summary.checkpoint_seconds, default=None)
    rows = [
        ("solver", summary.solver, "{}"),
        ("model", summary.model, "{}"),
        ("data", summary.data, "{}"),
        ("blocks", summary.blocks and f"{summary.blocks}{before}", "{}"),
        ("replicas", summary.replicas, "{}"),
        ("joined by", summary.links, "{}"),
        ("epochs" if ended else "epochs asked for", summary.epochs, "{}"),
        ("stopped early", summary.stopped_early, "{}"),
        ("seed", summary.seed, "{}"),
        ("test accuracy", summary.test_accuracy, "{:.2%}"),
        ("test loss", summary.test_loss, "{:.4g}"),
        *((f"test {k}", v, "{:.4g}") for k, v in summary.test_metrics.items() if k != "accuracy"),
        ("training", summary.train_seconds, "{:.1f} s"),
        ("of it, serial phases", summary.serial_seconds or None, "{:.1f} s"),
        ("of it, parallel phases", summary.parallel_seconds or None, "{:.1f} s"),
        ("local steps in gaps of serial phases", _gaps(summary), "{}"),
        ("images per second", summary.images_per_second, "{:,.1f}"),
        ("returns to serial training", summary.returns_to_serial, "{}"),
        ("waited for checkpoints", waited, "{:.2f} s"),
    ]
    shown = [(name, form.format(value)) for name, value, form in rows if value is not None]
    return table("Run" if ended else "Run so far", (), shown)


def _gaps(summary: Summary) -> str | None:
    """Local steps of all ranks, and the share of the training time that they took."""
    seconds, training = summary.gap_seconds, summary.train_seconds
    if not any(summary.gap_steps):
        return None
    counted = f"{sum(summary.gap_steps):,} on {len(summary.gap_steps)} ranks"
    if not (seconds and training):
        return counted
    return f"{counted}, {sum(seconds) / len(seconds) / training:.1%} of a rank's time"


def settings(config: Config) -> list[Html]:
    """The settings that are not the defaults of their method, and below them all of them."""
    methods = {section: {"name": getattr(config, section)["name"]} for section in _METHODS}
    plain, own = resolve(methods).model_dump(), config.model_dump()
    rows = [
        (f"{section}.{key}", _value(value), _value(plain[section].get(key)))
        for section, table in own.items()
        for key, value in table.items()
        if value != plain[section].get(key)
    ]
    shown = table("Settings other than the defaults", ("", "this run", "default"), rows)
    return [*([shown] if rows else []), details("All settings: config.toml", to_toml(config))]


def _value(value: object) -> str:
    return UNKNOWN if value is None or value == "" else str(value)


def starts(found: Sequence[Start]) -> Html | None:
    """A row for each start of the run; None if the folder has no starts.jsonl."""
    rows = [
        (
            start.time.replace("T", " ").replace("+00:00", " UTC"),
            str(start.step),
            " ".join(x for x in (start.version, start.commit and start.commit[:10]) if x),
            ", ".join(f"{name} {number}" for name, number in start.packages.items()),
            _hosts(start.hosts),
            start.command,
        )
        for start in found
    ]
    header = ("time", "from step", "hybrid", "packages", "hosts", "command")
    return table("Starts", header, rows) if rows else None


def _hosts(names: Sequence[str]) -> str:
    """Each host with the number of its ranks."""
    counted = Counter(names)
    return ", ".join(f"{name} ({n} ranks)" if n > 1 else name for name, n in counted.items())


def ranks(summary: Summary) -> Html | None:
    """A row for each rank; None if the summary has nothing about ranks."""
    columns: list[tuple[str, list[str]]] = [
        ("idle share", [_cell(idle, "{:.1%}") for idle in summary.idle_share]),
        ("sent", [*map(amount, summary.bytes_sent)]),
        ("peak memory", [*map(amount, summary.peak_memory_bytes)]),
    ]
    if any(summary.gap_steps):
        columns.append(("local steps in gaps", [f"{steps:,}" for steps in summary.gap_steps]))
        columns.append(("their time", [_cell(spent, "{:.1f} s") for spent in summary.gap_seconds]))
    if any(summary.delay):
        columns.append(("delay", [_cell(delay, "{:g} steps") for delay in summary.delay]))
    rows = zip_longest(*(cells for _, cells in columns), fillvalue=UNKNOWN)
    numbered = [(str(rank), *row) for rank, row in enumerate(rows)]
    return table("Ranks", ("rank", *(name for name, _ in columns)), numbered) if numbered else None


def rollbacks(summary: Summary) -> Html | None:
    """A row for each return to a checkpoint; None if there was none."""
    kinds = ("exact", "local")
    rows = [
        (str(x.step), x.reason, str(x.to), *(_cell(x.rates.get(kind), "{:g}") for kind in kinds))
        for x in summary.rollbacks
    ]
    times = [f"{kind} steps times" for kind in kinds]
    header = ("diverged at step", "reason", "back to step", *times)
    return table("Roll-backs", header, rows) if rows else None


def cuts(summary: Summary) -> Html | None:
    """A row for each cut; None for a run without cuts."""
    rows = [
        (str(number), name or UNKNOWN, _cell(residual, "{:.3g}"))
        for number, (name, residual) in enumerate(zip_longest(summary.cuts, summary.residual), 1)
    ]
    header = ("cut", "before unit", "residual ‖λ - x‖ / ‖x‖")
    return table("Cuts", header, rows) if rows else None


def amount(size: float | None) -> str:
    """A number of bytes with three digits and a unit."""
    if size is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _cell(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)
