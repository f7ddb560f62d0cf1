"""What local steps in the waits of a delayed pipeline are worth: trainings at equal epochs.

    python docs/benchmarks/filled_waits.py screen --data-dir ~/data [--seeds 0 1] [--rows "K=4"]
    python docs/benchmarks/filled_waits.py serial --data-dir ~/data
    python docs/benchmarks/filled_waits.py --only-collect

    screen    ResNet-14, 10,000 images of CIFAR-10, 4 epochs, mini-batches of 128 in 8 micro-batches
    serial    the same with serial corrections between, at the start, and before a test
    longer    ResNet-20, 20,000 images, 8 epochs

The local work of a row is given, in samples a tick of the 16 of a micro-batch, on every block: so
accuracy does not depend on this machine, and times are filled_map.py's. Rates are those of
tolerance.py: SGD 0.25 (Nesterov 0.9), Muon 0.2, and one warm-up of a tenth. Trainings that are in
filled_waits.json are not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import measuring
import torch
from torch import Tensor

from hybrid import data
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop, Penalty, Solver
from hybrid.solvers.codecs.formats import Float32
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.registry import CODECS

RAW = measuring.Raw(__file__)
M, MICRO_BATCH = 8, 16
OPTIMIZERS = {
    "SGD": OptimizerSettings(lr=0.25),
    "Muon": OptimizerSettings(name="muon", lr=0.2),
}
LOCAL = AugmentedLagrangian(beta=5e-4, local_lr=0.6)


class Sparse(Float32):
    """Of every sample of a message an eighth of the values, the largest; the others are 0.

    What would travel is two bytes a value and two for its place: what int8 takes for half of them.
    """

    name = "sparse"

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ...]:
        flat = x.flatten(1)
        least = flat.abs().topk(max(1, flat.shape[1] // 8), dim=1).values[:, -1:]
        return (torch.where(flat.abs() >= least, flat, 0).view_as(x),)


CODECS.places = {**CODECS.places, "sparse": f"{__name__}:Sparse"}


@dataclass(frozen=True)
class Row:
    """One training."""

    solver: Solver
    blocks: int = 4
    optimizer: str = "SGD"
    samples: int = 0
    """Of local work in a tick, on every block."""
    fill: Solver = field(default_factory=lambda: LOCAL)
    mend: str = "none"
    depth: int = 14
    images: int = 10_000
    epochs: int = 4
    rounds: dict[str, Any] = field(default_factory=dict)


def screen() -> Iterator[tuple[str, Row]]:
    """Those that decide most first."""
    ddg, fdg = DDG(micro_batches=M), FDG(micro_batches=M)
    eight = DDG(micro_batches=M, messages="int8")
    gentle = AugmentedLagrangian(local_lr=0.3)
    for name in OPTIMIZERS:
        yield f"flushed, {name}", Row(Backprop(micro_batches=M), 1, name)
        yield f"ddg, {name}, K=4", Row(ddg, 4, name)
        yield f"ddg, {name}, K=4, 16 local", Row(ddg, 4, name, 16)
        yield f"ddg, {name}, K=4, 8 local", Row(ddg, 4, name, 8)
        yield f"ddg, {name}, K=4, 16 local at 0.3", Row(ddg, 4, name, 16, gentle)
        yield f"ddg, {name}, K=4, 6 epochs", Row(ddg, 4, name, epochs=6)
        yield f"ddg, {name}, K=8", Row(ddg, 8, name)
        yield f"ddg, {name}, K=8, 16 local at 0.3", Row(ddg, 8, name, 16, gentle)
        yield f"ddg, {name}, K=4, int8", Row(eight, 4, name)
        yield f"ddg, {name}, K=4, int8, 16 local at 0.3", Row(eight, 4, name, 16, gentle)
        sparse = Row(DDG(micro_batches=M, messages="sparse"), 4, name)
        yield f"ddg, {name}, K=4, an eighth of the values", sparse
        yield f"fdg, {name}, K=4", Row(fdg, 4, name)
        yield f"fdg, {name}, K=4, 16 local at 0.3", Row(fdg, 4, name, 16, gentle)
        mended = Row(ddg, 8, name, 16, gentle, mend="extrapolate")
        yield f"ddg, {name}, extrapolated, K=8, 16 local at 0.3", mended
        fill = Penalty(local_lr=0.3)
        yield f"ddg, {name}, K=4, 16 local by penalty at 0.3", Row(ddg, 4, name, 16, fill)


def serial() -> Iterator[tuple[str, Row]]:
    """Each beside the same without corrections, which `screen` has."""
    ddg = DDG(micro_batches=M)
    ways: dict[str, dict[str, Any]] = {
        "every 8th window": {"correct_every": 8},
        "first epoch": {"serial_epochs": 1.0},
        "last window": {"serial_end": True},
    }
    for name in OPTIMIZERS:
        for title, rounds in ways.items():
            yield f"ddg, {name}, K=8, {title} serial", Row(ddg, 8, name, rounds=rounds)


def longer() -> Iterator[tuple[str, Row]]:
    """The two that matter most, for longer."""
    size: dict[str, Any] = {"depth": 20, "images": 20_000, "epochs": 8}
    for name in "Muon", "SGD":
        ddg = DDG(micro_batches=M)
        yield f"longer: ddg, {name}, K=4", Row(ddg, 4, name, **size)
        yield f"longer: ddg, {name}, K=4, 16 local", Row(ddg, 4, name, 16, **size)


TABLES = {"screen": screen, "serial": serial, "longer": longer}


def train(row: Row, seed: int, data_dir: Path) -> dict[str, Any]:
    """Test accuracy at the end."""
    images, test = data.load("cifar10", data_dir, row.images)
    local = (
        {"fill": row.fill, "local_budget": [(row.samples, 0)] * row.blocks} if row.samples else {}
    )
    summary = measuring.on_virtual_links(
        *(measuring.resnet(f"resnet{row.depth}", seed), row.blocks, row.solver),
        train={"epochs": row.epochs, "seed": seed, "report_every": 16},
        optimizer=OPTIMIZERS[row.optimizer],
        schedule={"name": "linear", "warmup_epochs": 0.1 * row.epochs},
        delay={"mend": row.mend},
        **row.rounds | local,
    ).fit(images, test.take(5_000))
    return {"accuracy": summary["test_accuracy"], "fill_steps": sum(summary["local_steps"])}


def main() -> None:
    options = measuring.options(__doc__, tables=TABLES, **measuring.GRID)
    torch.set_num_threads(1)
    for table in () if options.only_collect else options.tables:
        for seed in options.seeds:
            for name, row in measuring.chosen(TABLES[table](), options):
                if not RAW.get(name, str(seed)):
                    RAW.keep(name, str(seed), value=train(row, seed, options.data_dir))
                    print(f"{name}, seed {seed}: {RAW.get(name, str(seed))}", flush=True)
    percent = {
        name: [100 * seeds[seed]["accuracy"] for seed in sorted(seeds)]
        for name, seeds in RAW.read().items()
    }
    measuring.show(
        "training | test accuracy, % | mean",
        ((n, "; ".join(f"{x:.1f}" for x in xs), f"{mean(xs):.1f}") for n, xs in percent.items()),
    )


if __name__ == "__main__":
    main()
