"""How replicas keep together, on a slow link: accuracy, and the time of a step.

    python docs/benchmarks/strategies.py accuracy --data-dir ~/data      on any machine, slowly
    mpirun -n 2 python docs/benchmarks/strategies.py time --data-dir ~/data    on two hosts
    python docs/benchmarks/strategies.py table

ResNet-20, CIFAR-10's first 20,000 images, batch 128, lr 0.1, one block, two replicas, one thread.
Accuracies come from virtual links: two hosts would give the same bits, later. Times are medians of
interleaved turns of whole rounds on the ranks there are. Rows that the JSON holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

import torch

from hybrid import Trainer, data, split
from hybrid.links.base import Start
from hybrid.links.mpi import MpiCommunicator, MpiLinks
from hybrid.networks import models
from hybrid.ranks import launch
from hybrid.rounds.phase_report import DivergedError
from hybrid.settings.config import LinkSettings, OptimizerSettings, TrainSettings
from hybrid.solvers import Backprop
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.hpsgd import HPSGD
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.training.run import Run

FILE = Path(__file__).with_suffix(".json")


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
    torch.manual_seed(seed)
    replicas: dict[str, Any] = {}
    if row.strategy is not None:
        replicas = {"replicas": 2, "sync": row.strategy}
    return Trainer(
        split(models.build("resnet20", 10, 3, 32), 1),
        Backprop(),
        train=TrainSettings(epochs=epochs, seed=seed, threads=1, evaluate_every=100),
        optimizer=OptimizerSettings(lr=row.lr),
        links=LinkSettings(kind=kind),  # type: ignore[arg-type]
        quiet=True,
        **replicas,
    )


def accuracy(folder: Path, names: list[str], seeds: list[int], epochs: int) -> None:
    images, test = data.load("cifar10", folder, 20_000)
    for seed in seeds:
        for name in names:
            key = f"{name}: {epochs} epochs"
            if str(seed) in known("accuracy").get(key, {}):
                continue
            try:
                summary = trainer(ROWS[name], seed, epochs, "virtual").fit(images, test)
                found: Any = 100 * float(summary["test_accuracy"])
            except DivergedError as error:
                found = str(error)
            keep("accuracy", key, str(seed), found)


def time(folder: Path, names: list[str]) -> None:
    """Seconds of a step; the row `serial` is one rank alone, while the other waits."""
    comm = launch.communicator()
    assert comm is not None
    images, test = data.load("cifar10", folder, 20_000)
    launch.keep_memory()
    torch.set_num_threads(1)
    alone = MpiCommunicator(comm.mpi.Split(comm.rank))
    runs = {name: _run(ROWS[name], images, test, comm, alone) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS + 1):
        for name, run in runs.items():
            comm.barrier()
            start = perf_counter()
            first = turn * TIMED_STEPS
            pairs = list(run.training.windows.of_epoch(0, first))[
                : TIMED_STEPS // run.training.windows.window
            ]
            if ROWS[name].strategy is not None or comm.rank == 0:
                run.training.rounds.run(pairs, first, 0)
            comm.barrier()
            if turn:  # the first warms up
                seconds[name].append((perf_counter() - start) / TIMED_STEPS)
    if comm.rank == 0:
        for name, found in seconds.items():
            keep("seconds", name, "step", found)


def _run(row: Row, images: Any, test: Any, comm: Any, alone: Any) -> Run:
    made = trainer(row, 0, 100, "auto")
    replicas = 1 if row.strategy is None else 2
    links = MpiLinks(Start.of(alone if replicas == 1 else comm, replicas))
    method = made.make_method(images, replicas, test)
    return Run(method, links, images, test, lambda: "")  # type: ignore[arg-type]


def table() -> None:
    print("| strategy | 6 epochs | seeds | seconds a step | 6 epochs last |\n|---|---|---|---|---|")
    for name in ROWS:
        found = known("accuracy").get(f"{name}: 6 epochs", {})
        values = [v for v in found.values() if not isinstance(v, str)]
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        said = f"{mean(values):.1f}{spread} %" if values else "diverged" if found else ""
        steps = known("seconds").get(name, {}).get("step", [])
        each = f"{median(steps):.3f} ({min(steps):.3f} to {max(steps):.3f})" if steps else ""
        whole = f"{median(steps) * 6 * 156:.0f} s" if steps else ""
        print(f"| {name} | {said} | {len(found)} | {each} | {whole} |")


def keep(part: str, key: str, inner: str, found: Any) -> None:
    body = json.loads(FILE.read_text()) if FILE.exists() else {}
    body.setdefault(part, {}).setdefault(key, {})[inner] = found
    FILE.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


def known(part: str) -> dict[str, Any]:
    return dict(json.loads(FILE.read_text()).get(part, {})) if FILE.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["accuracy", "time", "table"])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    options = parser.parse_args()
    if options.what == "accuracy":
        accuracy(options.data_dir, options.rows, options.seeds, options.epochs)
    elif options.what == "time":
        time(options.data_dir, options.rows)
    if launch.communicator() is None:
        table()


if __name__ == "__main__":
    main()
