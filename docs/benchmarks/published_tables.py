"""Tables that others have printed, trained again.

    python docs/benchmarks/published_tables.py fdg --data-dir ~/data [--epochs 30] [--rows "K=4"]
    python docs/benchmarks/published_tables.py fdg-resnet20 --data-dir ~/data --epochs 6
    python docs/benchmarks/published_tables.py length --data-dir ~/data --epochs 12
    python docs/benchmarks/published_tables.py dgl --data-dir ~/data [--epochs 5]
    python docs/benchmarks/published_tables.py --only-collect --data-dir ~/data

    fdg     ResNet-56 on CIFAR-10 (github ZHUANGHP/FDG): batch 128, m = 1, SGD at 0.1, divided by
            ten after 1/2, 3/4 and 11/12 of the epochs, momentum 0.9, weight decay 5e-4, its cuts
    fdg-resnet20    the same on ResNet-20 in four blocks, bfloat16: what a processor has time for
    length  ResNet-8 in four blocks by the same recipe, 10,000 images, for 3, 12 and 48 epochs
    dgl     three convolutions of 128 5 x 5 filters (github eugenium/DGL, dni_comparisons): batch
            256, Adam at 3e-5; heads of three such convolutions, a mean and a linear layer

On the virtual clock, one thread. A training that was broken off goes on, and those that the JSON
holds are not repeated. Both use all 50,000 images, cropped and flipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import nn

from hybrid import Trainer, data, split
from hybrid.networks import models
from hybrid.solvers import DDG, FDG, Backprop, FeaturesReplay, LocalUpdates, Solver

RAW = measuring.Raw(__file__)


@dataclass(frozen=True)
class Row:
    """One training."""

    blocks: int
    solver: Solver
    published: dict[str, float]
    """Test error in %, by the number of epochs: theirs."""


CUTS = {
    1: [],
    2: ["layer2.4"],
    3: ["layer2.0", "layer3.0"],
    4: ["layer1.6", "layer2.4", "layer3.2"],
}
"""Where FDG's program cuts ResNet-56."""
CUTS_20 = {1: [], 4: ["layer1.2", "layer2.1", "layer3.1"]}
ERRORS = {
    "ddg": (6.60, 6.50, 6.61),
    "local-updates": (6.77, 8.88, 9.65),
    "features-replay": (6.07, 6.33, 6.48),
    "fdg, b=1": (6.20, 6.20, 6.83),
    "fdg, b=0.5": (5.90, 6.08, 6.14),
}
"""Of K = 2, 3, 4 after 300 epochs; back-propagation has 6.19."""
SOLVERS: dict[str, Solver] = {
    "local-updates": LocalUpdates(),
    "fdg, b=0.5": FDG(micro_batches=1, gradient_shrinking=0.5),
    "features-replay": FeaturesReplay(micro_batches=1),
    "ddg": DDG(micro_batches=1),
    "fdg, b=1": FDG(micro_batches=1),
}
"""By how much they differ there."""


def fdg() -> Iterator[tuple[str, Row]]:
    yield "backprop", Row(1, Backprop(), {"300": 6.19})
    for K in (4, 2, 3):
        for name, solver in SOLVERS.items():
            yield f"{name}, K={K}", Row(K, solver, {"300": ERRORS[name][K - 2]})
    head = LocalUpdates(head="published_tables:convolutional")
    yield "local-updates with a convolution, K=4", Row(4, head, {})
    yield "fdg, b=1, newest weights, K=4", Row(4, FDG(micro_batches=1, stash=False), {})


def fdg_resnet20() -> Iterator[tuple[str, Row]]:
    yield from ((name, row) for name, row in fdg() if row.blocks in CUTS_20)


def convolutional(index: int, shape: Any, output: Any) -> nn.Module:
    """A head of one 3 x 3 convolution and two linear layers ("1c2f")."""
    conv = nn.Conv2d(shape[0], 128, 3, padding=1, bias=False)
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128), nn.ReLU())
    return nn.Sequential(conv, nn.BatchNorm2d(128), nn.ReLU(), *pooled, nn.Linear(128, *output))


def dgl() -> Iterator[tuple[str, Row]]:
    logs = {"5": 56.2, "10": 60.9, "20": 65.7, "50": 74.0}
    heads = LocalUpdates(head="published_tables:synthesizer")
    yield "backprop", Row(1, Backprop(), logs)
    logs = {"5": 55.4, "10": 62.7, "20": 66.7, "50": 72.6}
    yield "local-updates, its heads, K=3", Row(3, heads, logs)
    yield "local-updates, K=3", Row(3, LocalUpdates(), {})


