"""`hybrid rl`: Pendulum to a return of -200, a wide learner, no representation, MuJoCo, actors.

    python docs/benchmarks/rl.py [--only ROW] [--dry]

One thread, batch 64, learning rate 1e-3 of the learner. Every row is a run, its evaluations kept;
rows that rl.json holds are not repeated. Rates are by the virtual clock, which counts the
processor time of each rank alone: turns are interleaved, medians and extremes told.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import measuring

from hybrid_rl.resolve import load
from hybrid_rl.run import train

RAW = measuring.Raw(__file__)
COMMON: dict[str, Any] = {
    "rl.batch_size": 64,
    "rl.lr": 1e-3,
    "rl.random_steps": 500,
    "rl.evaluate_every": 250,
    "rl.threads": 1,
}
PLAIN = {"rl.representation": False}
DOUBLE = {"rl.env": "InvertedDoublePendulum-v5", "rl.evaluate_every": 250, "rl.steps": 3000}
ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "Pendulum, no representation": ({"rl.steps": 5000, **PLAIN}, 3),
    "Pendulum": ({"rl.steps": 5000}, 3),
    "InvertedDoublePendulum, no representation": ({**DOUBLE, **PLAIN}, 1),
    "Pendulum, no representation, wide": ({"rl.steps": 2000, "rl.width": 2048, **PLAIN}, 1),
    "InvertedDoublePendulum": (DOUBLE, 1),
}
"""Settings over the common ones, and seeds."""
RATES: dict[str, dict[str, Any]] = {
    "1 actor, 1 rank": {"rl.actors": 1, "rl.blocks": 1},
    "1 actor, 2 ranks": {"rl.actors": 1, "rl.blocks": 2},
    "1 actor, 3 ranks": {"rl.actors": 1, "rl.blocks": 3},
    "1 actor, 3 ranks, lag 1": {"rl.actors": 1, "rl.blocks": 3, "rl.lag": 1},
    "2 actors, 1 rank": {"rl.actors": 2, "rl.blocks": 1},
    "2 actors, 4 ranks": {"rl.actors": 2, "rl.blocks": 4},
}
ROUNDS, TURNS, GOAL = 150, 3, -200.0


def main() -> None:
    options = measuring.options(__doc__, only="", dry=False)
    names = [] if options.dry else [name for name in ROWS if options.only in ("", name)]
    for seed in range(3):
        for name in names:
            key = f"{name}, seed {seed}"
            if seed < ROWS[name][1] and not RAW.get(key):
                RAW.keep(key, value=learnt({**ROWS[name][0], "rl.seed": seed}))
    for turn in range(TURNS if options.only in ("", "rates") and not options.dry else 0):
        for name, settings in RATES.items():
            key = f"rates: {name}, turn {turn}"
            if not RAW.get(key):
                RAW.keep(key, value=rated(settings))
    figures = RAW.read()
    header = "run | steps | last return, by seed | best | steps to -200 | CPU minutes, by seed"
    measuring.show(header, filter(None, (cells(name, figures) for name in ROWS)))
    print()
    header = "virtual clock | environment steps/s | updates/s | idle share"
    measuring.show(header, filter(None, (rate_cells(name, figures) for name in RATES)))


def learnt(settings: dict[str, Any]) -> dict[str, Any]:
    """The evaluations of a run: [environment steps, mean return]; and what it took."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "run")
        wall, cpu = time.perf_counter(), time.process_time()
        summary = train(load(None, COMMON | settings), out, False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = [[x["step"], x["return"]] for x in lines if x["phase"] == "evaluation"]
    rates = {k: summary[k] for k in ("updates", "updates_per_second")}
    return {"curve": curve, "cpu_seconds": cpu, "wall_seconds": wall, **rates}


def rated(settings: dict[str, Any]) -> dict[str, Any]:
    """Environment steps and updates a second, by the virtual clock."""
    length = ROUNDS * settings["rl.actors"]
    short = {"rl.steps": length, "rl.random_steps": length // 6, "rl.pretrain_steps": 0}
    quiet = {"rl.evaluate_every": length, "rl.episodes": 1, "rl.report_every": length}
    wanted = COMMON | short | quiet | settings | {"links.kind": "virtual"}
    summary = train(load(None, wanted), None, False)
    return {k: summary[k] for k in ("steps_per_second", "updates_per_second", "idle_share")}


def reached(curve: list[list[float]]) -> float | None:
    """Environment steps to the first evaluation with a mean return of the goal; None if none."""
    return next((step for step, value in curve if value >= GOAL), None)


def cells(name: str, figures: dict[str, Any]) -> tuple[object, ...]:
    """A row of the table of returns; none of what was not run."""
    runs = [v for k, v in figures.items() if k.startswith(f"{name}, seed ")]
    if not runs:
        return ()
    last = [run["curve"][-1][1] for run in runs]
    spread = f" (mean {fmean(last):.0f} ± {stdev(last):.0f})" if len(last) > 1 else ""
    best = max(value for run in runs for _, value in run["curve"])
    steps = "-"  # the goal is one of Pendulum's
    if name.startswith("Pendulum"):
        steps = ", ".join(str(reached(run["curve"]) or "none") for run in runs)
    minutes = ", ".join(f"{run['cpu_seconds'] / 60:.1f}" for run in runs)
    returns = ", ".join(f"{value:.0f}" for value in last) + spread
    return name, runs[0]["curve"][-1][0], returns, f"{best:.0f}", steps, minutes


def rate_cells(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table of rates; none of what was not run."""
    turns = [v for k, v in figures.items() if k.startswith(f"rates: {name}, turn ")]
    if not turns:
        return ()
    rates = ([turn[rate] for turn in turns] for rate in ("steps_per_second", "updates_per_second"))
    shares = zip(*(turn["idle_share"] for turn in turns), strict=True)
    idle = ", ".join(f"{median(rank):.0%}" for rank in shares)
    return name, *(measuring.extremes(rate, ".1f") for rate in rates), idle


if __name__ == "__main__":
    main()
