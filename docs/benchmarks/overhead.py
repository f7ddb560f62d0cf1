"""Throughput of serial training at K = 1 against a hand-written loop, interleaved in one process.

    python docs/benchmarks/overhead.py [--model resnet20] [--pairs 15] [--steps 8]

Both train the same model on the same mini-batches with one thread; the two take turns, and the
ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import json
import platform
from statistics import median
from time import perf_counter

import torch
from torch import nn

from hybrid import data
from hybrid.links import run_threads
from hybrid.method.make_method import make_method
from hybrid.method.optimizers import make_optimizer, placed
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.networks import models
from hybrid.networks.partition import split
from hybrid.ranks import launch
from hybrid.rounds.epoch_windows import EpochSource
from hybrid.settings.config import OptimizerSettings, TrainSettings
from hybrid.solvers import Backprop, Batch, Window
from hybrid.solvers.block import Block


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    launch.keep_memory()
    torch.set_num_threads(1)
    train, _ = data.load("synthetic")
    ids = torch.arange(options.steps * options.batch_size).split(options.batch_size)
    plain, ours = (build(options.model) for _ in range(2))
    sgd = make_optimizer(plain, OptimizerSettings())

    def plain_loop() -> None:
        for batch in ids:
            images, labels = train.batch(batch, 0, 0), train.targets(batch)
            out = plain(images)
            loss = nn.functional.cross_entropy(out, labels)
            loss.backward()
            for group in sgd.param_groups:
                group["lr"] = 0.1
            sgd.step()
            sgd.zero_grad(set_to_none=True)
            loss.item()

    blocks = split(ours, 1)
    settings = Options(Backprop(), train=TrainSettings(batch_size=options.batch_size))
    problem = Problem.of(settings, blocks, train)
    method = make_method(problem, settings)
    source = EpochSource(train, 0, 0, True, torch.device("cpu"))
    window = Window([Batch(batch, 0.1, source) for batch in ids])

    def session(links):
        module = placed(blocks.module(0), torch.device("cpu"))
        sgd = make_optimizer(module, OptimizerSettings())
        block = Block(module, 0, len(blocks), {"exact": sgd, "local": sgd}, torch.device("cpu"))
        rounds = method.start(block, links)

        def ours_loop() -> None:
            rounds.run([(window, window)], 0, 0)

        loops = {"plain": plain_loop, "hybrid": ours_loop}
        for loop in loops.values():
            loop()
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for pair in range(options.pairs):
            for name in sorted(loops, reverse=bool(pair % 2)):
                start = perf_counter()
                loops[name]()
                seconds[name].append(perf_counter() - start)
        return seconds

    seconds = run_threads(1, session)[0]
    images = options.steps * options.batch_size
    ratios = sorted(p / h for p, h in zip(seconds["plain"], seconds["hybrid"], strict=True))
    print(
        json.dumps(
            {
                "model": options.model,
                "batch_size": options.batch_size,
                "images_per_second": {k: round(images / median(v), 1) for k, v in seconds.items()},
                "throughput_ratio": {
                    "median": round(median(ratios), 4),
                    "quartiles": [
                        round(ratios[len(ratios) // 4], 4),
                        round(ratios[3 * len(ratios) // 4], 4),
                    ],
                },
                "pairs": options.pairs,
                "torch": torch.__version__,
                "machine": platform.processor() or platform.machine(),
            },
            indent=1,
        )
    )


def build(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = models.build(name, 10, 3, 32)
    return model.to(memory_format=torch.channels_last).train()


if __name__ == "__main__":
    main()
