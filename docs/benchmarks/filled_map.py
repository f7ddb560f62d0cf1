"""The fastest way to train, link by link: simulated rates, weighed by what a step is worth.

    python docs/benchmarks/filled_map.py rates [--models resnet20 wrn-16-4 resnet18 gpt-8-256]
    python docs/benchmarks/filled_map.py table
    python docs/benchmarks/filled_map.py picture

`rates`: units are timed once on this machine, one thread; the methods' real programs then run on
stand-ins that let that time go by, on 2, 4 and 8 virtual ranks and links of 10 Mb/s to 400 Gb/s
(one machine's memory), as `hybrid plan` does. Mini-batches of 128 images in 8 parts; of 32 texts
of 128 bytes in 4. Cuts are balanced by measured time, as far as units allow. Cells that
filled_map.json has are not repeated.

`table` and `picture` weigh each rate by the progress of a step over an exact one: of late gradients
as `hybrid plan` has it (tolerance.md), of local steps WORTH, of replicas that talk every 8 or 16
steps PARTED, all measured on ResNets. The same WORTH and PARTED stand for the GPT, unmeasured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybrid.bench.plan.planner import Planner
from hybrid.bench.recipes import BASE, Recipe
from hybrid.data import Data, Texts
from hybrid.files import write_atomically
from hybrid.links import Network
from hybrid.networks import models
from hybrid.settings.resolve import resolve
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop
from hybrid.solvers.exact.pipeline import WireFormat
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.training import build

RAW = Path(__file__).with_suffix(".json")
LINKS = {
    "10 Mb/s": (1e7, 1e-4),
    "100 Mb/s": (1e8, 1e-4),
    "1 Gb/s": (1e9, 1e-4),
    "10 Gb/s": (1e10, 1e-5),
    "memory": (4e11, 1e-6),
}
"""Bits a second, and latency in seconds."""
FORMATS: tuple[WireFormat, ...] = ("float32", "int8")
WORTH = 0.35
"""Progress of local steps over that of the pipeline's on as many samples: filled_waits.py."""
PARTED = 0.73
"""Of replicas by local-sgd and diloco over a common step: strategies.md, two replicas."""
BLOCKS = "ddg", "fdg", "filled"
LENGTH, TEXTS = 128, 32


def recipes(m: int) -> list[Recipe]:
    """Ways to train in blocks."""
    made = []
    for form in FORMATS:
        made.append(Recipe(f"flushed, {form}", Backprop(micro_batches=m, messages=form)))
        for kind in (DDG, FDG):
            solver = kind(micro_batches=m, messages=form)
            made.append(Recipe(f"{kind.name}, {form}", solver))
            filled = Recipe(f"{kind.name} filled, {form}", solver, fill=AugmentedLagrangian())
            made.append(filled)
    return made


SYNCS = {
    "replicas, float32": AllReduce(),
    "replicas, int8": AllReduce(messages="int8"),
    "replicas, local-sgd": LocalSGD(steps=8),
    "replicas, diloco": DiLoCo(steps=16),
}


