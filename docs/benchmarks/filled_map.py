"""The fastest way to train, link by link: calculated rates, weighed by what a step is worth.

    python docs/benchmarks/filled_map.py rates [--models resnet20 wrn-16-4 resnet18 gpt-8-256]
    python docs/benchmarks/filled_map.py check --models resnet20
    python docs/benchmarks/filled_map.py table
    python docs/benchmarks/filled_map.py picture

`rates`: blocks, packing and optimizer steps are timed once on this machine, one thread. Pipelines
then take what `budget.Pipeline` says (a flushed one what its order takes), and replicas what
`hybrid plan` simulates, on 2, 4 and 8 ranks and links of 10 Mb/s to 400 Gb/s (one machine's
memory). Mini-batches have 128 images, or 32 texts of 128 bytes. Each way has the better of two
balanced cuts, between whole units and anywhere (`split.balance=measured`), and 2, 4 or 8
micro-batches. DiLoCo sends int8 once in H steps: its rate follows from those with H = 8 and 16.
`check` runs the real programs on virtual links of 100 Mb/s and 1 Gb/s beside it.

`table` and `picture` weigh each rate by the progress of a step over an exact one. On ResNets: of
late gradients as `hybrid plan` has it (tolerance.md), of replicas that talk every 8 or 16 steps
PARTED. On the GPT all are measured (diloco.py, codecs.py), in one training each. Of local steps
WORTH, which the GPT has unmeasured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from math import ceil
from pathlib import Path
from typing import Any

import diloco
import measuring
import torch
from block_times import Timed

from hybrid.bench.plan.planner import Planner
from hybrid.bench.recipes import BASE, Recipe
from hybrid.data import Data, Texts
from hybrid.links import LinkSpeed
from hybrid.networks import models
from hybrid.networks.blocks import Blocks
from hybrid.settings.resolve import resolve
from hybrid.solvers import DDG, FDG, AugmentedLagrangian
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.training import build

RAW = measuring.Raw(__file__)
LINKS = {
    "10 Mb/s": (1e7, 1e-4),
    "100 Mb/s": (1e8, 1e-4),
    "1 Gb/s": (1e9, 1e-4),
    "10 Gb/s": (1e10, 1e-5),
    "memory": (4e11, 1e-6),
}
"""Bits a second, and latency in seconds."""
FORMATS = ("float32", "int8", "int8 / int4", "int4 / int4")
"""Of activations / of adjoints."""
CODED = {"int8 / int4": 0.98, "int4 / int4": 0.92}
"""Progress of a step with these formats over one with float32: codecs.py, on the GPT, 3 seeds."""
PARTS = 2, 4, 8
WORTH = 0.3
"""Progress of local steps over that of the pipeline's on as many samples: filled_waits.py."""
PARTED = 0.73
"""Of replicas by local-sgd and diloco over a common step: strategies.md, two replicas."""
SELDOM = 25, 50, 100, 200
"""H of the GPT's replicas."""
LENGTH, TEXTS = 128, 32


SYNCS = {
    "replicas, float32": AllReduce(),
    "replicas, int8": AllReduce(messages="int8"),
    "replicas, local-sgd": LocalSGD(steps=8),
    "replicas, diloco": DiLoCo(steps=16, messages="int8"),
}


def planner_of(model: str) -> Planner:
    """With the units' measured times, on mini-batches of random samples."""
    text = model.startswith("gpt")
    asked: dict[str, Any] = {
        "model": {"name": model},
        "data": {"name": "synthetic"},
        "train": {"threads": 1, "batch_size": TEXTS if text else 128},
        "split": {"balance": "measured"},
        "optimizer": {"name": "adamw" if text else "sgd"},
    }
    if text:
        asked["optimizer"]["lr"] = 0.001
    settings = resolve(asked)
    torch.manual_seed(0)
    samples: Data
    if text:
        bytes_ = torch.randint(256, (TEXTS * 40 + LENGTH,), dtype=torch.uint8)
        samples = Texts(bytes_, torch.arange(TEXTS * 40 - 1), LENGTH)
        network = models.build(model, 256, length=LENGTH)
    else:
        samples, _ = build.load_own(settings.data)
        network = build.build_model(settings, samples)
    return Planner(settings, network, samples, LinkSpeed())


