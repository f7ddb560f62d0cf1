"""How replicas keep together, on a slow link: accuracy, and the time of a step.

    python docs/benchmarks/strategies.py accuracy --data-dir ~/data      on any machine, slowly
    mpirun -n 2 python docs/benchmarks/strategies.py time --data-dir ~/data    on two hosts
    python docs/benchmarks/strategies.py delayed --seeds 0 1 2      with late steps
    python docs/benchmarks/strategies.py table

ResNet-20, CIFAR-10's first 20,000 images, batch 128, lr 0.1, one block, two replicas, one thread.
Accuracies come from virtual links: two hosts would give the same bits, later. Times are medians of
interleaved turns of whole rounds on the ranks there are. Rows that the JSON holds are not repeated.

`delayed`: a perceptron on the digits, batch 32, lr 0.05, 20 epochs of 44 steps on two threads.
Every step sleeps for 10 ms and, of one replica or of both, in one step of eight for 40 ms more.
Which steps these are is drawn for each replica by itself, and is the same for all strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from threading import current_thread
from time import sleep
from typing import Any, ClassVar

import measuring
import torch
from torch import Tensor, nn

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
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid_hpsgd import HPSGD

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


class Late(nn.Module):
    """Sleeps in every training step, longer in some steps of replicas whose names end so."""

    steps: ClassVar[dict[str, int]] = {}
    """By the thread's name, which is the replica's."""
    names = ("0", "1")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            name = current_thread().name
            step = self.steps[name] = self.steps.get(name, -1) + 1
            is_late = name.endswith(Late.names) and Random(f"{name} {step}").random() < 1 / 8
            sleep(0.01 + 0.04 * is_late)
        return x


DELAYED = {
    "all-reduce": AllReduce(),
    "hpsgd, h = L = 4": HPSGD(steps=4, lag=4),
    "hpsgd, h = 4, L = 1": HPSGD(steps=4, lag=1),
    "hpsgd, h = 4, ready": HPSGD(steps=4, commit="ready"),
}


def delayed(seeds: list[int]) -> None:
    """Steps a second and accuracy of two threads, which the strategies take turns at."""
    images, test = data.load("digits", None)
    whose = {"one replica": ("1",), "both replicas": ("0", "1")}
    for seed, late, (name, sync) in product(seeds, whose, DELAYED.items()):
        if not RAW.get("delayed", f"{late}: {name}", str(seed)):
            torch.manual_seed(seed)
            Late.steps.clear()
            Late.names = whose[late]
            layers = Late(), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
            summary = Trainer(
                split(nn.Sequential(*layers), 1),
                Backprop(),
                replicas=2,
                sync=sync,
                train={"epochs": 20, "seed": seed, "threads": 1, "batch_size": 32},
                optimizer={"lr": 0.05},
                links={"kind": "threads"},
                quiet=True,
            ).fit(images, test)
            steps = float(summary["images_per_second"]) / 32
            accuracy = 100 * float(summary["test_accuracy"])
            value = [round(steps, 2), round(accuracy, 2)]
            RAW.keep("delayed", f"{late}: {name}", str(seed), value=value)


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
        what=("accuracy", "time", "delayed", "table"),
        data_dir=measuring.DATA,
        seeds=[0],
        epochs=6,
        rows=[*ROWS],
    )
    if options.what == "accuracy":
        accuracy(options.data_dir, options.rows, options.seeds, options.epochs)
    elif options.what == "time":
        time(options.data_dir, options.rows)
    elif options.what == "delayed":
        delayed(options.seeds)
    if launch.communicator() is None:
        header = "strategy | 6 epochs | seeds | seconds a step | 6 epochs last"
        measuring.show(header, map(cells, ROWS))
        print()
        late = RAW.get("delayed").items()
        rows = [(name, *map(measuring.spread, zip(*x.values(), strict=True))) for name, x in late]
        measuring.show("late at times | steps a second | accuracy, %", rows)


if __name__ == "__main__":
    main()
