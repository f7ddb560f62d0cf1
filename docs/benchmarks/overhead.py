"""Throughput of serial training at K = 1 against a hand-written loop, interleaved in one process.

    python docs/benchmarks/overhead.py [--model resnet20] [--pairs 15] [--steps 8]

Both train the same model on the same mini-batches with one thread; the two take turns, and the
ratio is taken pair by pair.
"""

from __future__ import annotations

import json
from functools import partial
from statistics import median
from typing import Any

import measuring
import torch

from hybrid import data
from hybrid.bench.contenders import CPU, MethodContender, PlainLoop
from hybrid.bench.measure import still_batches
from hybrid.bench.table import machine
from hybrid.links import run_threads
from hybrid.method.make_method import make_method
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.networks.partition.split import split
from hybrid.ranks import launch
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Backprop


def main() -> None:
    asked = measuring.options(__doc__, model="resnet20", pairs=15, steps=8, batch_size=128)
    launch.keep_memory()
    torch.set_num_threads(1)
    train, _ = data.load("synthetic")
    network = measuring.resnet(asked.model)
    options = Options(Backprop(), train={"batch_size": asked.batch_size})
    method = make_method(Problem.of(options, split(network, 1), train), options)
    batches = still_batches(train, asked.batch_size, asked.steps, CPU)

    def session(links: Any) -> dict[str, list[float]]:
        rows = {"plain": PlainLoop(network, OptimizerSettings())}
        rows["hybrid"] = MethodContender(method, links)
        works = {name: partial(row.train, batches) for name, row in rows.items()}
        return measuring.in_turns(works, asked.pairs)

    seconds = run_threads(1, session)[0]
    images = asked.steps * asked.batch_size
    middle, *quartiles = measuring.ratios(seconds["plain"], seconds["hybrid"], 4)
    figures = {
        "model": asked.model,
        "batch_size": asked.batch_size,
        "images_per_second": {k: round(images / median(v), 1) for k, v in seconds.items()},
        "throughput_ratio": {"median": middle, "quartiles": quartiles},
        "pairs": asked.pairs,
        "machine": machine(),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
