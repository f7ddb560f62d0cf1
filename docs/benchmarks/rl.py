"""`hybrid rl`: Pendulum to a return of -200, a wide learner, no representation, MuJoCo, actors.

    python docs/benchmarks/rl.py [--only ROW] [--dry]

One thread, batch 64, learning rate 1e-3 of the learner. Every row is a run, its evaluations kept;
rows that rl.json holds are not repeated. Rates are by the virtual clock, which counts the
processor time of each rank alone: turns are interleaved, medians and extremes told.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

from hybrid_rl.resolve import load
from hybrid_rl.run import train

FILE = Path(__file__).with_suffix(".json")
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="the name of a row, or rates")
    parser.add_argument("--dry", action="store_true", help="only print what there is")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    wanted = [] if options.dry else [name for name in ROWS if options.only in ("", name)]
    jobs = [(seed, name) for seed in range(3) for name in wanted if seed < ROWS[name][1]]
    for seed, name in jobs:
        key = f"{name}, seed {seed}"
        if key not in found:
            found[key] = learnt({**ROWS[name][0], "rl.seed": seed})
            write(found)
    for turn in range(0 if options.dry or options.only not in ("", "rates") else TURNS):
        for name, settings in RATES.items():
            key = f"rates: {name}, turn {turn}"
            if key not in found:
                found[key] = rated(settings)
                write(found)
    print(table(found))


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


def write(found: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def reached(curve: list[list[float]]) -> float | None:
    """Environment steps to the first evaluation with a mean return of the goal; None if none."""
    return next((step for step, value in curve if value >= GOAL), None)


def table(found: dict[str, Any]) -> str:
    lines = [
        "| run | steps | last return, by seed | best | steps to -200 | CPU minutes, by seed |",
        "|---|---|---|---|---|---|",
    ]
    for name in ROWS:
        runs = [v for k, v in found.items() if k.startswith(f"{name}, seed ")]
        if not runs:
            continue
        last = [run["curve"][-1][1] for run in runs]
        spread = f" (mean {fmean(last):.0f} ± {stdev(last):.0f})" if len(last) > 1 else ""
        best = max(value for run in runs for _, value in run["curve"])
        reach = (reached(run["curve"]) for run in runs)
        # the goal is one of Pendulum's
        steps = (
            ", ".join(str(one or "none") for one in reach) if name.startswith("Pendulum") else "-"
        )
        minutes = ", ".join(f"{run['cpu_seconds'] / 60:.1f}" for run in runs)
        shown = ", ".join(f"{value:.0f}" for value in last)
        cells = (name, runs[0]["curve"][-1][0], shown + spread, f"{best:.0f}", steps, minutes)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| virtual clock | environment steps/s | updates/s | idle share |"]
    lines.append("|---|---|---|---|")
    for name in RATES:
        turns = [v for k, v in found.items() if k.startswith(f"rates: {name}, turn ")]
        if turns:
            rates = ("steps_per_second", "updates_per_second")
            shown = [_spread([turn[rate] for turn in turns]) for rate in rates]
            shares = zip(*(t["idle_share"] for t in turns), strict=True)
            idle = ", ".join(f"{median(own):.0%}" for own in shares)
            lines.append("| " + " | ".join([name, *shown, idle]) + " |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f}, {max(values):.1f})"


if __name__ == "__main__":
    main()
