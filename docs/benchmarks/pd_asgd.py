"""PD-ASGD on one block: its accuracy at equal epochs, and what threads beside each other are worth.

    python docs/benchmarks/pd_asgd.py accuracy --data-dir ~/data [--model resnet20]
    python docs/benchmarks/pd_asgd.py time --data-dir ~/data [--model resnet20]

CIFAR-10's first 20,000 images, batch 128. Accuracy: 3 epochs, lr 0.1; rows that the JSON holds
are not repeated, --rows and --seeds choose some. Time: on two cores, one thread an operation but
where a row says two; all rows take turns on the same mini-batches in one process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hybrid import Trainer, data, split
from hybrid.data import Dataset
from hybrid.links import RankLinks, run_threads
from hybrid.method.blocks import make_block, make_optimizer
from hybrid.networks import models
from hybrid.ranks import launch
from hybrid.rounds.report import DivergedError
from hybrid.rounds.windows import EpochSource
from hybrid.settings.config import OptimizerSettings, TrainSettings
from hybrid.solvers import PDASGD, Backprop, Batch, Setup, Solver, Window

FILE = Path(__file__).with_name("pd_asgd.json")
BATCH, WINDOW = 128, 4
CPU = torch.device("cpu")

ACCURACY: Mapping[str, Solver] = {
    "SGD": Backprop(),
    "1 forward, 2 backward slots": PDASGD(),
    "1 forward, 2 backward slots, current weights": PDASGD(weights="current"),
    "1 forward, 1 backward slot": PDASGD(backward_slots=1),
    "one slot, queue 1: all units 1 step late": PDASGD(backward_slots=0, queue=1),
    "one slot, queue 2: all units 2 steps late": PDASGD(backward_slots=0, queue=2),
    "any order, 1 + 2 threads": PDASGD(any_order=True),
}

TIME: Mapping[str, tuple[Solver | None, int]] = {
    # solver, or the plain loop; threads of an operation
    "plain loop, one thread": (None, 1),
    "plain loop, two threads": (None, 2),
    "1 + 1 slots, one thread": (PDASGD(backward_slots=1), 1),
    "1 + 1 slots, a thread each": (PDASGD(backward_slots=1, threads=True), 1),
    "1 + 2 slots, a thread each": (PDASGD(threads=True), 1),
    "1 + 1 threads in any order": (PDASGD(backward_slots=1, any_order=True), 1),
    "1 + 2 threads in any order": (PDASGD(any_order=True), 1),
}


def accuracy(
    solver: Solver, model: str, seed: int, epochs: int, images: Dataset, test: Dataset
) -> float | str:
    """In per cent, or why there is none."""
    torch.manual_seed(seed)
    trainer = Trainer(
        split(models.build(model, 10, 3, 32), 1),
        solver,
        train=TrainSettings(epochs=epochs, seed=seed, threads=1, evaluate_every=100),
        optimizer=OptimizerSettings(lr=0.1),
        quiet=True,
    )
    try:
        return 100 * float(trainer.fit(images, test)["test_accuracy"])
    except DivergedError as error:
        return str(error)


def accuracies(options: argparse.Namespace) -> None:
    images, test = data.load("cifar10", options.data_dir, options.limit)
    for seed in options.seeds:
        for name in options.rows or ACCURACY:
            key = f"{options.model}, {options.epochs} epochs: {name}"
            if str(seed) not in known()["accuracy"].get(key, {}):
                size = options.model, seed, options.epochs
                found = accuracy(ACCURACY[name], *size, images, test)
                rows = known()
                rows["accuracy"].setdefault(key, {})[str(seed)] = found
                keep(rows)
    print("| run | test accuracy | seeds |\n|---|---|---|")
    for key, by_seed in known()["accuracy"].items():
        values = [v for v in by_seed.values() if not isinstance(v, str)]
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        print(f"| {key} | {f'{mean(values):.1f}{spread} %' if values else 'diverged'} |", end="")
        print(f" {len(by_seed)} |")


def plain_loop(model: str, windows: Sequence[Window]) -> Callable[[], None]:
    """A hand-written loop over the windows."""
    network = built(model).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    sgd = make_optimizer(network, OptimizerSettings())

    def loop() -> None:
        for batch in (batch for window in windows for batch in window.batches):
            loss = nn.functional.cross_entropy(network(batch.images()), batch.labels())
            loss.backward()
            for group in sgd.param_groups:
                group["lr"] = batch.learning_rate
            sgd.step()
            sgd.zero_grad(set_to_none=True)

    return loop


def program(
    solver: Solver, model: str, windows: Sequence[Window], links: RankLinks
) -> Callable[[], None]:
    """A rank's program over the windows, of which the last flights stay under way."""
    setup = Setup(batch_size=BATCH, correct_every=0)
    solver.check(setup)
    block = make_block(split(built(model), 1), 0, OptimizerSettings(), CPU)
    mine = solver.start(block, links, setup)

    def loop() -> None:
        for window in windows:
            mine.train(window)

    return loop


def times(options: argparse.Namespace) -> None:
    launch.keep_memory()
    images, _ = data.load("cifar10", options.data_dir, options.limit)
    source = EpochSource(images, 0, 0, True, CPU)
    every = torch.arange(len(images)).split(BATCH)[: options.steps]
    batches = [Batch(ids, 0.01, source, step) for step, ids in enumerate(every)]
    windows = [Window(batches[i : i + WINDOW]) for i in range(0, len(batches), WINDOW)]

    def session(links: RankLinks) -> dict[str, list[float]]:
        loops = {
            name: plain_loop(options.model, windows)
            if solver is None
            else program(solver, options.model, windows, links)
            for name, (solver, _) in TIME.items()
            if name in (options.rows or TIME)
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(options.turns + 1):
            for name in [*loops][:: 1 if turn % 2 else -1]:
                torch.set_num_threads(TIME[name][1])
                start = perf_counter()
                loops[name]()
                if turn:  # the first fills pipelines and caches
                    seconds[name].append(perf_counter() - start)
        return seconds

    count = sum(map(len, batches))
    found = {name: [count / s for s in each] for name, each in run_threads(1, session)[0].items()}
    rows = known()
    rows["images_per_second"][options.model] = found
    keep(rows)
    base = found.get("plain loop, one thread", [1.0])
    print(f"| {options.model} | images/s, median | over the first, turn by turn |\n|---|---|---|")
    for name, rates in found.items():
        ratios = [rate / own for rate, own in zip(rates, base, strict=False)]
        print(f"| {name} | {median(rates):.1f} | {median(ratios):.2f} ({min(ratios):.2f}, ", end="")
        print(f"{max(ratios):.2f}) |")


def built(model: str) -> nn.Module:
    torch.manual_seed(0)
    return models.build(model, 10, 3, 32)


def known() -> dict[str, dict[str, Any]]:
    """The figures there are."""
    empty: dict[str, dict[str, Any]] = {"accuracy": {}, "images_per_second": {}}
    return empty | (json.loads(FILE.read_text()) if FILE.exists() else {})


def keep(rows: dict[str, dict[str, Any]]) -> None:
    FILE.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["accuracy", "time"])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--limit", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    accuracies(options) if options.what == "accuracy" else times(options)


if __name__ == "__main__":
    main()
