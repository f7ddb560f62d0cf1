"""Samples/s of ways to train on several ranks, by the virtual clock, over serial training's.

    python docs/benchmarks/virtual_rates.py sgd --data-dir ~/data       ResNets by SGD
    python docs/benchmarks/virtual_rates.py muon --data-dir ~/data      by Muon, and replicas
    python docs/benchmarks/virtual_rates.py gpt                         a GPT by AdamW on slow links

One thread, links of 10 Gb/s unless a row says otherwise, and 10 us; short trainings, interleaved,
medians of turns. With the accuracies of delays.py and to_the_end.py this gives times to an
accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import measuring
import torch

from hybrid import OptimizerSettings, Trainer, data, split
from hybrid.data import Data, Texts
from hybrid.networks import models
from hybrid.solvers import DDG, Backprop, Solver
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.diloco import DiLoCo

SGD, MUON = OptimizerSettings(), OptimizerSettings(name="muon")
ADAMW = OptimizerSettings(name="adamw")
LENGTH = 128


@dataclass(frozen=True)
class Row:
    """One way to train."""

    model: str
    solver: Solver = field(default_factory=Backprop)
    blocks: int = 1
    optimizer: OptimizerSettings = field(default_factory=lambda: SGD)
    extrapolated: bool = False
    replicas: int = 1
    sync: Strategy = field(default_factory=AllReduce)
    gigabits: float = 10.0


def sgd() -> Mapping[str, Row]:
    flushed, late = Backprop(micro_batches=8), DDG(micro_batches=8)
    return {
        "ResNet-20, serial": Row("resnet20"),
        "ResNet-20, flushed, K=2, m=8": Row("resnet20", flushed, 2),
        "ResNet-20, ddg, K=2, m=8": Row("resnet20", late, 2),
        "ResNet-20, flushed, K=4, m=8": Row("resnet20", flushed, 4),
        "ResNet-20, ddg, K=4, m=4": Row("resnet20", DDG(micro_batches=4), 4),
        "ResNet-20, ddg, K=4, m=8": Row("resnet20", late, 4),
        "ResNet-20, ddg, K=8, m=8": Row("resnet20", late, 8),
        "ResNet-56, serial": Row("resnet56"),
        "ResNet-56, flushed, K=8, m=8": Row("resnet56", flushed, 8),
        "ResNet-56, ddg, K=8, m=8": Row("resnet56", late, 8),
    }


def muon() -> Mapping[str, Row]:
    flushed, late = Backprop(micro_batches=8), DDG(micro_batches=8)
    rows = {"ResNet-20, serial by SGD": Row("resnet20")}
    for title, model, counts in (
        ("ResNet-20", "resnet20", (4, 8)),
        ("ResNet-56", "resnet56", (16,)),
    ):
        rows[f"{title}, serial"] = Row(model, optimizer=MUON)
        for n in counts:
            rows[f"{title}, flushed, K={n}"] = Row(model, flushed, n, MUON)
            rows[f"{title}, ddg, K={n}"] = Row(model, late, n, MUON, extrapolated=True)
            for rate in 10.0, 1.0:
                name = f"{title}, {n} replicas, {rate:g} Gb/s"
                rows[name] = Row(model, optimizer=MUON, replicas=n, gigabits=rate)
    return rows


def gpt() -> Mapping[str, Row]:
    rows = {"gpt-8-256, serial": Row("gpt-8-256", optimizer=ADAMW)}
    for n, rate in ((4, 10.0), (4, 1.0), (4, 0.1), (8, 1.0), (8, 0.1)):
        where = f"{rate:g} Gb/s"
        late = DDG(micro_batches=4)
        rows[f"gpt-8-256, ddg, K={n}, {where}"] = Row(
            "gpt-8-256", late, n, ADAMW, extrapolated=True, gigabits=rate
        )
        if rate < 1:
            eight = DDG(micro_batches=4, messages="int8")
            rows[f"gpt-8-256, ddg, int8, K={n}, {where}"] = Row(
                "gpt-8-256", eight, n, ADAMW, extrapolated=True, gigabits=rate
            )
        plain = Row("gpt-8-256", optimizer=ADAMW, replicas=n, gigabits=rate)
        rows[f"gpt-8-256, {n} replicas, {where}"] = plain
        rows[f"gpt-8-256, {n} replicas, diloco, {where}"] = Row(
            "gpt-8-256", optimizer=ADAMW, replicas=n, sync=DiLoCo(steps=STEPS), gigabits=rate
        )
    return rows


STEPS = 12
"""Of a training by Muon or of a GPT; of diloco's rounds, too, so that each has one."""
SGD_STEPS = 24
TABLES = {"sgd": sgd, "muon": muon, "gpt": gpt}


def samples(model: str, steps: int, data_dir: Path) -> tuple[Data, Data, int]:
    """Training and test samples for so many steps, and how many are in a mini-batch."""
    if not model.startswith("gpt"):
        images, test = data.load("cifar10", data_dir, 128 * steps)
        return images, test.take(128), 128
    size, random = 16, torch.Generator().manual_seed(0)
    text = torch.randint(256, (size * steps + LENGTH + 1,), generator=random, dtype=torch.uint8)
    windows = Texts(text, torch.arange(size * steps), LENGTH)
    return windows, windows.take(size), size


def train(row: Row, steps: int, data_dir: Path) -> float:
    """Samples/s of one short training."""
    train, test, size = samples(row.model, steps, data_dir)
    torch.manual_seed(0)
    shape = {"length": LENGTH} if row.model.startswith("gpt") else {"channels": 3, "image_size": 32}
    network = models.build(row.model, 256 if "length" in shape else 10, **shape)
    trainer = Trainer(
        split(network, row.blocks, balance="measured"),
        row.solver,
        train={"epochs": 1, "batch_size": size, "threads": 1, "report_every": steps},
        optimizer=row.optimizer,
        delay={"mend": "extrapolate" if row.extrapolated else "none"},
        links={"kind": "virtual", "gigabits_per_second": row.gigabits},
        replicas=row.replicas,
        quiet=True,
        sync=row.sync,
    )
    return float(trainer.fit(train, test)["images_per_second"])


def main() -> None:
    options = measuring.options(__doc__, table=TABLES, data_dir=measuring.DATA, turns=3)
    rows = TABLES[options.table]()
    steps = SGD_STEPS if options.table == "sgd" else STEPS
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.turns):
        for name, row in rows.items():
            rates[name].append(train(row, steps, options.data_dir))
    shares = {
        name: [a / b for a, b in zip(x, rates[f"{name.partition(',')[0]}, serial"], strict=True)]
        for name, x in rates.items()
    }
    measuring.show(
        " | samples/s | over serial, median (least, most)",
        ((n, f"{median(x):.0f}", measuring.extremes(shares[n])) for n, x in rates.items()),
    )
    suffix = "" if options.table == "sgd" else f"_{options.table}"
    measuring.Raw(__file__, suffix).write(rates)


if __name__ == "__main__":
    main()
