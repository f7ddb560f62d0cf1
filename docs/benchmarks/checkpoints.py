"""What a checkpoint costs a training: time blocked, bytes, slower steps, seconds to resume.

    mpirun -n 2 python docs/benchmarks/checkpoints.py --model resnet110 --folder /scratch/me/try

Serial training on random CIFAR-sized images, a rank a block. Repeated: some steps without a
checkpoint, then one is begun and steps go on, with a report after each, until it is whole. Resuming
is a new block that takes model and momentum back. Every figure is the slowest rank's, the median
over the repeats; the files have just been written, so reading finds them in memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hybrid import data
from hybrid.folder import checkpoint
from hybrid.folder.writer import Writer
from hybrid.links.base import Start
from hybrid.links.mpi import MpiLinks
from hybrid.method.optimizers import make_optimizer, placed
from hybrid.networks import models
from hybrid.networks.partition import split
from hybrid.ranks import launch
from hybrid.rounds.windows import EpochSource
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Backprop, Batch, Setup, Window
from hybrid.solvers.block import Block


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet110")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    comm = launch.communicator()
    launch.keep_memory()
    torch.set_num_threads(1)
    links = MpiLinks(Start.of(comm))
    train, _ = data.load("synthetic")
    torch.manual_seed(0)
    blocks = split(models.build(options.model, 10, 3, 32), links.size, balance="operations")
    cpu = torch.device("cpu")
    module = placed(blocks.module(links.rank), cpu)
    sgd = make_optimizer(module, OptimizerSettings())
    block = Block(module, links.rank, len(blocks), {"exact": sgd, "local": sgd}, cpu)
    source = EpochSource(train, 0, 0, True, cpu)
    batch = Batch(torch.arange(options.batch_size), 0.01, source)
    program = Backprop().start(block, links, Setup(batch_size=options.batch_size))
    writer = Writer(options.folder, links, keep_last=2)
    units = blocks.units_of(links.rank)

    def step() -> float:
        links.all_gather(None)
        start = perf_counter()
        program.train(Window([batch]))
        return perf_counter() - start

    step()
    found: list[dict[str, float]] = []
    for number in range(options.repeats):
        quiet = [step() for _ in range(options.steps)]
        links.all_gather(None)
        tensors = {u.name: checkpoint.tensors_of(u, block.optimizers) for u in units}
        before, begun = writer.blocked_seconds, perf_counter()
        writer.begin(number, tensors, {}, {"epoch": number})
        beside = []
        shares = links.all_gather(writer.share)
        while any(share.state != "idle" for share in shares):
            writer.hear(shares)
            beside.append(step())
            shares = links.all_gather(writer.share)
        whole = perf_counter() - begun
        blocked = writer.blocked_seconds - before
        writer.finish()
        folder = options.folder / f"{number:08d}"
        links.all_gather(None)
        start = perf_counter()
        manifest = checkpoint.read_manifest(folder)
        checkpoint.restore(folder, manifest, units, block.optimizers)
        found.append(
            {
                "blocked": blocked,
                "whole": whole,
                "step": median(quiet),
                "step_beside": median(beside),
                "resume": perf_counter() - start,
                "bytes": sum(entry["bytes"] for entry in manifest["units"].values()),
            }
        )
    everyone = links.all_gather(found)
    if links.rank == 0:
        print(json.dumps(result(options, everyone), indent=1))
        shutil.rmtree(options.folder)


def result(options: argparse.Namespace, everyone: list[list[dict[str, float]]]) -> dict[str, Any]:
    slowest = [
        {key: max(rank[i][key] for rank in everyone) for key in everyone[0][0]}
        for i in range(options.repeats)
    ]

    def of(key: str) -> list[float]:
        return [round(x, 4) for x in sorted(repeat[key] for repeat in slowest)]

    rate = options.batch_size / median(of("step"))
    return {
        "machine": platform.processor() or platform.machine(),
        "model": options.model,
        "ranks": len(everyone),
        "bytes": int(slowest[0]["bytes"]),
        "blocked_seconds": of("blocked"),
        "whole_after_seconds": of("whole"),
        "step_seconds": of("step"),
        "step_beside_seconds": of("step_beside"),
        "resume_seconds": of("resume"),
        "images_per_second": round(rate, 1),
        "blocked_share_of_a_cifar_epoch": median(of("blocked")) / (50_000 / rate),
        "blocked_share_of_15_minutes": median(of("blocked")) / 900,
    }


if __name__ == "__main__":
    main()
