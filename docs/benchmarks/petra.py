"""PETRA on RevNets: its gap to reversible back-propagation, by optimizer, and what blocks hold.

    python docs/benchmarks/petra.py accuracy --data-dir ~/data [--seeds 0 1] [--rows "m=1, muon"]
    python docs/benchmarks/petra.py held [--size 224] [--batch 64]

accuracy: RevNet-14 (--model) on CIFAR-10's first 10,000 images, halved to 16 x 16 pixels, bfloat16,
one thread, the virtual clock. m = 1 steps on mini-batches of 64, m = 8 on 128 in micro-batches of
16. SGD has the paper's recipe: Nesterov momentum 0.9, weight decay 5e-4 but for norms and biases,
lr 0.1 b / 256 for mini-batches of b; Muon has lr 0.1 for 128. Both warm up for a tenth of the
training. The whole network in one block is reversible back-propagation.

held: bytes that the blocks of a ResNet-50 and of its RevNet hold for backward passes with m = 1,
as `hybrid show --memory` counts them from what autograd saves for 2 samples; tests compare that
count with runs.

Runs that the JSON holds are not repeated; --only-collect prints its tables.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any, Literal

import measuring
import torch

from hybrid import data, split
from hybrid.data import Dataset
from hybrid.method.memory import saved_bytes
from hybrid.networks import models
from hybrid.rounds.phase_report import DivergedError
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import DDG, FDG, Backprop, FeaturesReplay, Petra, Solver
from hybrid.solvers.numerics.weights import trained_bytes

RAW = measuring.Raw(__file__)
EXTRAPOLATE: Literal["extrapolate"] = "extrapolate"
SIZES = {1: 64, 8: 128}
"""Mini-batches by m."""


@dataclass(frozen=True)
class Row:
    """One training."""

    m: int
    blocks: int
    optimizer: str
    mend: Literal["none", "extrapolate"] = "none"
    cap: float = 1.0


def rows() -> Iterator[tuple[str, Row]]:
    """Those that decide most first."""
    for m in SIZES:
        mends = [("", Row(m, 0, "")), (", extrapolated, c = 1 at most", Row(m, 0, "", EXTRAPOLATE))]
        if m == 1:
            mends.append((", extrapolated, c = tau", Row(m, 0, "", EXTRAPOLATE, cap=100.0)))
        for optimizer in "muon", "sgd":
            yield f"m={m}, {optimizer}, backprop", Row(m, 1, optimizer)
        for (mended, row), K, optimizer in product(mends, (4, 8), ("muon", "sgd")):
            title = f"m={m}, {optimizer}, petra, K={K}{mended}"
            yield title, replace(row, blocks=K, optimizer=optimizer)


def halved(images: Dataset) -> Dataset:
    """Half the height and width, and half the padding of the augmentation."""
    small = torch.nn.functional.avg_pool2d(images.images.float(), 2).round().to(torch.uint8)
    crop = replace(images.augmentation, pad=images.augmentation.pad // 2)
    return replace(images, images=small, augmentation=crop, digest="")


def trained(row: Row, seed: int, options: Namespace, sets: tuple[Dataset, Dataset]) -> Any:
    """The result of a training, or why there is none."""
    size = SIZES[row.m]
    rates = {"sgd": 0.1 * size / 256, "muon": 0.1 * size / 128}
    late = {"mend": row.mend, "cap": row.cap} if row.mend != "none" else {}
    torch.manual_seed(seed)
    trainer = measuring.on_virtual_links(
        models.build(options.model, 10, 3, 16),
        row.blocks,
        Backprop(micro_batches=row.m) if row.blocks == 1 else Petra(micro_batches=row.m),
        train={
            "epochs": options.epochs,
            "batch_size": size,
            "seed": seed,
            "precision": "bfloat16",
            "evaluate_every": 100,
        },
        schedule={"warmup_epochs": 0.1 * options.epochs},
        optimizer=OptimizerSettings(name=row.optimizer, lr=rates[row.optimizer]),
        delay=late,
    )
    try:
        summary = trainer.fit(*sets)
    except DivergedError as error:
        return {"failed": str(error)}
    return {key: summary[key] for key in ("test_accuracy", "train_seconds")}


def accuracies(options: Namespace) -> None:
    run = f"{options.model}, {options.limit} images, {options.epochs} epochs"
    if not options.only_collect:
        train, test = (halved(x) for x in data.load("cifar10", options.data_dir, options.limit))
        for seed in options.seeds:
            for title, row in measuring.chosen(rows(), options):
                if not RAW.get("accuracy", run, title, str(seed)):
                    kept = trained(row, seed, options, (train, test))
                    RAW.keep("accuracy", run, title, str(seed), value=kept)
                    print(title, seed, kept, flush=True)
    measuring.show("run | test accuracy, % | less than backprop | seeds", accuracy_cells(run))


def accuracy_cells(run: str) -> Iterator[tuple[object, ...]]:
    table = RAW.get("accuracy", run)
    for title, by_seed in table.items():
        ended = {s: 100 * x["test_accuracy"] for s, x in by_seed.items() if "failed" not in x}
        base = table.get(
            f"{title.partition(', petra')[0].removesuffix(', backprop')}, backprop", {}
        )
        gaps = [100 * base[s]["test_accuracy"] - x for s, x in ended.items() if s in base]
        cell = measuring.spread([*ended.values()]) if ended else "diverged"
        yield title, cell, f"{mean(gaps):.1f}" if gaps else "", len(ended)


HELD: dict[str, tuple[str, Solver]] = {
    "revnet50: fdg, graphs and versions": ("revnet50", FDG(1)),
    "revnet50: fdg, inputs and versions": ("revnet50", FDG(1, recompute=True)),
    "revnet50: petra": ("revnet50", Petra(1)),
    "resnet50: ddg, graphs and versions": ("resnet50", DDG(1)),
    "resnet50: ddg, no stash": ("resnet50", DDG(1, stash=False)),
    "resnet50: ddg, inputs and versions": ("resnet50", DDG(1, recompute=True)),
    "resnet50: features-replay": ("resnet50", FeaturesReplay(1)),
}


def held(model: str, solver: Solver, blocks: int, size: int, batch: int) -> list[dict[str, int]]:
    """Of each block: the bytes of activations it holds, of older versions, and of its weights."""
    torch.manual_seed(0)
    parts = split(models.build(model, 1000, 3, size), blocks, inside=False)
    lam, table = torch.zeros(2, 3, size, size), []
    for k in range(blocks):
        module = parts.module(k)
        count = solver.versions(k, blocks, 2) if isinstance(solver, DDG) else 0
        versions = count * trained_bytes(module)
        for_two = solver.held_bytes(module, lam, k, blocks, saved_bytes) - versions
        weights = sum(p.nbytes for p in module.parameters())
        table.append(
            {"activations": for_two * batch // 2, "versions": versions, "weights": weights}
        )
        with torch.no_grad():
            lam = module(lam)
        lam.requires_grad_()
    return table


def holdings(options: Namespace) -> None:
    run = f"{options.size} pixels, mini-batches of {options.batch}"
    for K in () if options.only_collect else (4, 8):
        for title, (model, solver) in HELD.items():
            if options.rows in title and not RAW.get("held", run, f"K={K}", title):
                value = held(model, solver, K, options.size, options.batch)
                RAW.keep("held", run, f"K={K}", title, value=value)
    gigabytes = "activations | older weights | all | largest block | with weights, gradient, moment"
    for K, table in RAW.get("held", run).items():
        measuring.show(f"{run}, {K}, GB | {gigabytes}", map(held_cells, table.items()))


def held_cells(entry: tuple[str, list[dict[str, int]]]) -> tuple[str, ...]:
    title, blocks = entry
    activations, versions, weights = (
        sum(block[key] for block in blocks) for key in ("activations", "versions", "weights")
    )
    largest = max(block["activations"] + block["versions"] for block in blocks)
    every = (activations, versions, activations + versions, largest)
    return title, *(f"{x / 1e9:.2f}" for x in (*every, activations + versions + 3 * weights))


def main() -> None:
    flags = {**measuring.GRID, "model": "revnet14", "limit": 10_000, "epochs": 4}
    options = measuring.options(__doc__, what=("accuracy", "held"), size=224, batch=64, **flags)
    torch.set_num_threads(1)
    {"accuracy": accuracies, "held": holdings}[options.what](options)


if __name__ == "__main__":
    main()
