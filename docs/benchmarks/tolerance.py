"""Which optimizers tolerate a delay: optimizers x orders of a pipeline x mends, at equal epochs.

    python docs/benchmarks/tolerance.py --data-dir ~/data [--seeds 0 1] [--rows muon] [--part 0/2]

ResNet-14 in K = 8 blocks, CIFAR-10's first 10,000 images, 4 epochs, mini-batches of 128 in m = 8
micro-batches, one thread, on the virtual clock. A delay is that of block 0, in steps; the others'
fall linearly to none in the last block, as with K blocks of a deeper network (three ticks with
K = 4, 31 with K = 32). The flushed pipeline computes the gradients of one process in the same
micro-batches. Each optimizer has the best of three learning rates of its flushed run with seed 0.

Runs that are in tolerance.json or in --runs are not repeated; --only-collect makes the JSON and the
table from what there is. --part i/n takes every n-th row.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import measuring
import torch
from tolerance_optimizers import Late, LateRates, RotatedAdam, TwoBuffered, nadamw_by_delay
from torch import nn

from hybrid import data
from hybrid.method.optimizers import Factory, make_optimizer
from hybrid.settings.config import DelaySettings, OptimizerSettings
from hybrid.solvers import Backprop, Solver

RAW = measuring.Raw(__file__)
K, M = 8, 8
STEPS = 10_000 // 128 * 4
DELAYS = {"7/8": 7, "15/8": 15, "31/8": 31, "7": 56, "3/8": 3}
"""Ticks of block 0 by the name of its delay in steps, those that decide most first."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "muon": {"name": "muon"},
    "adamw": {"name": "adamw", "weight_decay": 0.01},
    "nadamw": {"name": "nadamw", "weight_decay": 0.01},
    "soap": {"name": "soap", "weight_decay": 0.01},
    "rotated adam": {},
    "rotated adam, one side": {},
}
RATES = {
    "sgd": (0.25, 0.1, 0.5),
    "muon": (0.05, 0.1, 0.2),
    "adamw": (0.005, 0.01, 0.02),
    "nadamw": (0.005, 0.01, 0.02),
    "soap": (0.02, 0.04, 0.08),
    "rotated adam": (0.02, 0.04, 0.08),
    "rotated adam, one side": (0.02, 0.04, 0.08),
}


@dataclass(frozen=True)
class Row:
    """One training."""

    solver: Solver
    optimizer: OptimizerSettings | Factory
    delay: DelaySettings = field(default_factory=DelaySettings)
    epochs: int = 4


def optimizer(name: str, lr: float) -> OptimizerSettings | Factory:
    """One of `OPTIMIZERS`."""
    settings = OPTIMIZERS[name]
    if settings:
        return OptimizerSettings(lr=lr, **settings)
    return partial(RotatedAdam, lr=lr, sides="smaller" if "one side" in name else "both")


def flushed(name: str, lr: float) -> tuple[str, Row]:
    """The synchronous run."""
    return f"{name}, flushed, lr {lr}", Row(Backprop(micro_batches=M), optimizer(name, lr))


def best_rate(name: str, results: dict[str, Any]) -> float | None:
    """That of the best flushed run with seed 0; None until all are there."""
    found = {lr: results.get(flushed(name, lr)[0], {}).get("0") for lr in RATES[name]}
    if not all(found.values()):
        return None
    return max(RATES[name], key=lambda lr: found[lr]["test_accuracy"])


