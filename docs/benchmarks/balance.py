"""Even, counted and measured cuts: the busiest block's share, and the pipeline's rate.

    python docs/benchmarks/balance.py [--models resnet20 resnet56 wrn-16-4] [--blocks 2 4 8]

Rates are of the pipelined serial pass, m = 4, on virtual links (10 Gb/s, 10 us), K blocks in turn
on this machine; the three kinds of cuts take turns.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import median

from hybrid.bench.recipes import Recipe
from hybrid.cuts.blocks import default_sample
from hybrid.cuts.costs import measure_costs
from hybrid.cuts.partition import split
from hybrid.links import Network
from hybrid.bench.plan.planner import Planner
from hybrid.runs import build
from hybrid.settings.resolve import load
from hybrid.solvers import Backprop

KINDS = ("even", "operations", "measured")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["resnet20", "resnet56", "wrn-16-4"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[4])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    recipe = Recipe("piped", Backprop(micro_batches=4))
    table = []
    for name in options.models:
        given = {"model.name": name, "data.name": "synthetic", "data.limit": 256}
        given["train.batch_size"] = options.batch_size
        settings = load(None, {**given, "train.threads": 1})
        images, _ = build.load_data_sets(settings.data)
        planner = Planner(settings, build.build_model(settings, images), images, Network())
        sample = default_sample(planner.model, None)
        base = split(planner.model, 1)
        costs = [sum(c) for c in measure_costs(planner.model, base.units, sample)]
        for count in options.blocks:
            blocks = {kind: split(planner.model, count, balance=kind) for kind in KINDS}
            rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(options.turns):
                for kind in KINDS:
                    rates[kind].append(
                        planner.predict(blocks[kind], recipe, real=True).images_per_second
                    )
            for kind in KINDS:
                starts = [*blocks[kind].starts, len(costs)]
                sums = [sum(costs[a:b]) for a, b in pairwise(starts)]
                row = {
                    "model": name,
                    "blocks": count,
                    "cuts": kind,
                    "before": blocks[kind].cuts,
                    "busiest_over_mean": round(max(sums) * count / sum(sums), 3),
                    "images_per_second": [round(r, 1) for r in rates[kind]],
                    "over_even": round(median(rates[kind]) / median(rates["even"]), 3),
                }
                table.append(row)
                print(
                    f"| {name} | {count} | {kind} | {', '.join(row['before'])} "
                    f"| {row['busiest_over_mean']} | {median(rates[kind]):.0f} "
                    f"| {row['over_even']} |",
                    flush=True,
                )
    Path(__file__).with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