def planner_of(model: str) -> Planner:
    """With the units' measured times, on mini-batches of random samples."""
    text = model.startswith("gpt")
    asked: dict[str, Any] = {
        "model": {"name": model},
        "data": {"name": "synthetic"},
        "train": {"threads": 1, "batch_size": TEXTS if text else 128},
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
    return Planner(settings, network, samples, Network())


def rates(names: list[str]) -> None:
    torch.set_num_threads(1)
    for model in names:
        planner = planner_of(model)
        m = 4 if model.startswith("gpt") else 8
        base = planner.predict(planner.blocks(1), BASE).images_per_second
        for K in (2, 4, 8):
            if planner.subject.most < K:
                continue
            blocks = planner.blocks(K)
            for link, (bits, latency) in LINKS.items():
                known = json.loads(RAW.read_text()) if RAW.exists() else {}
                cell = f"{model}, K={K}, {link}"
                if cell in known:
                    continue
                planner.network = Network(bits / 8, latency)
                found: dict[str, Any] = {}
                for recipe in recipes(m):
                    made = planner.predict(blocks, recipe, steps=2)
                    found[recipe.name] = _row(made, base)
                for name, sync in SYNCS.items():
                    own = replace(BASE, sync=sync)
                    found[name] = _row(planner.predict(planner.blocks(1), own, 2, replicas=K), base)
                known = json.loads(RAW.read_text()) if RAW.exists() else {}
                known[cell] = found
                write_atomically(RAW, json.dumps(known, indent=1) + "\n")
                print(cell, {k: round(v["speed_up"], 2) for k, v in found.items()}, flush=True)


def _row(made: Any, base: float) -> dict[str, float]:
    """The rate over one rank's, the progress of a delayed step, and the share of local steps."""
    solver = made.recipe.solver
    late = solver.progress(made.blocks, made.batch_size, made.optimizer)
    return {
        "speed_up": made.images_per_second / base,
        "progress": 1.0 if solver.exact else late,
        "local": made.local_share,
        "idle": max(made.idle_share),
    }


def weighed(name: str, row: dict[str, float | None]) -> float:
    """Progress a second over one rank's; 0 where what the delay costs is not known."""
    rate, late, local = row["speed_up"], row["progress"], row["local"]
    assert rate is not None
    if name.endswith(("local-sgd", "diloco")):
        return PARTED * rate
    return rate * (late or 0.0) * (1 + WORTH * (local or 0.0))


GROUPS = {
    "one rank": (),
    "replicas": ("replicas, float32", "replicas, int8"),
    "local-sgd, diloco": ("replicas, local-sgd", "replicas, diloco"),
    "flushed": tuple(f"flushed, {form}" for form in FORMATS),
    "ddg, fdg": tuple(f"{kind}, {form}" for kind in ("ddg", "fdg") for form in FORMATS),
    "filled": tuple(f"{kind} filled, {form}" for kind in ("ddg", "fdg") for form in FORMATS),
}


def of_cell(found: dict[str, dict[str, float | None]]) -> dict[str, tuple[float, str]]:
    """By group: the best in it, and its name."""
    found, best = settled(found), {"one rank": (1.0, "one rank")}
    for group, names in GROUPS.items():
        if names:
            best[group] = max((weighed(name, found[name]), name) for name in names)
    return best


def settled(found: dict[str, dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """The rows, of which those without any local step are the unfilled ones, bit for bit."""
    return {
        name: row if row["local"] or " filled" not in name else found[name.replace(" filled", "")]
        for name, row in found.items()
    }


def table() -> None:
    known = json.loads(RAW.read_text())
    names = list(GROUPS)
    print(f"| network, K, link | {' | '.join(names[1:])} | first | filled over the next |")
    print("|---|" + "---|" * (len(names) + 1))
    first = near = blocks = ahead = 0
    for cell, found in known.items():
        best = of_cell(found)
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
        cells = " | ".join(f"{best[g][0]:.2f}" for g in names[1:])
        print(f"| {cell} | {cells} | {winner[1][1]} | {ratio:.2f} |")
    print(
        f"\n{len(known)} cells; blocks are right in {blocks}; there filled is first or within 3 % "
        f"in {near}, first in {first}, first by 10 % in {ahead}"
    )


def picture() -> None:
    from matplotlib.figure import Figure

    known = json.loads(RAW.read_text())
    networks = list(dict.fromkeys(cell.split(",")[0] for cell in known))
    colors = dict(
        zip(GROUPS, ("#bbbbbb", "#2b6ca3", "#7fb2d9", "#e8c87a", "#d9822b", "#3a9d6e"), strict=True)
    )
    figure = Figure(figsize=(2.75 * len(networks), 3.6), layout="constrained")
    for axes, network in zip(
        figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True
    ):
        for row, link in enumerate(LINKS):
            for column, K in enumerate((2, 4, 8)):
                found = known.get(f"{network}, K={K}, {link}")
                if found is None:
                    continue
                best = of_cell(found)
                order = sorted(best.items(), key=lambda item: -item[1][0])
                winner, (value, _) = order[0]
                margin = value / order[1][1][0]
                axes.add_patch(_tile(column, row, colors[winner]))
                axes.text(column, row, f"{value:.2f}\n+{margin - 1:.0%}", ha="center", va="center")
        axes.set_xlim(-0.5, 2.5)
        axes.set_ylim(len(LINKS) - 0.5, -0.5)
        axes.set_xticks(range(3), ["K=2", "4", "8"])
        axes.set_yticks(range(len(LINKS)), list(LINKS) if network == networks[0] else [])
        axes.set_title(network, fontsize="medium")
        axes.tick_params(length=0)
    handles = [_tile(0, 0, color) for color in colors.values()]
    figure.legend(
        handles, list(colors), ncols=6, loc="outside lower center", frameon=False, fontsize="small"
    )
    site = Path(__file__).parents[1] / "site"
    figure.savefig(site / "filled-map.png", dpi=110)


def _tile(column: float, row: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["rates", "table", "picture"])
    parser.add_argument(
        "--models", nargs="+", default=["resnet20", "wrn-16-4", "gpt-8-256", "resnet18"]
    )
    options = parser.parse_args()
    if options.what == "rates":
        rates(options.models)
    elif options.what == "table":
        table()
    else:
        picture()


if __name__ == "__main__":
    main()
