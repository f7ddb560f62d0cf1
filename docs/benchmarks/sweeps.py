"""Throughput of a sweep on K ranks against K independent copies of the plain loop, one thread each.

    mpirun -n 2 python docs/benchmarks/sweeps.py [--model resnet20] [--balance operations]

The three take turns in one run, with a barrier before each: a sweep (every rank its block, over
the same window), K copies at once (every rank the whole network), and one copy alone on rank 0.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter

import torch
from mpi4py import MPI
from torch import nn

from hybrid import data
from hybrid.links.base import Start
from hybrid.links.mpi import MpiCommunicator, MpiLinks
from hybrid.method.optimizers import make_optimizer, placed
from hybrid.networks import models
from hybrid.networks.partition import split
from hybrid.ranks import launch
from hybrid.rounds.epoch_windows import EpochSource
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import AugmentedLagrangian, Batch, Setup, Window
from hybrid.solvers.block import Block
from hybrid.solvers.exact.exact_pass import ExactPass, PassSettings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--balance", default="operations")
    parser.add_argument("--cuts", default="")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    comm = MpiCommunicator(MPI.COMM_WORLD)
    links = MpiLinks(Start.of(comm))
    launch.keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, _ = data.load("synthetic")
    source = EpochSource(train, 0, 0, True, torch.device("cpu"))
    ids = torch.arange(options.window * options.batch_size).split(options.batch_size)
    batches = [Batch(batch, 0.01, source) for batch in ids]

    model = models.build(options.model, 10, 3, 32).to(memory_format=torch.channels_last)
    if options.cuts:
        blocks = split(model, cuts=options.cuts.split(","))
    else:
        blocks = split(model, comm.size, balance=options.balance)
    blocks.starts = comm.bcast(blocks.starts)
    module = placed(blocks.module(comm.rank), torch.device("cpu"))
    sgd = make_optimizer(module, OptimizerSettings())
    block = Block(module, comm.rank, len(blocks), {"exact": sgd, "local": sgd}, torch.device("cpu"))
    shapes = blocks.cut_shapes(torch.zeros(1, 3, 32, 32))
    setup = Setup(tuple(shapes), options.batch_size, options.window)
    program = AugmentedLagrangian().start(block, links, setup)
    window = Window(batches)
    ExactPass(PassSettings(), block, links, setup).train(window, program)
    sent = links.traffic.total_bytes

    plain = models.build(options.model, 10, 3, 32).to(memory_format=torch.channels_last).train()
    plain_sgd = make_optimizer(plain, OptimizerSettings())

    def sweep() -> None:
        program.train(window)

    def copy() -> None:
        for batch in batches:
            nn.functional.cross_entropy(plain(batch.images()), batch.labels()).backward()
            for group in plain_sgd.param_groups:
                group["lr"] = 0.01
            plain_sgd.step()
            plain_sgd.zero_grad(set_to_none=True)

    def alone() -> None:
        if comm.rank == 0:
            copy()

    rates: dict[str, list[float]] = {"sweep": [], "copies": [], "alone": []}
    own: list[float] = []
    images = options.window * options.batch_size
    for turn in range(options.turns + 1):
        for name, work, copies in (
            ("sweep", sweep, 1),
            ("copies", copy, comm.size),
            ("alone", alone, 1),
        ):
            comm.barrier()
            start = perf_counter()
            work()
            mine = perf_counter() - start
            slowest = max(comm.allgather(mine))
            if turn:
                rates[name].append(copies * images / slowest)
                if name == "sweep":
                    own.append(mine)
    times = comm.gather(median(own))
    assert links.traffic.total_bytes == sent, "a windowed sweep must send nothing"
    if comm.rank == 0:
        ratios = sorted(s / c for s, c in zip(rates["sweep"], rates["copies"], strict=True))
        print(
            json.dumps(
                {
                    "model": options.model,
                    "cuts": blocks.cuts,
                    "images_per_second": {k: round(median(v), 1) for k, v in rates.items()},
                    "sweep_over_copies": {
                        "median": round(median(ratios), 3),
                        "quartiles": [
                            round(ratios[len(ratios) // 4], 3),
                            round(ratios[3 * len(ratios) // 4], 3),
                        ],
                    },
                    "bytes_sent_in_sweeps": 0,
                    "seconds_of_each_block": [round(t, 3) for t in times or []],
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
