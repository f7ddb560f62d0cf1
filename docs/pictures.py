"""Draw the pictures of the documentation, from runs made here and from the raw figures:

    python docs/pictures.py [timelines] [blocks] [accuracy] [speed] [memory]

They go to docs/site/. Runs are on the virtual clock, whose ranks take turns on one core: what a
timeline shows is how long each piece took alone. A minute in all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import timeline
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from hybrid import Trainer, data, split
from hybrid.folder import traces
from hybrid.networks import models
from hybrid.settings.config import LinkSettings, OptimizerSettings, TrainSettings
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop, Solver
from hybrid.solvers.exact.exact_pass import PassSettings

DOCS = Path(__file__).parent
SITE, RAW = DOCS / "site", DOCS / "benchmarks"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b6ca3", "#d9822b", "#3a9d6e", "#7a4fa3", "#777777"
INK, BURNT, TEAL = "#333333", "#a85708", "#00694e"
"""Of texts and lines, dark enough on white."""
SHADES = {"F": ("#cfe3f4", "#8ebde3"), "B": ("#fde0bf", "#f4b571")}
"""Of passes, for mini-batches in turn."""

TIMELINES: dict[str, tuple[Solver, dict[str, Any], int]] = {
    "backprop": (Backprop(), {}, 3),
    "1f1b": (Backprop(micro_batches=8), {}, 3),
    "no-bubble": (DDG(micro_batches=8), {}, 3),
    "waits": (
        DDG(micro_batches=8, messages="bfloat16"),
        {
            "fill": AugmentedLagrangian(),
            "links": LinkSettings(kind="virtual", gigabits_per_second=0.1),
        },
        2,
    ),
    "windows": (
        AugmentedLagrangian(),
        {"window": 3, "correction": PassSettings(micro_batches=8)},
        6,
    ),
}
"""Solver, settings, steps to show."""


def run(folder: Path, solver: Solver, steps: int, blocks: int = 4, **settings: Any) -> Path:
    """A run of ResNet-20 on images of CIFAR's size."""
    torch.manual_seed(0)
    images, test = data.load("synthetic", limit=128 * steps)
    Trainer(
        split(models.build("resnet20", 10, 3, 32), blocks, sample=torch.zeros(8, 3, 32, 32)),
        solver,
        train=TrainSettings(epochs=1, threads=1),
        optimizer=OptimizerSettings(lr=0.1),
        **{"links": LinkSettings(kind="virtual"), **settings},
        out=folder,
        quiet=True,
    ).fit(images, test.take(128))
    return folder


def timelines() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, (solver, settings, steps) in TIMELINES.items():
            done = run(Path(folder) / name, solver, 12, **settings)
            save(bars_of(timeline.spans(traces.spans(done)), steps), f"timeline-{name}")


def bars_of(spans: list[timeline.Span], steps: int) -> Figure:
    """A row for each rank, for so many steps of the first one."""
    period = timeline.usual_period(spans, steps)
    assert period is not None
    shown = timeline.within(spans, period)
    height = 0.9 + 0.34 * len({span.rank for span in shown})
    figure = Figure(figsize=(11.4, height), layout="constrained")
    axes = figure.subplots()
    kinds = timeline.draw(axes, shown, period)
    axes.set_xlabel("ms, simulated")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=[Patch(color=timeline.COLORS[kind], label=kind) for kind in kinds],
        frameon=False,
        fontsize="small",
        ncols=7,
        loc="outside upper left",
    )
    return figure


def save(figure: Any, name: str) -> None:
    SITE.mkdir(exist_ok=True)
    figure.savefig(SITE / f"{name}.png", dpi=110)


def axes(width: float = 6.4, height: float = 3.6) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def blocks() -> None:
    """Blocks, cuts and what crosses them; below, what each rank does when."""
    figure = Figure(figsize=(8.4, 5.0), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1.05, 1))
    for drawn in (above, below):
        drawn.set_axis_off()
    _chain(above)
    _pipeline(below)
    save(figure, "blocks")


