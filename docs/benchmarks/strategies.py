"""How replicas keep together, on a slow link: accuracy, and the time of a step.

    python docs/benchmarks/strategies.py accuracy --data-dir ~/data      on any machine, slowly
    mpirun -n 2 python docs/benchmarks/strategies.py time --data-dir ~/data    on two hosts
    python docs/benchmarks/strategies.py table

ResNet-20, CIFAR-10's first 20,000 images, batch 128, lr 0.1, one block, two replicas, one thread.
Accuracies come from virtual links: two hosts would give the same bits, later. Times are medians of
interleaved turns of whole rounds on the ranks there are. Rows that the JSON holds are not repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import measuring
import torch

from hybrid import Trainer, data, split
from hybrid.bench.contenders import CPU, MethodContender
from hybrid.bench.measure import still_batches, timed
from hybrid.links.base import Start
from hybrid.links.mpi import MpiCommunicator, MpiLinks
from hybrid.ranks import launch
from hybrid.rounds.phase_report import DivergedError
from hybrid.solvers import Backprop
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.hpsgd import HPSGD
from hybrid.solvers.sync.local_sgd import LocalSGD

RAW = measuring.Raw(__file__)


@dataclass(frozen=True)
class Row:
    strategy: Strategy | None
    """None: one replica."""
    lr: float = 0.1


ROWS = {
    "serial": Row(None),
    "all-reduce": Row(AllReduce()),
    "all-reduce, int8": Row(AllReduce(messages="int8")),
    "local-sgd, h = 8": Row(LocalSGD(steps=8)),
    "diloco, h = 16": Row(DiLoCo(steps=16)),
    "diloco, h = 16, lag 4, int8": Row(DiLoCo(steps=16, lag=4, messages="int8")),
    "hpsgd, h = L = 4, discard": Row(HPSGD(steps=4, lag=4, drift="discard")),
    "hpsgd, h = L = 4, keep": Row(HPSGD(steps=4, lag=4, drift="keep")),
    "hpsgd, h = L = 1, keep": Row(HPSGD(steps=1, lag=1, drift="keep")),
}
TIMED_STEPS, TURNS = 16, 5
"""A turn is a round of the longest strategy."""


def trainer(row: Row, seed: int, epochs: int, kind: str) -> Trainer:
    return Trainer(
        split(measuring.resnet("resnet20", seed), 1),
        Backprop(),
        train={"epochs": epochs, "seed": seed, "threads": 1, "evaluate_every": 100},
        optimizer={"lr": row.lr},
        links={"kind": kind},
        quiet=True,
        **({} if row.strategy is None else {"replicas": 2, "sync": row.strategy}),
    )


def accuracy(folder: Path, names: list[str], seeds: list[int], epochs: int) -> None:
    images, test = data.load("cifar10", folder, 20_000)
    for seed in seeds:
        for name in names:
            key = "accuracy", f"{name}: {epochs} epochs", str(seed)
            if RAW.get(*key):
                continue
            try:
                summary = trainer(ROWS[name], seed, epochs, "virtual").fit(images, test)
                RAW.keep(*key, value=100 * float(summary["test_accuracy"]))
            except DivergedError as error:
                RAW.keep(*key, value=str(error))


def time(folder: Path, names: list[str]) -> None:
    """Seconds of a step; the row `serial` is one rank alone, while the other waits."""
    comm = launch.communicator()
    assert comm is not None
    images, test = data.load("cifar10", folder, 20_000)
    launch.keep_memory()
    torch.set_num_threads(1)
    alone = MpiCommunicator(comm.mpi.Split(comm.rank))
    contenders = {name: _contender(ROWS[name], images, test, comm, alone) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    batches = still_batches(images, 128, TIMED_STEPS, CPU)
    for turn in range(TURNS + 1):
        for name, contender in contenders.items():
            here = ROWS[name].strategy is not None or comm.rank == 0
            taken = timed(comm, partial(contender.train, batches if here else []))
            if turn:  # the first warms up
                seconds[name].append(taken / TIMED_STEPS)
    if comm.rank == 0:
        for name, values in seconds.items():
            RAW.keep("seconds", name, "step", value=values)


def _contender(row: Row, images: Any, test: Any, comm: Any, alone: Any) -> MethodContender:
    replicas = 1 if row.strategy is None else 2
    links = MpiLinks(Start.of(alone if replicas == 1 else comm, replicas))
    return MethodContender(trainer(row, 0, 1, "auto").make_method(images, replicas, test), links)


def cells(name: str) -> tuple[object, ...]:
    """A row of the table."""
    seeds = RAW.get("accuracy", f"{name}: 6 epochs")
    values = [v for v in seeds.values() if not isinstance(v, str)]
    percent = f"{measuring.spread(values)} %" if values else "diverged" if seeds else ""
    steps = RAW.get("seconds", name, "step")
    each = f"{median(steps):.3f} ({min(steps):.3f} to {max(steps):.3f})" if steps else ""
    return name, percent, len(seeds), each, f"{median(steps) * 6 * 156:.0f} s" if steps else ""


def main() -> None:
    options = measuring.options(
        __doc__,
        what=("accuracy", "time", "table"),
        data_dir=measuring.DATA,
        seeds=[0],
        epochs=6,
        rows=[*ROWS],
    )
    if options.what == "accuracy":
        accuracy(options.data_dir, options.rows, options.seeds, options.epochs)
    elif options.what == "time":
        time(options.data_dir, options.rows)
    if launch.communicator() is None:
        header = "strategy | 6 epochs | seeds | seconds a step | 6 epochs last"
        measuring.show(header, map(cells, ROWS))


if __name__ == "__main__":
    main()