def rates(names: list[str]) -> None:
    torch.set_num_threads(1)
    for model in names:
        planner = planner_of(model)
        base = planner.predict(planner.blocks(1), BASE).images_per_second
        for K in (2, 4, 8):
            ways = [Timed(planner, cut, m) for cut in both_cuts(planner, K) for m in PARTS]
            for link, (bits, latency) in LINKS.items():
                network = planner.network = LinkSpeed(bits / 8, latency)
                rows = best_of(model, (in_blocks(planner, way, network, base) for way in ways))
                for name, sync in SYNCS.items():
                    recipe = replace(BASE, sync=sync)
                    prediction = planner.predict(planner.blocks(1), recipe, 2, replicas=K)
                    gain = prediction.images_per_second / base
                    rows[name] = {"speed_up": gain, "local": 0.0, "K": K}
                if model.startswith("gpt"):
                    eight, sixteen = (
                        1
                        / planner.predict(
                            planner.blocks(1),
                            replace(BASE, sync=DiLoCo(steps=H, messages="int8")),
                            2,
                            replicas=K,
                        ).images_per_second
                        for H in (8, 16)
                    )
                    for H in SELDOM:
                        step = 2 * sixteen - eight + 16 * (eight - sixteen) / H
                        row = {"speed_up": 1 / step / base, "local": 0.0, "K": K}
                        rows[f"replicas, diloco, H={H}"] = row
                RAW.keep(f"{model}, K={K}, {link}", value=rounded(rows))
                print(model, K, link, {k: round(v["speed_up"] or 0, 2) for k, v in rows.items()})


def both_cuts(planner: Planner, K: int) -> list[Blocks]:
    """Between whole units, and anywhere; one where they are the same."""
    found = dict[tuple[str, ...], Blocks]()
    for inside in (False, True):
        try:
            cut = planner.blocks(K, ceil(planner.size / 4), inside=inside)
        except ValueError:  # too few units
            continue
        found[tuple(cut.cuts)] = cut
    return [*found.values()]


Rows = dict[str, dict[str, Any]]


def rounded(rows: Rows) -> Rows:
    """To four places."""
    return {
        way: {of: round(x, 4) if isinstance(x, float) else x for of, x in row.items()}
        for way, row in rows.items()
    }


def best_of(model: str, tables: Iterable[Rows]) -> Rows:
    """Each way in the cuts and the number of parts in which it makes the most progress."""
    best: Rows = {}
    for rows in tables:
        for name, row in rows.items():
            if name not in best or weighed(model, name, row) > weighed(model, name, best[name]):
                best[name] = row
    return best


def in_blocks(planner: Planner, timed: Timed, network: LinkSpeed, base: float) -> Rows:
    """By way: the rate over one rank's, the progress of a late step, the share of local steps."""
    rows: Rows = {}
    K, size, m = len(timed.costs), planner.size, timed.m
    here = {"K": K, "m": m, "cuts": timed.blocks.cuts}
    for form in FORMATS:
        gain = size / timed.flushed(form, network) / base
        rows[f"flushed, {form}"] = {"speed_up": gain, "progress": 1.0, "local": 0.0, **here}
        for kind in (DDG, FDG):
            solver = kind(micro_batches=m)
            pipeline = timed.pipeline(solver, form, network)
            late = solver.progress(K, size, planner.settings.optimizer.name)
            steps = solver.steps_late(0, K, size)
            local = sum(map(sum, pipeline.fit())) / (K * timed.n)
            gain = size / (m * pipeline.tick()) / base
            row = {"speed_up": gain, "progress": late, "late": steps, "local": 0.0, **here}
            rows[f"{solver.name}, {form}"] = row
            rows[f"{solver.name} filled, {form}"] = {**row, "local": local}
    return rows


