"""AMPNet on ResNets of stochastic depth: against a flushed pipeline in time, and in accuracy.

    python docs/benchmarks/ampnet.py time --data-dir ~/data
    python docs/benchmarks/ampnet.py accuracy --data-dir ~/data

CIFAR-10, batch 128 in 8 instances (micro-batches) of 16, K = 4 blocks balanced by what a unit costs
and how often it survives, the virtual clock, one thread, 10 Gb/s. Every row trains the same model:
`model.survival` is the network's, and a unit that is left out costs nothing in any row. Time:
ResNet-56, an epoch of --steps mini-batches, all rows in turn, --turns times. Accuracy: ResNet-20 on
the first 20,000 images, --epochs epochs at lr 0.1, 10,000 test images. Rows that the JSON holds are
not repeated; --rows and --seeds choose some.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from statistics import mean, median
from typing import Any

import measuring

from hybrid import data
from hybrid.data import Dataset
from hybrid.networks import models
from hybrid.rounds.phase_report import DivergedError
from hybrid.solvers import DDG, Backprop, Solver
from hybrid_messages import AMPNet

RAW = measuring.Raw(__file__)
K, M = 4, 8

ROWS: Mapping[str, tuple[Solver, float]] = {
    # solver, survival of the last unit
    "whole network: flushed pipeline": (Backprop(micro_batches=M), 1.0),
    "whole network: ampnet": (AMPNet(micro_batches=M), 1.0),
    "survival 0.5: flushed pipeline": (Backprop(micro_batches=M), 0.5),
    "survival 0.5: ddg, never flushed, in one order": (DDG(micro_batches=M), 0.5),
    "survival 0.5: ampnet, 4 keys": (AMPNet(micro_batches=M, max_active_keys=4), 0.5),
    "survival 0.5: ampnet": (AMPNet(micro_batches=M), 0.5),
    "survival 0.5: ampnet, 16 keys": (AMPNet(micro_batches=M, max_active_keys=16), 0.5),
    "survival 0.5: ampnet, a step every 4 instances": (
        AMPNet(micro_batches=M, min_update_frequency=4),
        0.5,
    ),
}
BASES = {
    1.0: "whole network: flushed pipeline",
    0.5: "survival 0.5: flushed pipeline",
}
TRAINED = [
    "whole network: flushed pipeline",
    "survival 0.5: flushed pipeline",
    "survival 0.5: ampnet",
    "survival 0.5: ampnet, a step every 4 instances",
]


def trained(
    row: str, model: str, seed: int, epochs: int, images: Dataset, test: Dataset
) -> Mapping[str, Any]:
    """The summary of a run, or why there is none."""
    solver, survival = ROWS[row]
    trainer = measuring.on_virtual_links(
        *(models.stochastic_depth(measuring.resnet(model, seed), survival), K, solver),
        train={"epochs": epochs, "seed": seed, "evaluate_every": 100},
        optimizer={"lr": 0.1},
    )
    try:
        return trainer.fit(images, test)
    except DivergedError as error:
        return {"failed": str(error)}


def times(options: Namespace) -> None:
    images, test = data.load("cifar10", options.data_dir, 128 * options.steps)
    for turn in range(options.turns):
        for row in options.rows[:: 1 if turn % 2 else -1]:
            turns = [*RAW.get("time", row)]
            if len(turns) <= turn:
                summary = trained(row, "resnet56", 0, 1, images, test.take(100))
                kept = {k: summary[k] for k in ("images_per_second", "idle_share")}
                RAW.keep("time", row, value=[*turns, kept])
    measuring.show(
        "ResNet-56 | images/s, median | over the flushed pipeline | idle share of ranks",
        map(time_cells, RAW.get("time")),
    )


def time_cells(row: str) -> tuple[str, ...]:
    turns, base = RAW.get("time", row), RAW.get("time", BASES[ROWS[row][1]])
    rates = [turn["images_per_second"] for turn in turns]
    pairs = zip(rates, base, strict=False)
    ratios = [rate / other["images_per_second"] for rate, other in pairs] or [float("nan")]
    idle = [median(each) for each in zip(*(t["idle_share"] for t in turns), strict=True)]
    shares = ", ".join(f"{100 * share:.0f}" for share in idle)
    gain = measuring.extremes(ratios)
    return row, f"{median(rates):.1f}", gain, f"{shares} % (mean {mean(idle):.0%})"


def accuracies(options: Namespace) -> None:
    images, test = data.load("cifar10", options.data_dir, options.limit)
    for seed in options.seeds:
        for row in options.rows:
            run = f"{options.model}, {len(images):,} images, {options.epochs} epochs: {row}"
            if row in TRAINED and not RAW.get("accuracy", run, str(seed)):
                summary = trained(row, options.model, seed, options.epochs, images, test)
                keys = ("failed", "test_accuracy", "train_seconds")
                kept = {k: summary[k] for k in keys if k in summary}
                RAW.keep("accuracy", run, str(seed), value=kept)
    measuring.show(
        "run | test accuracy | virtual seconds | seeds", map(cells, RAW.get("accuracy").items())
    )


def cells(entry: tuple[str, dict[str, dict[str, Any]]]) -> tuple[object, ...]:
    key, by_seed = entry
    ended = [each for each in by_seed.values() if "failed" not in each]
    if not ended:
        return key, "diverged", "", len(by_seed)
    percent = measuring.spread([100 * each["test_accuracy"] for each in ended])
    return key, f"{percent} %", f"{mean(x['train_seconds'] for x in ended):.0f}", len(by_seed)


def main() -> None:
    options = measuring.options(
        __doc__,
        what=("time", "accuracy"),
        data_dir=measuring.DATA,
        model="resnet20",
        limit=20_000,
        epochs=3,
        seeds=[0, 1, 2],
        rows=[*ROWS],
        steps=24,
        turns=3,
    )
    {"time": times, "accuracy": accuracies}[options.what](options)


if __name__ == "__main__":
    main()