def filters(channels: int = 128) -> nn.Module:
    return nn.Conv2d(channels, 128, 5, padding=2)


def synthesizer(index: int, shape: Any, output: Any) -> nn.Module:
    """DGL's head in its comparison with synthetic gradients; the last filters begin at zero."""
    last = filters()
    nn.init.zeros_(last.weight)
    norms = [part for _ in range(2) for part in (filters(), nn.BatchNorm2d(128), nn.ReLU())]
    return nn.Sequential(*norms, last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def three_layers() -> nn.Sequential:
    """A unit each, with the linear layer in the last."""
    pools = nn.MaxPool2d(3), nn.AvgPool2d(3), nn.AvgPool2d(3)
    units = [
        nn.Sequential(filters(128 if k else 3), nn.BatchNorm2d(128), nn.ReLU(), pool)
        for k, pool in enumerate(pools)
    ]
    units[2].extend([nn.Flatten(), nn.Linear(128, 10)])
    return nn.Sequential(*units)


def length() -> Iterator[tuple[str, Row]]:
    yield "backprop", Row(1, Backprop(), {})
    yield "ddg", Row(4, DDG(micro_batches=1), {})
    yield "ddg, m=8", Row(4, DDG(micro_batches=8), {})


TABLES = {"fdg": fdg, "fdg-resnet20": fdg_resnet20, "length": length, "dgl": dgl}


def train(table: str, row: Row, seed: int, options: Any, out: Path) -> None:
    """One training into its run folder."""
    images, test = data.load("cifar10", options.data_dir, 10_000 if table == "length" else 0)
    torch.manual_seed(seed)
    settings: dict[str, Any]
    precision = "float32" if table == "fdg" else "bfloat16"
    networks = {
        "fdg": ("resnet56", CUTS),
        "fdg-resnet20": ("resnet20", CUTS_20),
        "length": ("resnet8", {1: [], 4: ["layer1.0", "layer2.0", "layer3.0"]}),
    }
    if table in networks:
        name, cuts = networks[table]
        blocks = split(models.build(name, 10, 3, 32), cuts=cuts[row.blocks])
        optimizer = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 5e-4}
        schedule = {"name": "step", "milestones": [1 / 2, 3 / 4, 11 / 12], "warmup_epochs": 0}
        settings = {"batch_size": 128, "optimizer": optimizer, "schedule": schedule}
    else:
        blocks = split(three_layers(), row.blocks, balance="even")
        optimizer = {"name": "Adam", "lr": 3e-5}
        schedule = {"name": "constant", "warmup_epochs": 0}
        settings = {"batch_size": 256, "optimizer": optimizer, "schedule": schedule}
    size = settings.pop("batch_size")
    Trainer(
        blocks,
        row.solver,
        train={
            "epochs": options.epochs,
            "batch_size": size,
            "seed": seed,
            "threads": 1,
            "precision": precision,
        },
        links={"kind": "virtual"},
        checkpoint={"every": 1, "keep_last": 1},
        out=out,
        resume=(out / "checkpoints").exists(),
        quiet=False,
        **settings,
    ).fit(images, test)


def main() -> None:
    folder = Path("runs/published-tables")
    flags = {**measuring.GRID, "seeds": [0], "tables": TABLES, "runs": folder, "epochs": 30}
    options = measuring.options(__doc__, **flags)
    torch.set_num_threads(1)
    length = f"{options.epochs}-epochs"
    for table in options.tables:
        for seed in options.seeds:
            for name, row in measuring.chosen(TABLES[table](), options):
                out = options.runs / table / length / measuring.slug(name, seed)
                if not RAW.get(table, length, name, str(seed)) and not options.only_collect:
                    out.parent.mkdir(parents=True, exist_ok=True)
                    train(table, row, seed, options, out)
                kept = measuring.of_summary(out)
                if kept is not None:
                    curve = measuring.curve(out / "metrics.jsonl")
                    RAW.keep(table, length, name, str(seed), value={**kept, "curve": curve})
    for table, lengths in RAW.read().items():
        published = {name: row.published for name, row in TABLES[table]()}
        for length, rows in lengths.items():
            measuring.show(
                f"{table}, {length} | accuracy, % | seeds | published",
                (
                    (
                        name,
                        measuring.spread([100 * s["test_accuracy"] for s in seeds.values()]),
                        len(seeds),
                        published.get(name, ""),
                    )
                    for name, seeds in rows.items()
                ),
            )


if __name__ == "__main__":
    main()
