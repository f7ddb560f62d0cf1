"""Where the hybrid pays: images/s on slow links, and what a local epoch must be worth to be first.

    python docs/benchmarks/slow_links.py [--models resnet20] [--micro-batches 8]

Units are timed once on this machine, one thread; the methods' real programs then run on stand-ins
that let that time go by, on virtual links of 10 Mb/s, 100 Mb/s and 1 Gb/s, 100 us (`hybrid plan`
does the same). Batch 128; ResNet-20, WRN-16-4, and ResNet-18 on images of 32 pixels, whose weights
(45 MB) outweigh what crosses a cut. Data parallelism is the ring's lower bound of time, as in plan.

A round of the hybrid trains a window of 16 mini-batches exactly, in one pipelined pass, and then
sweeps over it without a message. With rate r of images trained exactly and R that of the fastest
other method, it is first where a local epoch is worth more than R / r - 1 of an exact one, for
each sweep. Accuracy is another table's: methods that train on late gradients count in full.
The tables are of 8 micro-batches, and of 2 for ResNet-18. Cases that the JSON holds are not
repeated; all are printed.
"""

from __future__ import annotations

import measuring
import torch

from hybrid.bench.plan.planner import Planner
from hybrid.bench.recipes import BASE, Recipe
from hybrid.links import LinkSpeed
from hybrid.settings.config import RoundSettings
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.training import build

MODELS = ("resnet20", "wrn-16-4", "resnet18")
RATES = {"10 Mb/s": 1e7, "100 Mb/s": 1e8, "1 Gb/s": 1e9}
FORMATS = ("float32", "bfloat16", "int8")


def rows(m: int) -> list[Recipe]:
    """Every method in m micro-batches, in every format of its messages."""
    recipes = []
    for form in FORMATS:
        serial = PassSettings(micro_batches=m, messages=form)
        flushed = Backprop(micro_batches=m, messages=form)
        recipes.append(Recipe(f"flushed pipeline, {form}", flushed))
        for kind in (DDG, FDG):
            solver = kind(micro_batches=m, messages=form)
            recipes.append(Recipe(f"{kind.name}, m={m}, {form}", solver))
        for sweeps in (1, 4):
            name = f"hybrid, {sweeps} sweep{'s' * (sweeps > 1)}, {form}"
            rounds = RoundSettings(window=16, sweeps=sweeps)
            recipes.append(Recipe(name, AugmentedLagrangian(), serial, rounds))
    return recipes


def main() -> None:
    options = measuring.options(__doc__, models=[*MODELS], micro_batches=8)
    parts = f", m={options.micro_batches}" * (options.micro_batches != 8)
    torch.set_num_threads(1)
    raw = measuring.Raw(__file__)
    lines = []
    for model in options.models:
        cases = {f"{model}, K={K}, {title}{parts}": (K, title) for K in (2, 4) for title in RATES}
        if not cases.keys() <= raw.read().keys():
            given = {"model.name": model, "data.name": "synthetic", "train.threads": 1}
            settings = load(None, given)
            images, _ = build.load_own(settings.data)
            planner = Planner(settings, build.build_model(settings, images), images, LinkSpeed())
            alone = planner.predict(planner.blocks(1), BASE).images_per_second
        for case, (K, title) in cases.items():
            if not raw.get(case):
                planner.network = LinkSpeed(RATES[title] / 8, 1e-4)
                replicas = planner.predict(planner.blocks(1), BASE, replicas=K)
                rates = {"data parallel": replicas.images_per_second}
                for recipe in rows(options.micro_batches):
                    blocks = planner.blocks(K)
                    rates[recipe.name] = planner.predict(blocks, recipe).images_per_second
                raw.keep(case, value={name: rate / alone for name, rate in rates.items()})
            lines.append(line(case, raw.get(case)))
    header = (
        "network, K, links | data parallel | flushed | no bubble | hybrid | sweep must be worth"
    )
    measuring.show(header, lines)


def line(title: str, rates: dict[str, float]) -> list[str]:
    """Each method's best format; the share that a sweep must be worth, at its best."""

    def best(*starts: str) -> tuple[float, str]:
        return max((rate, name) for name, rate in rates.items() if name.startswith(starts))

    others = best("data", "flushed", "ddg", "fdg")[0]
    worth, name = min(
        ((others / rate - 1) / int(name.split()[1]), name)
        for name, rate in rates.items()
        if name.startswith("hybrid")
    )
    cells = [rates["data parallel"], *best("flushed"), *best("ddg", "fdg"), rates[name], name]
    said = [f"{cell:.2f}" if isinstance(cell, float) else f"({cell})" for cell in cells]
    pairs = (" ".join(said[i : i + 2]) for i in (1, 3, 5))
    return [title, said[0], *pairs, f"{worth:.2f}"]


if __name__ == "__main__":
    main()
