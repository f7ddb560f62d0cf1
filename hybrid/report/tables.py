"""The facts of a run as tables."""

from itertools import zip_longest

from hybrid.report.page import Html, table
from hybrid.report.records import Summary

UNKNOWN = "-"


def facts(summary: Summary, ended: bool) -> Html:
    """What was run and how it went; rows of which nothing is known are left out."""
    rows = [
        ("solver", summary.solver),
        ("model", summary.model),
        ("data", summary.data),
        ("blocks", _blocks(summary)),
        ("replicas", summary.replicas),
        ("epochs" if ended else "epochs asked for", summary.epochs),
        ("seed", summary.seed),
        ("test accuracy", _with(summary.test_accuracy, "{:.2%}")),
        ("training", _with(summary.train_seconds, "{:.1f} s")),
        ("of it, serial phases", _with(summary.serial_seconds, "{:.1f} s")),
        ("of it, parallel phases", _with(summary.parallel_seconds, "{:.1f} s")),
        ("images a second", _with(summary.images_per_second, "{:,.1f}")),
        ("returns to serial training", summary.returns_to_serial),
        (
            "waited for checkpoints",
            _with(max(summary.checkpoint_seconds, default=None), "{:.2f} s"),
        ),
    ]
    shown = [(name, str(value)) for name, value in rows if value is not None]
    return table("Run" if ended else "Run so far", (), shown)


def ranks(summary: Summary) -> Html | None:
    """A row a rank; None if the run does not say."""
    columns = (summary.idle_share, summary.bytes_sent, summary.peak_memory_bytes)
    rows = [
        (
            str(rank),
            _with(idle, "{:.1%}") or UNKNOWN,
            amount(sent),
            amount(peak),
        )
        for rank, (idle, sent, peak) in enumerate(zip_longest(*columns))
    ]
    header = ("rank", "idle share", "sent", "peak memory")
    return table("Ranks", header, rows) if rows else None


def rollbacks(summary: Summary) -> Html | None:
    """A row a return to a checkpoint; None if there was none."""
    rows = [
        (
            str(back.step),
            back.reason,
            str(back.to),
            *(_with(back.rates.get(kind), "{:g}") or UNKNOWN for kind in ("exact", "local")),
        )
        for back in summary.rollbacks
    ]
    header = (
        "diverged at step",
        "reason",
        "back to step",
        "exact steps times",
        "local steps times",
    )
    return table("Roll-backs", header, rows) if rows else None


def cuts(summary: Summary) -> Html | None:
    """A row a cut; None for a run without cuts."""
    rows = [
        (str(number), name or UNKNOWN, _with(residual, "{:.3g}") or UNKNOWN)
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


def _blocks(summary: Summary) -> str | None:
    if summary.blocks is None:
        return None
    before = f", cut before {', '.join(summary.cuts)}" if summary.cuts else ""
    return f"{summary.blocks}{before}"


def _with(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)
