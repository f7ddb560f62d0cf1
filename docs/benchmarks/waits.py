"""Where the orders of delayed gradients wait: share of the rate without waits, by simulation.

    python docs/benchmarks/waits.py

K blocks that take as long as each other, f : b = 1 : 2, m = 8, on virtual links (the units are
stand-ins that only let time go by). A message takes a share of a tick, f + b of a micro-batch. Then
without messages' time, one block that takes longer than the others, or ticks that vary.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from hybrid.bench.recipes import Recipe
from hybrid.links import Network
from hybrid.models import units
from hybrid.bench.plan import standin
from hybrid.bench.plan.planner import Planner
from hybrid.runs import build
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, FDG, Backprop
from hybrid.solvers.exact.pipeline import Cost

UNIT = Cost(0.01, 0.02)
"""Seconds of a sample: so long that nothing else counts."""


def planner(model: str, network: Network) -> Planner:
    given = {"model.name": model, "data.name": "digits", "data.limit": 256, "train.batch_size": 64}
    settings = load(None, {**given, "train.report_every": 1000})
    images, _ = build.load_data_sets(settings.data)
    return Planner(settings, build.build_model(settings, images), images, network)


def share(
    K: int, solver: object, message: float, longer: float = 1.0, spread: float = 0.0
) -> float:
    """Of the rate of K ranks that never wait."""
    made = planner(f"resnet{6 * ((K - 2) // 3 + 1) + 2}", Network(1e15))
    count = len(units(made.model))
    # K units take time, one a block; the rest takes none
    timed = np.linspace(0, count - 1, K).round().astype(int).tolist()
    costs = [UNIT if i in timed else Cost(0.0, 0.0) for i in range(count)]
    costs[timed[K // 2]] = Cost(UNIT.forward * longer, UNIT.backward * longer)
    sizes = (8, 64)
    names = tuple(unit.name for unit in units(made.model))
    made.subject.times[names] = dict.fromkeys(sizes, costs)
    starts = [0, *timed[1:]]
    blocks = made.blocks(K, 8)
    blocks.starts = starts
    if message:
        # the widest cut's message takes that share of a tick
        shapes = blocks.cut_shapes(torch.zeros(1, *made.model.input_shape))
        largest = max(int(np.prod(shape)) for shape in shapes)
        made.network = Network(8 * 4 * largest / (message * 8 * sum(UNIT)))
    varied = np.random.default_rng(0)

    def spend(unit: standin.StandIn, way: int, samples: int) -> None:
        if unit.links is not None:
            factor = varied.lognormal(0.0, spread) if spread else 1.0
            unit.links.work(samples * factor * float(unit.seconds[way][0]))

    standin.StandIn.spend = spend  # type: ignore[method-assign]
    found = made.predict(blocks, Recipe("asked", solver, sweeps=1), steps=8)  # type: ignore[arg-type]
    return found.images_per_second * sum(UNIT)


def main() -> None:
    cases = [(f"message {t:g} of a tick", {"message": t}) for t in (0.0, 0.1, 0.25, 0.5, 1.0)]
    cases += [(f"one block {x:g} times as long", {"message": 0.0, "longer": x}) for x in (1.2, 1.5)]
    cases += [(f"ticks vary by {s:.0%}", {"message": 0.0, "spread": s}) for s in (0.1, 0.3)]
    kinds = {"flushed": Backprop(micro_batches=8), "ddg": DDG(8), "fdg": FDG(8)}
    rows = {}
    print("| K | | " + " | ".join(kinds) + " |\n|---" + "|---" * (len(kinds) + 1) + "|")
    for K in (2, 4, 8):
        for name, settings in cases:
            found = {kind: share(K, solver, **settings) for kind, solver in kinds.items()}
            rows[f"K={K}, {name}"] = found
            print(f"| {K} | {name} | " + " | ".join(f"{v:.2f}" for v in found.values()) + " |")
    Path(__file__).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
