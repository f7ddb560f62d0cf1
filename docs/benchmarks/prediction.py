"""The virtual clock against real ranks: predicted over measured images/s, in turn in one job.

    mpirun -n 2 python docs/benchmarks/prediction.py [--model resnet20] [--turns 5]

Rank 0 predicts while the others sleep; then all ranks do the same work for real.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from hybrid.bench.measure import CPU, meet, still_batches, timed
from hybrid.bench.recipes import OwnContender, recipes
from hybrid.cuts.partition import split
from hybrid.links import Network
from hybrid.links.mpi import MpiLinks
from hybrid.plan.planner import Planner
from hybrid.ranks import launch
from hybrid.runs import build
from hybrid.settings.resolve import load


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    comm = launch.communicator()
    given = {"model.name": options.model, "data.name": "synthetic", "data.limit": 1024}
    settings = load(None, {**given, "train.threads": 1})
    images, _ = build.data_sets(settings.data)
    planner = Planner(
        settings, build.model(settings, images), images, Network(bytes_per_second=5e9)
    )
    blocks = split(planner.model, comm.size, balance="operations")
    wanted = ("backprop, m=", "augmented-lagrangian, m=4, gaps", "ddg", "fdg")
    made = [r for r in recipes([4, 8]) if r.name.startswith(wanted) and "bfloat" not in r.name]
    rows = []
    for recipe in made:
        gaps = comm.bcast(planner.gaps(blocks, recipe)) if recipe.fill else []
        rows.append(OwnContender(recipe, blocks, MpiLinks(comm.Dup()), gaps, settings))
    predicted: dict[str, list[float]] = {recipe.name: [] for recipe in made}
    measured: dict[str, list[float]] = {recipe.name: [] for recipe in made}
    for turn in range(options.turns + 1):
        for recipe, row in zip(made, rows, strict=True):
            batches = still_batches(planner.data, settings.train.batch_size, 4, CPU)
            seconds = timed(comm, lambda row=row, batches=batches: row.train(batches))  # type: ignore[misc]
            rate = 0.0
            if comm.rank == 0:
                rate = planner.predict(blocks, recipe, steps=2).images_per_second
            meet(comm)
            if turn:
                measured[recipe.name].append(4 * 128 / seconds)
                predicted[recipe.name].append(rate)
    if comm.rank == 0:
        table = {}
        print("| | measured, images/s | predicted | predicted over measured (quartiles) |")
        print("|---|---|---|---|")
        for name in measured:
            pairs = zip(predicted[name], measured[name], strict=True)
            ratios = sorted(p / m for p, m in pairs)
            low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
            print(
                f"| {name} | {median(measured[name]):.1f} | {median(predicted[name]):.1f} "
                f"| {median(ratios):.3f} ({low:.3f}, {high:.3f}) |"
            )
            table[name] = {"measured": measured[name], "predicted": predicted[name]}
        file = Path(__file__).with_suffix(".json")
        file.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
