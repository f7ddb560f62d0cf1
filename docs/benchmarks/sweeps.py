"""Throughput of a sweep on K ranks against K independent copies of the plain loop, one thread each.

    mpirun -n 2 python docs/benchmarks/sweeps.py [--model resnet20] [--balance operations]

The three take turns in one run, with a barrier before each: a sweep (every rank its block, over
the same window), K copies at once (every rank the whole network), and one copy alone on rank 0.
"""

from __future__ import annotations

import json
from functools import partial
from statistics import median
from time import perf_counter

import measuring
import torch
from mpi4py import MPI

from hybrid import data
from hybrid.bench.contenders import CPU, PlainLoop
from hybrid.bench.measure import still_batches
from hybrid.links.base import Start
from hybrid.links.mpi import MpiCommunicator, MpiLinks
from hybrid.method.optimizers import make_optimizer, placed
from hybrid.networks.partition.split import split
from hybrid.ranks import launch
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import AugmentedLagrangian, Setup, Window
from hybrid.solvers.block import Block
from hybrid.solvers.exact.exact_pass import ExactPass, PassSettings


def main() -> None:
    flags = {"model": "resnet20", "balance": "operations", "cuts": "", "turns": 9}
    options = measuring.options(__doc__, **flags, window=8, batch_size=128)
    comm = MpiCommunicator(MPI.COMM_WORLD)
    links = MpiLinks(Start.of(comm))
    launch.keep_memory()
    torch.set_num_threads(1)
    train, _ = data.load("synthetic")
    batches = still_batches(train, options.batch_size, options.window, CPU)
    network = measuring.resnet(options.model)
    if options.cuts:
        blocks = split(network, cuts=options.cuts.split(","))
    else:
        blocks = split(network, comm.size, balance=options.balance, inside=False)
    blocks.starts = comm.bcast(blocks.starts)
    module = placed(blocks.module(comm.rank), CPU)
    sgd = make_optimizer(module, OptimizerSettings())
    block = Block(module, comm.rank, len(blocks), {"exact": sgd, "local": sgd}, CPU)
    shapes = blocks.cut_shapes(torch.zeros(1, 3, 32, 32))
    setup = Setup(tuple(shapes), options.batch_size, options.window)
    program, window = AugmentedLagrangian().start(block, links, setup), Window(batches)
    ExactPass(PassSettings(), block, links, setup).train(window, program)
    sent = links.traffic.total_bytes
    plain = PlainLoop(measuring.resnet(options.model), OptimizerSettings())
    works = {
        "sweep": (partial(program.train, window), 1),
        "copies": (partial(plain.train, batches), comm.size),
        "alone": (partial(plain.train, batches if comm.rank == 0 else []), 1),
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    sweep_seconds: list[float] = []
    for turn in range(options.turns + 1):
        for name, (work, copies) in works.items():
            comm.barrier()
            start = perf_counter()
            work()
            seconds = perf_counter() - start
            slowest = max(comm.allgather(seconds))
            if turn:
                rates[name].append(copies * options.window * options.batch_size / slowest)
                sweep_seconds += [seconds] * (name == "sweep")
    times = comm.gather(median(sweep_seconds))
    assert links.traffic.total_bytes == sent, "a windowed sweep must send nothing"
    if comm.rank == 0:
        middle, *quartiles = measuring.ratios(rates["sweep"], rates["copies"])
        figures = {
            "model": options.model,
            "cuts": blocks.cuts,
            "images_per_second": {k: round(median(v), 1) for k, v in rates.items()},
            "sweep_over_copies": {"median": middle, "quartiles": quartiles},
            "bytes_sent_in_sweeps": 0,
            "seconds_of_each_block": [round(t, 3) for t in times or []],
        }
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
