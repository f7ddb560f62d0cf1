"""A plan and the virtual clock against real ranks: images/s of all three, in turn in one job.

    mpirun -n 2 python docs/benchmarks/prediction.py [--model resnet20] [--batch-size 64]
    python docs/benchmarks/prediction.py --blocks 8             a plan and the virtual clock alone

Rank 0 times the units and predicts, then runs the same work on virtual links while the others
sleep; then all ranks do it for real. Units are timed anew for every row of every turn, within
seconds of the others: a machine's speed moves by more than 10 % within minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import measuring

from hybrid.bench.contenders import CPU, MethodContender
from hybrid.bench.measure import still_batches, timed
from hybrid.bench.plan.planner import Planner
from hybrid.bench.recipes import Recipe, recipes
from hybrid.links import LinkSpeed
from hybrid.links.base import Start
from hybrid.links.mpi import MpiLinks
from hybrid.networks.blocks import Blocks
from hybrid.networks.partition.split import split
from hybrid.ranks import launch
from hybrid.settings.resolve import load
from hybrid.training import build

STEPS = 4
ROWS = "backprop, m=4", "ddg, m=4", "ddg, m=8", "fdg, m=4"
MEMORY_SPEED = LinkSpeed(bytes_per_second=5e9)


def main() -> None:
    flags = {"model": "resnet20", "batch_size": 128, "blocks": 0, "turns": 5}
    options = measuring.options(__doc__, **flags)
    comm = launch.communicator()
    given = {"model.name": options.model, "data.name": "synthetic", "data.limit": 1024}
    given |= {"train.threads": 1, "train.batch_size": options.batch_size}
    settings = load(None, given)
    images, _ = build.load_data_sets(settings.data)
    planner = Planner(settings, build.build_model(settings, images), images, MEMORY_SPEED)
    K = options.blocks or comm.size
    blocks = split(planner.model, K, balance="operations")
    chosen = [recipe for recipe in recipes([4, 8]) if recipe.name in ROWS]
    rows: dict[str, Any] = {}
    if comm is not None:
        for recipe in chosen:
            links = MpiLinks(Start.of(comm))
            rows[recipe.name] = MethodContender(planner.method(blocks, recipe), links)
    rates_by_row: dict[str, dict[str, list[float]]] = {recipe.name: {} for recipe in chosen}
    batches = still_batches(planner.data, options.batch_size, STEPS, CPU)
    for turn in range(options.turns + 1):
        for recipe in chosen:
            planner.timed.times.clear()
            rates = dict(_predicted(planner, blocks, recipe)) if not comm or not comm.rank else {}
            if comm is not None:
                comm.barrier()
                seconds = timed(comm, lambda row=rows[recipe.name]: row.train(batches))  # type: ignore[misc]
                rates["ranks"] = STEPS * options.batch_size / seconds
            for kind, rate in rates.items() if turn else ():
                rates_by_row[recipe.name].setdefault(kind, []).append(rate)
    if comm is None or comm.rank == 0:
        _report(rates_by_row, f"{options.model}, batch {options.batch_size}, K = {K}")


def _predicted(planner: Planner, blocks: Blocks, recipe: Recipe) -> Iterator[tuple[str, float]]:
    yield "plan", planner.predict(blocks, recipe, steps=STEPS).images_per_second
    real = planner.predict(blocks, recipe, steps=STEPS, real=True)
    yield "virtual", real.images_per_second


def _report(rates: dict[str, dict[str, list[float]]], title: str) -> None:
    base = "ranks" if any("ranks" in kinds for kinds in rates.values()) else "virtual"
    others = [kind for kind in ("plan", "virtual") if kind != base]
    rows = []
    for name, kinds in rates.items():
        each = (measuring.ratios(kinds[kind], kinds[base]) for kind in others)
        shares = ["{:.3f} ({:.3f}, {:.3f})".format(*ratio) for ratio in each]
        rows.append((name, f"{median(kinds[base]):.1f}", *shares))
    measuring.show(
        " | ".join([title, f"{base}, images/s", *(f"{k} over it" for k in others)]), rows
    )
    measuring.Raw(__file__).keep(title, value=rates)


if __name__ == "__main__":
    main()
