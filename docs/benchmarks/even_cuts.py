"""Images/s of ResNet-20 in blocks of whole units, and with cuts inside them, on virtual links.

    python docs/benchmarks/even_cuts.py --data-dir ~/data [--ranks 4 8 16] [--turns 3]

Links of 10 Gb/s and 10 us, one thread a rank, m = 8; short trainings in turns, and their rates over
one rank's in the same turn. "Counted" blocks are cut inside units by counted operations, "timed"
ones by times of micro-batches and the bytes that cross, for the shortest tick. Replicas are as many
ranks with all of the network. Cases that the JSON holds are not repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import measuring
import torch

from hybrid import Trainer, data, split
from hybrid.data import Data
from hybrid.networks import models
from hybrid.networks.partition.balance import Messages
from hybrid.solvers import DDG, FDG, Backprop, Solver

RAW = measuring.Raw(__file__)
STEPS, BATCH, M, RATE = 24, 128, 8, 10e9 / 8


def rows(ranks: int) -> dict[str, tuple[Solver, int, dict[str, Any]]]:
    """By name: a method, its blocks, how the network is cut."""
    ways: dict[str, tuple[Solver, int, dict[str, Any]]] = {"one rank": (Backprop(), 1, {})}
    for name, solver, hops in (("ddg", DDG(micro_batches=M), 1), ("fdg", FDG(micro_batches=M), 2)):
        sample = models.resnet(20).sample(BATCH // M)
        timed = {"balance": "measured", "sample": sample, "messages": Messages(1 / RATE, hops)}
        if ranks <= 11:
            ways[f"{name}, whole units"] = solver, ranks, {"inside": False}
        ways[f"{name}, counted"] = solver, ranks, {"inside": True}
        ways[f"{name}, timed"] = solver, ranks, timed
    return ways


def rate(solver: Solver, blocks: int, how: dict[str, Any], replicas: int, train: Data) -> float:
    torch.manual_seed(0)
    trainer = Trainer(
        split(models.resnet(20), blocks, **how),
        solver,
        train={"epochs": 1, "batch_size": BATCH, "threads": 1, "report_every": STEPS},
        links={"kind": "virtual", "gigabits_per_second": 10.0},
        replicas=replicas,
        quiet=True,
    )
    return float(trainer.fit(train)["images_per_second"])


def main() -> None:
    options = measuring.options(__doc__, data_dir=Path("data"), ranks=[4, 8, 16], turns=3)
    torch.set_num_threads(1)
    train = data.load("cifar10", options.data_dir, BATCH * STEPS)[0]
    for ranks in options.ranks:
        ways = rows(ranks)
        while len(RAW.get(str(ranks)) or []) < options.turns:
            turn = {name: rate(*way, 1, train) for name, way in ways.items()}
            turn["replicas"] = rate(Backprop(), 1, {}, ranks, train)
            RAW.keep(str(ranks), value=[*(RAW.get(str(ranks)) or []), turn])
    names = dict.fromkeys(name for turns in RAW.read().values() for turn in turns for name in turn)
    table = []
    for name in names:
        shares = [
            [t[name] / t["one rank"] for t in turns if name in t] for turns in RAW.read().values()
        ]
        table.append([name, *(measuring.extremes(each) if each else "" for each in shares)])
    measuring.show(" | ".join([" ", *(f"{ranks} ranks" for ranks in RAW.read())]), table)


if __name__ == "__main__":
    main()