def _chain(drawn: Any) -> None:
    """Three blocks, and at their cuts the variables of the local steps, which are an option."""
    drawn.set_xlim(-0.6, 21.6)
    drawn.set_ylim(-0.1, 5.6)
    arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "linewidth": 1.4}

    def draw_arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> None:
        drawn.annotate("", end, start, arrowprops=arrow | {"color": color})

    for k in range(3):
        center = 4.1 + 6.4 * k
        box = {"boxstyle": "round,pad=0.9", "facecolor": "#eef1f4", "edgecolor": INK}
        drawn.text(center, 3.9, f"block {k}", ha="center", va="center", fontsize=12, bbox=box)
        drawn.text(center, 5.2, f"rank {k}", ha="center", fontsize=9.5, color=INK)
    for k in (1, 2):
        cut = 0.9 + 6.4 * k
        drawn.plot([cut, cut], [1.6, 5.0], color=INK, linestyle="--", linewidth=1)
        drawn.text(cut, 5.2, f"cut {k}", ha="center", fontsize=9.5, color=INK)
        draw_arrow((cut - 1.5, 4.3), (cut + 1.5, 4.3), BLUE)
        draw_arrow((cut + 1.5, 3.5), (cut - 1.5, 3.5), BURNT)
        option = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": TEAL}
        drawn.text(
            cut,
            1.45,
            f"$\\lambda_{k}$, $\\kappa_{k}$",
            ha="center",
            va="center",
            fontsize=13,
            color=TEAL,
            bbox=option | {"linestyle": "--"},
        )
        for side in (-1, 1):
            dashed = arrow | {"color": TEAL, "linestyle": "--", "linewidth": 1.1}
            drawn.annotate("", (cut + 2.6 * side, 3.0), (cut + 1.0 * side, 1.5), arrowprops=dashed)
    draw_arrow((1.0, 4.3), (2.5, 4.3), BLUE)
    drawn.text(0.8, 4.3, "data", ha="right", va="center", fontsize=10.5, color=INK)
    draw_arrow((20.0, 3.5), (18.5, 3.5), BURNT)
    drawn.text(20.2, 3.5, "loss", va="center", fontsize=10.5, color=INK)
    handles = [
        Line2D([], [], color=BLUE, label="outputs forward"),
        Line2D([], [], color=BURNT, label="gradients backward"),
        Line2D([], [], color=TEAL, linestyle="--", label="option: local steps of an idle rank"),
    ]
    drawn.legend(handles=handles, frameon=False, fontsize=9.5, ncols=3, loc="lower center")


