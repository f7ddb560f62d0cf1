"""Which grid of K x R ranks is fastest, by the virtual clock, and whether `plan` knows.

    python docs/benchmarks/grids.py [--model resnet20]

Batches of 128 and 32, 4 and 8 ranks, 10 Gb/s, 1 Gb/s and 100 Mb/s, one thread a rank. Every grid
with back-propagation (4 micro-batches; undivided where K = 1) and `ddg` (4), all-reduce
between replicas. "Planned" is what `hybrid plan` computes from the measured time of every unit,
"run" the same passes really run on virtual links; both in images a second, each worth what `plan`
counts it for (a delay costs progress). Cases that the JSON holds are not repeated.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import measuring

from hybrid.bench.plan.planner import Planner
from hybrid.bench.recipes import BASE, Recipe, recipes
from hybrid.links import LinkSpeed
from hybrid.links.grid import Grid
from hybrid.settings import methods
from hybrid.settings.resolve import resolve
from hybrid.solvers import DDG
from hybrid.training import build

RAW = measuring.Raw(__file__)
RATES = (10.0, 1.0, 0.1)


def case(model: str, batch: int, ranks: int, gigabits: float) -> dict[str, Any]:
    """Images a second of every grid and recipe, planned and run."""
    wanted = {"model": {"name": model}, "train": {"batch_size": batch, "threads": 1}}
    settings = resolve({**wanted, "data": {"name": "synthetic"}})
    network = LinkSpeed(gigabits * 1e9 / 8)
    data, _ = build.load_own(settings.data)
    planner = Planner(settings, build.build_model(settings, data), data, network)
    exact = methods.correction(settings)
    rates_by_row: dict[str, Any] = {}
    for grid in planner.grids(ranks):
        parts = [4] if batch // grid.replicas >= 8 else [2]
        rows = [r for r in recipes(parts, exact, [BASE.solver, DDG()]) if _wanted(r, grid)]
        blocks = planner.blocks(grid.blocks, max(1, batch // grid.replicas // parts[0]))
        for recipe in rows:
            rates = [
                planner.predict(blocks, recipe, real=real, replicas=grid.replicas)
                for real in (False, True)
            ]
            key = f"({grid.blocks}, {grid.replicas}) {recipe.name}"
            planned, run = (round(p.images_per_second) for p in rates)
            worth = [round(p.progress or 0.0) for p in rates]
            rates_by_row[key] = {"planned": planned, "run": run, "progress": worth}
    return rates_by_row


def _wanted(recipe: Recipe, grid: Grid) -> bool:
    if grid.blocks == 1:
        return recipe.solver.exact and recipe.solver.micro_batches == 1  # type: ignore[attr-defined]
    whole = getattr(recipe.solver, "messages", "float32") == "float32"
    return whole and getattr(recipe.solver, "micro_batches", 1) > 1


def main() -> None:
    options = measuring.options(__doc__, model="resnet20")
    for batch, ranks, gigabits in product((128, 32), (4, 8), RATES):
        key = f"{options.model}, batch {batch}, {ranks} ranks, {gigabits:g} Gb/s"
        if not RAW.get(key):
            RAW.keep(key, value=case(options.model, batch, ranks, gigabits))
    right, lines = 0, []
    for key, rows in RAW.read().items():
        planned, run = ({name: row["progress"][i] for name, row in rows.items()} for i in (0, 1))
        best, chosen = max(run, key=run.__getitem__), max(planned, key=planned.__getitem__)
        lost = 1 - run[chosen] / run[best]
        right += lost < 0.03
        lines.append((key, f"{best}, {run[best]:,}", chosen, f"{100 * lost:.0f} %"))
    measuring.show("case | fastest, run | planned fastest | lost by it", lines)
    print(f"\nplan is right, or loses less than 3 %, in {right} of {len(lines)} cases")


if __name__ == "__main__":
    main()