def check(names: list[str]) -> None:
    """Beside the calculated rates those of the real programs on virtual links."""
    torch.set_num_threads(1)
    K, m, lines = 4, 8, []
    for model in names:
        planner = planner_of(model)
        base = planner.predict(planner.blocks(1), BASE).images_per_second
        timed = Timed(planner, both_cuts(planner, K)[-1], m)
        for link, form, kind, fill in product(
            ("100 Mb/s", "1 Gb/s"), FORMATS[:3], (DDG, FDG), (None, AugmentedLagrangian())
        ):
            bits, latency = LINKS[link]
            planner.network = LinkSpeed(bits / 8, latency)
            way = f"{kind.name}{' filled' * (fill is not None)}, {form}"
            calculated = in_blocks(planner, timed, planner.network, base)[way]["speed_up"]
            up, _, down = form.partition(" / ")
            solver = kind(micro_batches=m, messages=up, adjoints=down)
            recipe = Recipe("row", solver, **({} if fill is None else {"fill": fill}))
            real = planner.predict(timed.blocks, recipe, steps=2)
            gain = f"{real.images_per_second / base:.2f}"
            cell = f"{model}, K={K}, {link}"
            lines.append((cell, way, f"{calculated:.2f}", gain, f"{real.local_share:.2f}"))
    measuring.show("network, K, link | way | calculated | virtual | local steps", lines)


def weighed(model: str, name: str, row: dict[str, Any]) -> float:
    """Progress a second over one rank's; 0 where what the delay costs is not known."""
    text, rate = model.startswith("gpt"), row["speed_up"]
    way, _, rest = name.partition(", ")
    if way == "replicas":
        if rest.startswith("diloco, H="):
            return rate * (parted(row["K"], int(rest.split("=")[1])) or 0.0)
        return rate * (1.0 if rest in FORMATS else 0.0 if text else PARTED)
    worth = (late_text(row["late"]) if text and "late" in row else row["progress"]) or 0.0
    return float(rate * worth * CODED.get(rest, 1.0) * (1 + WORTH * row["local"]))


@cache
def parted(replicas: int, H: int) -> float | None:
    """Progress of a step of the GPT's replicas by DiLoCo."""
    return diloco.progress(f"R={replicas}, H={H}")


@cache
def late_text(steps: float) -> float | None:
    """Progress of a step of the GPT that many steps late, between the delays that were measured."""
    measured = [(0.0, 1.0)]
    for title, delay in (("ddg, K=8", 7 / 8), ("fdg, int8, K=8", 14 / 8)):
        if (worth := diloco.progress(title)) is not None:
            measured.append((delay, worth))
    for (a, high), (b, low) in pairwise(measured):
        if a <= steps <= b:
            return high + (low - high) * (steps - a) / (b - a)
    return None


GROUPS = {
    "one rank": (),
    "replicas": ("replicas, float32", "replicas, int8"),
    "local-sgd, diloco": (
        *("replicas, local-sgd", "replicas, diloco"),
        *(f"replicas, diloco, H={H}" for H in SELDOM),
    ),
    "flushed": tuple(f"flushed, {form}" for form in FORMATS),
    "ddg, fdg": tuple(f"{kind}, {form}" for kind in ("ddg", "fdg") for form in FORMATS),
    "filled": tuple(f"{kind} filled, {form}" for kind in ("ddg", "fdg") for form in FORMATS),
}


def of_cell(cell: str, rows: Rows) -> dict[str, tuple[float, str]]:
    """By group: the best in it, and its name."""
    best = {"one rank": (1.0, "one rank")}
    for group, names in GROUPS.items():
        if known := [name for name in names if name in rows]:
            best[group] = max((weighed(cell, name, rows[name]), name) for name in known)
    return best


def impossible(cell: str, row: dict[str, float | None]) -> bool:
    """Whether a rate is above the number of ranks: its parts were timed at different moments."""
    return (row["speed_up"] or 0.0) > int(cell.split("K=")[1].split(",")[0])