def _pipeline(drawn: Any, blocks: int = 3, parts: int = 4, slots: int = 20) -> None:
    """The delayed pipeline, where a pass takes a slot: block k is d = K-1-k micro-batches late."""
    drawn.set_xlim(-2.6, slots + 0.8)
    drawn.set_ylim(blocks + 1.55, -0.35)
    for k in range(blocks):
        drawn.text(-0.3, k + 0.5, f"rank {k}", ha="right", va="center", fontsize=10.5, color=INK)
        for n in range(slots):
            # up the blocks and down again, a slot each; the first ones go ahead of backward passes
            forward = n + k if n < blocks - k else 2 * n + k
            for start, kind in ((forward, "F"), (2 * n + 2 * blocks - 1 - k, "B")):
                if start >= slots:
                    continue
                color = SHADES[kind][n // parts % 2]
                drawn.add_patch(
                    Rectangle((start + 0.03, k + 0.06), 0.94, 0.88, color=color, linewidth=0)
                )
                drawn.text(
                    start + 0.5, k + 0.5, f"{kind}{n}", ha="center", va="center", fontsize=10
                )
                if kind == "B" and n % parts == parts - 1:
                    drawn.plot([start + 1] * 2, [k + 0.02, k + 0.98], color="black", linewidth=3.2)
        drawn.text(slots + 0.2, k + 0.5, "…", va="center", fontsize=12, color=INK)
    drawn.annotate(
        "",
        (slots, blocks + 0.25),
        (0, blocks + 0.25),
        arrowprops={"arrowstyle": "->", "color": INK},
    )
    drawn.text(slots + 0.15, blocks + 0.25, "time", va="center", fontsize=9.5, color=INK)
    handles: list[Any] = [
        Patch(color=SHADES["F"][1], label="F: forward"),
        Patch(color=SHADES["B"][1], label="B: backward of a micro-batch"),
        Line2D([], [], color="black", linewidth=3.2, label="step, after a mini-batch"),
    ]
    drawn.legend(handles=handles, frameon=False, fontsize=9.5, ncols=3, loc="lower center")


def accuracy() -> None:
    """Test accuracy over simulated time, of trainings of 10 epochs and one of 30.

    A flushed pipeline and replicas have the gradients of one rank in as many micro-batches, so they
    share a training and differ in their rates.
    """
    trainings = json.loads((RAW / "to_the_end.json").read_text())["resnet20"]
    trainings["serial, SGD"] = json.loads((RAW / "delays-long.json").read_text())["serial"]
    timed = json.loads((RAW / "virtual_rates_muon.json").read_text())
    rates = {name.partition(", ")[2]: median(v) for name, v in timed.items() if "-20" in name}
    figure, drawn = axes()
    for row, rate, color, label in (
        ("serial, SGD", "serial by SGD", GREY, "one rank, SGD, 30 epochs"),
        ("flushed, Muon", "serial", PURPLE, "one rank, Muon"),
        ("flushed, Muon", "flushed, K=8", ORANGE, "flushed pipeline of 8, Muon"),
        ("ddg, Muon, extrapolated, K=8", "ddg, K=8", BLUE, "ddg on 8, Muon, extrapolated"),
        ("flushed, Muon", "8 replicas, 10 Gb/s", GREEN, "8 replicas, Muon, 10 Gb/s"),
    ):
        minutes = 50_000 / rates[rate] / 60
        points = [(minutes * epoch, 100 * a) for epoch, a in trainings[row]["0"]["curve"]]
        drawn.plot(*zip(*points, strict=True), color=color, marker=".", label=label)
    drawn.set_xscale("log")
    drawn.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    drawn.set_ylim(58, 92)
    drawn.set_xlabel("minutes of training, simulated")
    drawn.set_ylabel("test accuracy, %")
    drawn.legend(frameon=False, fontsize="small", loc="lower right")
    save(figure, "accuracy-over-time")


def speed() -> None:
    """Speed-up against K, and against the link's rate."""
    rates = json.loads((RAW / "virtual_rates.json").read_text())
    figure, drawn = axes()
    for row, (label, style, color) in {
        "ResNet-20, ddg, K={}, m=8": ("ResNet-20, no bubble, the default", "-", BLUE),
        "ResNet-20, flushed, K={}, m=8": ("ResNet-20, flushed pipeline", "--", BLUE),
        "ResNet-56, ddg, K={}, m=8": ("ResNet-56, no bubble", "-", ORANGE),
        "ResNet-56, flushed, K={}, m=8": ("ResNet-56, flushed pipeline", "--", ORANGE),
    }.items():
        base = rates[f"{row.partition(',')[0]}, serial"]
        points = [(1, 1.0)] + [
            (K, median(a / b for a, b in zip(rates[key], base, strict=True)))
            for K in (4, 8)
            if (key := row.format(K)) in rates
        ]
        drawn.plot(*zip(*points, strict=True), style, color=color, marker="o", label=label)
    drawn.plot([1, 8], [1, 8], ":", color=GREY, label="K times")
    drawn.set_xlabel("blocks K, 10 Gb/s, simulated")
    drawn.set_ylabel("images/s over serial training")
    drawn.legend(frameon=False, fontsize="small", handlelength=3)
    save(figure, "speed-up-blocks")
    links = json.loads((RAW / "appendix.json").read_text())
    rows = links["slow links: ResNet-20, m = 8, the run of the page"]["rows"]
    figure, drawn = axes()
    names = {"data parallel": GREY, "flushed pipeline": ORANGE, "no bubble": BLUE}
    for column, (name, color) in enumerate(names.items()):
        for K, style in ((2, "--"), (4, "-")):
            points = [
                (bits, float(str(rows[f"{K}, {rate}"][column]).split()[0]))
                for rate, bits in (("10 Mb/s", 1e7), ("100 Mb/s", 1e8), ("1 Gb/s", 1e9))
            ]
            drawn.plot(
                *zip(*points, strict=True),
                style,
                color=color,
                marker="o",
                label=f"{name}, K = {K}",
            )
    drawn.axhline(1, color="black", linewidth=0.8)
    drawn.set_xscale("log")
    drawn.set_xticks([1e7, 1e8, 1e9], ["10 Mb/s", "100 Mb/s", "1 Gb/s"])
    drawn.set_xlabel("rate of a link, simulated; best number format of messages")
    drawn.set_ylabel("images/s over one rank alone")
    drawn.legend(frameon=False, fontsize="small", handlelength=3)
    save(figure, "speed-up-links")


def memory() -> None:
    """What each of four blocks of ResNet-56 holds for backward passes."""
    peaks = json.loads((RAW / "held_memory.json").read_text())["peak_bytes"]
    figure, drawn = axes()
    rows = ("1F1B, m=8", "ddg, m=8", "fdg, m=8", "features-replay, m=8", "petra, m=8")
    for i, (row, color) in enumerate(zip(rows, (GREY, BLUE, ORANGE, GREEN, PURPLE), strict=True)):
        places = [k + 0.16 * (i - 2) for k in range(4)]
        drawn.bar(places, [b / 1e6 for b in peaks[row]], 0.15, color=color, label=row)
    drawn.set_xticks(range(4), [f"block {k}" for k in range(4)])
    drawn.set_ylabel("MB held at most")
    drawn.legend(frameon=False, fontsize="small")
    save(figure, "memory")


ALL = {each.__name__: each for each in (timelines, blocks, accuracy, speed, memory)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("which", nargs="*", default=list(ALL))
    for name in parser.parse_args().which:
        ALL[name]()


if __name__ == "__main__":
    main()
