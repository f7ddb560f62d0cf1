"""The report of a run of `hybrid rl`: returns against environment steps, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from pydantic import BaseModel, Field

from hybrid.report.curves import png
from hybrid.report.page import Html, heading, note, page, picture, row, table
from hybrid.report.records import checked, read_lines
from hybrid.rl.resolve import load
from hybrid.rl.settings import RlSettings

_BLUE, _ORANGE, _GREY = "#2b6ca3", "#d9822b", "#999999"
_LOSSES = ("prediction", "critic", "policy", "entropy", "alpha")


class Line(BaseModel):
    """A line of metrics.jsonl: an episode, an evaluation, or the losses since the one before."""

    step: int = Field(ge=0, lt=2**53)
    phase: str
    value: float | None = Field(default=None, alias="return")
    returns: list[float] = []
    prediction: float | None = None
    critic: float | None = None
    policy: float | None = None
    entropy: float | None = None
    alpha: float | None = None


class Summary(BaseModel):
    """summary.json, as far as the report tells of it."""

    value: float = Field(alias="return")
    updates: int
    blocks: int
    train_seconds: float
    steps_per_second: float | None
    updates_per_second: float | None
    idle_share: list[float]


def content(run: Path) -> bytes:
    """The page; ValueError for a file that cannot be read."""
    rl = load(run / "config.toml", {}).rl
    lines = read_lines(run / "metrics.jsonl", Line)
    path = run / "summary.json"
    ended = path.is_file()
    known = _facts(rl, checked(Summary, path.read_bytes(), path) if ended else None)
    parts = [] if ended else [note(f"This run has not ended: it got to step {lines[-1].step}.")]
    drawn = [
        picture(_returns(lines), "returns against environment steps", "Return"),
        *(_losses(lines, name) for name in _LOSSES),
    ]
    curves = row([one for one in drawn if one is not None])
    title = f"{run.resolve().name}: {rl.env}, width {rl.width}"
    return page(title, [*parts, row([known]), heading(2, "Curves"), curves])


def _facts(rl: RlSettings, summary: Summary | None) -> Html:
    features = f"{rl.units} units in {rl.layers} layers, twice" if rl.representation else "none"
    rows = [
        ("environment", rl.env),
        ("environment steps", f"{rl.steps:,}"),
        ("actors", f"{rl.actors}, {rl.lag} updates behind"),
        ("representation", features),
        ("seed", str(rl.seed)),
    ]
    if summary is not None:
        rows += [
            ("return", f"{summary.value:.1f}"),
            ("updates", f"{summary.updates:,}"),
            ("training", f"{summary.train_seconds:.1f} s"),
            ("environment steps a second", f"{summary.steps_per_second or 0:.1f}"),
            ("updates a second", f"{summary.updates_per_second or 0:.1f}"),
            ("ranks", str(summary.blocks)),
            ("idle share of each", ", ".join(f"{share:.0%}" for share in summary.idle_share)),
        ]
    return table("Run" if summary else "Run so far", (), rows)


def _returns(lines: Sequence[Line]) -> bytes:
    """Episodes of training as dots; of evaluations the mean, and the least and the greatest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.3), layout="constrained")
    axes = figure.subplots()
    episodes = [(x.step, x.value) for x in lines if x.phase == "episode"]
    tested = [x for x in lines if x.phase == "evaluation" and x.returns]
    axes.plot(*zip(*episodes, strict=True) if episodes else ([], []), ".", color=_GREY, ms=3)
    steps = [x.step for x in tested]
    axes.fill_between(
        steps, [min(x.returns) for x in tested], [max(x.returns) for x in tested], alpha=0.2
    )
    axes.plot(steps, [x.value or 0.0 for x in tested], color=_BLUE, marker=".", label="evaluation")
    axes.plot([], [], ".", color=_GREY, label="training")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return of an episode")
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.legend(frameon=False, fontsize="small", ncols=2, loc=(0, 1.02))
    return png(figure)


def _losses(lines: Sequence[Line], name: str) -> Html | None:
    """One quantity of the updates; None where there is none."""
    from matplotlib.figure import Figure

    found = [(x.step, getattr(x, name)) for x in lines if x.phase == "learn"]
    shown = [(step, value) for step, value in found if value is not None and isfinite(value)]
    if not shown:
        return None
    figure = Figure(figsize=(5.6, 3.3), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*shown, strict=True), color=_ORANGE)
    axes.set_xlabel("environment steps")
    if name in ("prediction", "critic", "alpha"):
        axes.set_yscale("log")
    axes.grid(color="#e4e4e4", linewidth=0.6)
    titles = {"entropy": "Entropy of the policy, nats", "alpha": "Temperature"}
    title = titles.get(name, f"Loss: {name}")
    return picture(png(figure), title, title)
