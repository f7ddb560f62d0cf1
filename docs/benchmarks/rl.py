"""`hybrid rl`: returns by width, with and without a representation, and rates by width and ranks.

    python docs/benchmarks/rl.py [--only TEXT] [--part 0/1] [--dry]

One thread. Every row is a run, its evaluations kept; rows that rl.json holds are not repeated.
`--only` rows with this text in their names: "wide", "rates", "Pendulum, no representation". Rates
are by the virtual clock, which counts the processor time of each rank alone: turns are interleaved,
medians and extremes told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import measuring
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid.ranks import launch
from hybrid_rl.learning import sac
from hybrid_rl.learning.draws import generator
from hybrid_rl.learning.networks import Head, Policy
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
WIDE: dict[str, Any] = {
    "rl.batch_size": 32,
    "rl.lr": 2e-3,
    "rl.polyak": 0.05,
    "rl.discount": 0.95,
    "rl.random_steps": 300,
    "rl.steps": 1500,
    "rl.evaluate_every": 100,
    "rl.checkpoint_every": 1500,
}
"""Learning that is quick enough to compare widths; chosen at width 256, without representation."""
SMALL = {"rl.units": 64, "rl.layers": 4}
WIDTHS = (256, 1024, 2048)
TASKS = {
    "Pendulum": {},
    "InvertedDoublePendulum": {"rl.env": "InvertedDoublePendulum-v5"},
}


def wide_rows() -> dict[str, tuple[dict[str, Any], int]]:
    """Every task, width and representation, from the quickest to the slowest."""
    found = {}
    for width in WIDTHS:
        for task, env in TASKS.items():
            for kind, features in (("no representation", PLAIN), ("representation", SMALL)):
                settings = WIDE | env | {"rl.width": width} | features
                found[f"wide: {task}, {width}, {kind}"] = settings, 3 if width < 2048 else 2
    return found


ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "Pendulum, no representation": ({"rl.steps": 5000, **PLAIN}, 3),
    "Pendulum": ({"rl.steps": 5000}, 3),
    "InvertedDoublePendulum, no representation": ({**DOUBLE, **PLAIN}, 1),
    "InvertedDoublePendulum": (DOUBLE, 1),
    **wide_rows(),
}
"""Settings over the common ones, and seeds."""
RATES: dict[str, dict[str, Any]] = {
    "1 actor, 1 rank": {"rl.actors": 1, "rl.blocks": 1},
    "1 actor, 2 ranks": {"rl.actors": 1, "rl.blocks": 2},
    "1 actor, 3 ranks": {"rl.actors": 1, "rl.blocks": 3},
    "1 actor, 3 ranks, lag 1": {"rl.actors": 1, "rl.blocks": 3, "rl.lag": 1},
    "2 actors, 1 rank": {"rl.actors": 2, "rl.blocks": 1},
    "2 actors, 4 ranks": {"rl.actors": 2, "rl.blocks": 4},
    **{
        f"width {width}, {kind}, {ranks} rank{'s'[: ranks > 1]}": {
            "rl.width": width,
            "rl.blocks": ranks,
            **features,
        }
        for width in WIDTHS
        for kind, features in (("no representation", PLAIN), ("representation", {}))
        for ranks in (1, 3)
    },
}
FORMS = "as it is", "padded", "transposed"
KERNELS = {
    "matrix products": ("aten::mm", "aten::addmm"),
    "Adam": ("aten::_fused_adam_",),
    "targets": ("aten::lerp_",),
}
ROUNDS, TURNS, GOAL = {256: 150, 1024: 60, 2048: 30}, 3, -200.0


def main() -> None:
    options = measuring.options(__doc__, only="", part="0/1", dry=False)
    part, parts = map(int, options.part.split("/"))
    works: dict[str, Callable[[], dict[str, Any]]] = {}
    for seed in range(3):
        for name, (settings, seeds) in ROWS.items():
            if seed < seeds:
                works[f"{name}, seed {seed}"] = partial(learnt, {**settings, "rl.seed": seed})
    for turn in range(TURNS):
        for name, settings in RATES.items():
            works[f"rates: {name}, turn {turn}"] = partial(rated, settings)
    works |= {f"update: width {width}": partial(updated, width) for width in WIDTHS}
    chosen = [] if options.dry else [key for key in works if options.only in key]
    for key in chosen[part::parts]:
        if not RAW.get(key):
            RAW.keep(key, value=works[key]())
    figures = RAW.read()
    header = "run | steps | last return, by seed | best | steps to -200 | CPU minutes, by seed"
    measuring.show(header, filter(None, (cells(name, figures) for name in ROWS)))
    print()
    header = "virtual clock | environment steps/s | updates/s | idle share"
    measuring.show(header, filter(None, (rate_cells(name, figures) for name in RATES)))
    print()
    found = [(w, own) for w in WIDTHS if (own := figures.get(f"update: width {w}"))]
    header = f"width | {' | '.join(f'{form}, ms' for form in FORMS)} | {' | '.join(KERNELS)}"
    measuring.show(header, ((w, *own["ms"].values(), *own["shares"].values()) for w, own in found))


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
    length = ROUNDS[settings.get("rl.width", 256)] * settings.get("rl.actors", 1)
    short = {"rl.steps": length, "rl.random_steps": length // 6}
    if settings.get("rl.representation", True):
        short["rl.pretrain_steps"] = 0
    quiet = {"rl.evaluate_every": length, "rl.episodes": 1, "rl.report_every": length}
    wanted = COMMON | short | quiet | settings | {"links.kind": "virtual"}
    summary = train(load(None, wanted), None, False)
    return {k: summary[k] for k in ("steps_per_second", "updates_per_second", "idle_share")}


def updated(width: int, batch: int = 64) -> dict[str, Any]:
    """Processor milliseconds of the learner's update, in turns, and the shares of its kernels."""
    torch.set_num_threads(1)
    launch.keep_memory()
    works = {form: partial(form_of_update(form, width, batch), 0) for form in FORMS}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for turn in range(12):
        for form in [*FORMS][:: 1 if turn % 2 else -1]:
            begun = time.process_time()
            works[form]()
            if turn > 1:
                seconds[form].append(time.process_time() - begun)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(5):
            works["as it is"]()
    spent = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    shares = {
        name: round(sum(spent.get(key, 0) for key in keys) / sum(spent.values()), 3)
        for name, keys in KERNELS.items()
    }
    return {"ms": {k: round(1e3 * median(v), 1) for k, v in seconds.items()}, "shares": shares}


def form_of_update(form: str, width: int, batch: int) -> Callable[[int], sac.Losses]:
    """An update of Pendulum's sizes from states alone.

    "padded": zeros make every layer's inputs a multiple of 16. "transposed": the memory of a weight
    has its inputs as rows.
    """
    states, both = (16, 32) if form == "padded" else (3, 4)
    policy, critics = Policy(states, width, 1), (Head(both, width, 1), Head(both, width, 1))
    layers = [m for net in (policy, *critics) for m in net.modules() if isinstance(m, nn.Linear)]
    for layer in layers if form == "transposed" else ():
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    learner = sac.Learner(policy, critics, 0.99, 0.005)
    optimizers = learner.optimizers(1e-3)
    z_s, z_sa = torch.randn(batch, states), torch.randn(batch, both)

    def psi(z: Tensor, action: Tensor) -> Tensor:
        return F.pad(torch.cat([z, action], 1), (0, both - states - 1))

    def update(seed: int) -> sac.Losses:
        samples = z_s, z_sa, z_s, torch.randn(batch, 2)
        return sac.update(learner, optimizers, samples, psi, generator(seed))

    return update


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
    if "InvertedDoublePendulum" not in name:
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
