"""The report of a run of `hybrid rl`: returns against environment steps, and losses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from pydantic import BaseModel, Field

from hybrid.files import read_whole
from hybrid.folder.runfolder import MOST_BYTES
from hybrid.report.page import (
    BLUE,
    GREY,
    ORANGE,
    Chart,
    Html,
    drawing,
    heading,
    note,
    page,
    row,
    table,
)
from hybrid.report.records import checked, read_lines
from hybrid_rl.resolve import is_run, load

__all__ = ["content", "is_run"]
QUANTITIES = {
    "prediction": "Loss of the prediction",
    "critic": "Loss of the critics",
    "policy": "Loss of the policy",
    "entropy": "Entropy of the policy, nats",
    "alpha": "Temperature",
}
"""What an update has, and its title."""
LOGARITHMIC = ("prediction", "critic", "alpha")


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
    """What the report shows of summary.json."""

    value: float = Field(alias="return")
    updates: int
    blocks: int
    train_seconds: float
    steps_per_second: float | None
    updates_per_second: float | None
    idle_share: list[float]


def content(run: Path) -> bytes:
    """The page; ValueError for a file that cannot be read."""
    rl = load(None, {}, base=run / "config.toml").rl
    lines = read_lines(run / "metrics.jsonl", Line)
    facts = {
        "environment": rl.env,
        "environment steps": f"{rl.steps:,}",
        "actors": f"{rl.actors}, {rl.lag} updates behind",
        "representation": f"{rl.units} units in {rl.layers} layers" if rl.representation else "-",
        "seed": str(rl.seed),
    }
    path = run / "summary.json"
    parts = [note(f"This run has not ended: it has come to step {lines[-1].step}.")]
    if os.path.lexists(path):
        facts |= _outcome(checked(Summary, read_whole(path, MOST_BYTES), path))
        parts = []
    drawn = [
        drawing(_returns(lines), "Return"),
        *(one for name in QUANTITIES if (one := _losses(lines, name)) is not None),
    ]
    parts += [row([table("Run", (), list(facts.items()))]), heading("Curves"), row(drawn)]
    return page(f"{run.resolve().name}: {rl.env}, width {rl.width}", parts)


def _outcome(summary: Summary) -> dict[str, str]:
    return {
        "return": f"{summary.value:.1f}",
        "updates": f"{summary.updates:,}",
        "training": f"{summary.train_seconds:.1f} s",
        "environment steps per second": f"{summary.steps_per_second or 0:.1f}",
        "updates per second": f"{summary.updates_per_second or 0:.1f}",
        "ranks": str(summary.blocks),
        "idle share of each rank": ", ".join(f"{share:.0%}" for share in summary.idle_share),
    }


def _returns(lines: Sequence[Line]) -> Chart:
    """Episodes of training as dots; the mean of an evaluation, and a band of all its returns."""
    chart = Chart("environment steps", "return of an episode")
    episodes = [(x.step, x.value or 0.0) for x in lines if x.phase == "episode"]
    tested = [x for x in lines if x.phase == "evaluation" and x.returns]
    if episodes:
        steps, values = zip(*episodes, strict=True)
        chart.curve(steps, values, GREY, "training", lines=False)
    if tested:
        when = [x.step for x in tested]
        low, high = [min(x.returns) for x in tested], [max(x.returns) for x in tested]
        chart.band(when, low, high, BLUE)
        chart.curve(when, [x.value or 0.0 for x in tested], BLUE, "evaluation")
    return chart


def _losses(lines: Sequence[Line], name: str) -> Html | None:
    """One quantity of the updates; None where there is none."""
    title = QUANTITIES[name]
    found = [(x.step, getattr(x, name)) for x in lines if x.phase == "learn"]
    shown = [(step, value) for step, value in found if value is not None and isfinite(value)]
    if not shown:
        return None
    chart = Chart("environment steps", title, log=name in LOGARITHMIC)
    steps, values = zip(*shown, strict=True)
    chart.curve(steps, values, ORANGE)
    return drawing(chart, title)