def table() -> None:
    figures = RAW.read()
    names = list(GROUPS)
    print(f"| network, K, link | {' | '.join(names[1:])} | first | filled over the next |")
    print("|---|" + "---|" * (len(names) + 1))
    first = near = blocks = ahead = 0
    for cell, rows in figures.items():
        best = of_cell(cell, rows)
        others = {group: value for group, value in best.items() if group != "filled"}
        ratio = best["filled"][0] / max(others.values())[0]
        winner = max(best.items(), key=lambda item: item[1][0])
        right = max(best[g][0] for g in ("flushed", "ddg, fdg", "filled")) >= max(
            best[g][0] for g in ("one rank", "replicas", "local-sgd, diloco")
        )
        blocks += right
        near += right and ratio >= 0.97
        first += right and ratio >= 1
        ahead += right and ratio >= 1.1
        high = {way for way, row in rows.items() if impossible(cell, row)}
        cells = " | ".join(f"{best[g][0]:.2f}{' !' * (best[g][1] in high)}" for g in names[1:])
        print(f"| {cell} | {cells} | {winner[1][1]} | {ratio:.2f} |")
    print("\n!: the rate, before it is weighed, is above the number of ranks, which cannot be")
    print(
        f"{len(figures)} cells; blocks are right in {blocks}; there filled is first or within 3 % "
        f"in {near}, first in {first}, first by 10 % in {ahead}"
    )


def picture() -> None:
    from matplotlib.figure import Figure

    figures = RAW.read()
    networks = list(dict.fromkeys(cell.split(",")[0] for cell in figures))
    colors = dict(
        zip(GROUPS, ("#bbbbbb", "#2b6ca3", "#7fb2d9", "#e8c87a", "#d9822b", "#3a9d6e"), strict=True)
    )
    figure, marked = Figure(figsize=(2.75 * len(networks), 3.6), layout="constrained"), False
    for axes, network in zip(
        figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True
    ):
        for row, link in enumerate(LINKS):
            for column, K in enumerate((2, 4, 8)):
                cell = f"{network}, K={K}, {link}"
                rows = figures.get(cell)
                if rows is None:
                    continue
                best = of_cell(cell, rows)
                if best["filled"][0] <= 1.005 * best["ddg, fdg"][0]:
                    del best["filled"]  # nobody waits, and it is the same
                order = sorted(best.items(), key=lambda item: -item[1][0])
                winner, (value, way) = order[0]
                margin = value / order[1][1][0]
                high = impossible(cell, rows.get(way, {"speed_up": 1.0}))
                marked |= high
                axes.add_patch(_tile(column, row, colors[winner]))
                text = axes.text(column, row, f"{value:.2f}{'!' * high}\n+{margin - 1:.0%}")
                text.set(ha="center", va="center")
                text.set_color("white" if winner == "replicas" else "black")  # on its dark blue
        axes.set_xlim(-0.5, 2.5)
        axes.set_ylim(len(LINKS) - 0.5, -0.5)
        axes.set_xticks(range(3), ["K=2", "4", "8"])
        axes.set_yticks(range(len(LINKS)), list(LINKS) if network == networks[0] else [])
        axes.set_title(network, fontsize="medium")
        axes.tick_params(length=0)
    handles = [_tile(0, 0, color) for color in colors.values()]
    names = [*list(colors)[:-2], "filled = ddg, fdg: nobody waits", "filled"]
    place = {"ncols": 6, "loc": "outside lower center", "frameon": False, "fontsize": "small"}
    legend = figure.legend(handles, names, **place)
    if marked:
        legend.set_title("!: a calculated rate above the number of ranks, which cannot be")
    site = Path(__file__).parents[1] / "site"
    figure.savefig(site / "filled-map.png", dpi=110)


def _tile(column: float, row: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor="white")


def main() -> None:
    models = ["resnet20", "wrn-16-4", "gpt-8-256", "resnet18"]
    options = measuring.options(__doc__, what=("rates", "check", "table", "picture"), models=models)
    if options.what in ("rates", "check"):
        {"rates": rates, "check": check}[options.what](options.models)
    else:
        {"table": table, "picture": picture}[options.what]()


if __name__ == "__main__":
    main()