def rows(seed: int, results: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """The rows that can be run or are there, those that decide most first."""
    if seed == 0:
        for name, rates in RATES.items():
            yield from (flushed(name, lr) for lr in rates)
    best = {name: best_rate(name, results) for name in OPTIMIZERS}
    rated = {name: lr for name, lr in best.items() if lr is not None}
    if seed != 0:
        yield from (flushed(name, lr) for name, lr in rated.items())
    for delay, ticks in DELAYS.items():
        if delay == "31/8":  # what an epoch is worth
            for name, lr in rated.items() if seed == 0 else ():
                row = replace(flushed(name, lr)[1], epochs=3)
                yield f"{name}, flushed, 3 epochs", row
                yield f"{name}, flushed, 2 epochs", replace(row, epochs=2)
        for name, lr in rated.items():
            late = Late(micro_batches=M, ticks=ticks)
            yield f"{name}, ddg, {delay}", Row(late, optimizer(name, lr))
    for delay in ("15/8", "31/8", "7", "7/8"):
        for name, lr in rated.items():
            yield from mended(name, lr, delay)
    for name, lr in rated.items():
        yield f"{name}, 2bw, 1", Row(TwoBuffered(micro_batches=M), optimizer(name, lr))


def mended(name: str, lr: float, delay: str) -> Iterator[tuple[str, Row]]:
    """What may help an optimizer, or spare memory, at one delay."""
    made, title = optimizer(name, lr), f"{name}, ddg, {delay}"
    late = Late(micro_batches=M, ticks=DELAYS[delay])
    yield f"{title}, no stash", Row(replace(late, stash=False), made)
    once = DelaySettings(mend="extrapolate")
    yield f"{title}, extrapolate, cap 1", Row(late, made, once)
    if DELAYS[delay] > M:
        whole = DelaySettings(mend="extrapolate", cap=100.0)
        yield f"{title}, extrapolate, cap tau", Row(late, made, whole)
    if DELAYS[delay] > M and name in ("sgd", "adamw"):
        assert isinstance(made, OptimizerSettings)
        yield f"{title}, PipeMare's rates", Row(late, partial(slowed, made))
    if name == "nadamw":
        momenta = partial(nadamw_by_delay, lr=lr, steps=STEPS, latest=DELAYS[delay] / M)
        yield f"{title}, momentum by delay", Row(late, momenta)


def slowed(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with PipeMare's rates over a quarter of the training."""
    module = nn.ParameterList(p for group in groups for p in group["params"])
    inner = make_optimizer(module, settings, total_steps=STEPS)
    for group in inner.param_groups:
        group["delay"] = groups[0]["delay"]
    return LateRates(inner.param_groups, inner, STEPS // 4)


def train(row: Row, seed: int, data_dir: Path, out: Path) -> None:
    """One training into its run folder."""
    images, test = data.load("cifar10", data_dir, 10_000)
    measuring.on_virtual_links(
        measuring.resnet("resnet14", seed),
        *(1 if isinstance(row.solver, Backprop) else K, row.solver),
        train={"epochs": row.epochs, "seed": seed, "evaluate_every": 100},
        optimizer=row.optimizer,
        delay=row.delay,
        checkpoint={"every": 100},
        out=out,
        names={"model": "resnet14", "data": "cifar10"},
        quiet=False,
    ).fit(images, test)


def collect(runs: Path, seeds: list[int]) -> dict[str, Any]:
    """The results of all runs there are, on top of what the JSON holds."""
    results: dict[str, dict[str, Any]] = RAW.read()
    for seed in seeds:
        before = -1
        while len(results) > before:  # rates that are found bring further rows
            before = len(results)
            for title, _ in rows(seed, results):
                kept = measuring.of_summary(runs / measuring.slug(title, seed), "test_accuracy")
                if kept is not None:
                    results.setdefault(title, {})[str(seed)] = kept
    return results


def main() -> None:
    options = measuring.options(__doc__, runs=Path("runs/tolerance"), **measuring.GRID)
    torch.set_num_threads(1)
    for seed in () if options.only_collect else options.seeds:
        done: set[str] = set()
        while True:
            results = collect(options.runs, options.seeds)
            table = measuring.chosen(rows(seed, results), options)
            todo = (x for x in table if str(seed) not in results.get(x[0], {}) and x[0] not in done)
            if (first := next(todo, None)) is None:
                break
            title, row = first
            done.add(title)
            out = options.runs / measuring.slug(title, seed)
            shutil.rmtree(out, ignore_errors=True)  # what was broken off
            out.parent.mkdir(parents=True, exist_ok=True)
            train(row, seed, options.data_dir, out)
    results = collect(options.runs, options.seeds)
    if options.only_collect:
        RAW.write(results)
    lines = {t: [100 * x["test_accuracy"] for x in seeds.values()] for t, seeds in results.items()}
    measuring.show(
        "run | test accuracy, % | by seed",
        ((t, f"{mean(xs):.1f}", "; ".join(f"{x:.1f}" for x in xs)) for t, xs in lines.items()),
    )


if __name__ == "__main__":
    main()
