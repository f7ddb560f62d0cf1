"""The memory that `hybrid plan` tells of every block, and what a rank of its own then takes.

    python docs/benchmarks/memory_told.py [--models resnet20,wrn-16-2] [--blocks 2]

Every row trains on `--blocks` ranks of mpirun, each a process. Measured is the largest resident
memory over a few rounds above that before the first, when the code was loaded and the weights were
there; these are added, as the plan counts them. It is measured twice: with buffers that go back to
the system when they are freed, which is what the tensors need, and as trainings run, whose C
library keeps freed memory and loses some of it between buffers of other sizes. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from hybrid import data, models, split
from hybrid.bench.measure import still_batches
from hybrid.bench.recipes import MethodContender, Recipe
from hybrid.links import Network
from hybrid.links.base import Start
from hybrid.links.communicator import MpiCommunicator
from hybrid.links.mpi.links import MpiLinks
from hybrid.bench.plan.planner import Planner
from hybrid.ranks import launch
from hybrid.ranks.grid import Grid
from hybrid.settings.config import Config, RoundSettings
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop
from hybrid.solvers.exact.exact_pass import PassSettings

ROUNDS = 4
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Lets glibc give every large buffer back."""


def rows(blocks: int, size: int) -> dict[str, Recipe]:
    """By name; gaps are so that each block has work in them."""
    found = {
        "backprop, m=1": Recipe("", Backprop()),
        "backprop, m=4": Recipe("", Backprop(micro_batches=4)),
        "backprop, m=4, recompute": Recipe("", Backprop(micro_batches=4, recompute=True)),
        "ddg, m=1": Recipe("", DDG(micro_batches=1)),
        "ddg, m=4": Recipe("", DDG(micro_batches=4)),
        "ddg, m=4, recompute": Recipe("", DDG(micro_batches=4, recompute=True)),
        "fdg, m=1": Recipe("", FDG(micro_batches=1)),
        "fdg, m=4": Recipe("", FDG(micro_batches=4)),
    }
    part = size // 4
    gaps = [(2 * part, part), *[(part, 2 * part)] * (blocks - 2), (0, 3 * part)]
    for recompute in (False, True):
        name = "augmented-lagrangian, m=4, filled" + ", recompute" * recompute
        correction = PassSettings(micro_batches=4, recompute=recompute)
        rounds = RoundSettings(fill=True, gaps=gaps)
        found[name] = Recipe("", AugmentedLagrangian(), correction, rounds)
    return found


def status(key: str) -> int:
    """Of this process, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def rank(model: str, count: int, size: int, name: str) -> None:
    """Train one row; the first rank prints (told, measured) of every block."""
    from mpi4py import MPI

    torch.manual_seed(0)
    settings = Config(train={"batch_size": size, "threads": 1})
    train = data.load("synthetic")[0].take(2 * size)
    network = models.build(model, 10, 3, 32)
    if RETURNED.items() <= os.environ.items():
        launch.keep_memory = lambda: None  # type: ignore[assignment]
    planner, recipe = Planner(settings, network, train, Network()), rows(count, size)[name]
    blocks = split(planner.model, count, balance="operations", sample=torch.zeros(2, 3, 32, 32))
    told = planner.memory(blocks, recipe)
    links = MpiLinks(Start(Grid(count, 1), comm=MpiCommunicator(MPI.COMM_WORLD)))
    row = MethodContender(planner.method(blocks, recipe), links)
    module = row.block.module
    warm = MethodContender(planner.method(blocks, Recipe("", Backprop(micro_batches=2))), links)
    warm.train(still_batches(train, 8, 2, torch.device("cpu")))  # so that the code is loaded
    del warm
    batches = still_batches(train, size, ROUNDS * row.method.round_batches, torch.device("cpu"))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    links.everyone(None)
    Path("/proc/self/clear_refs").write_text("5")
    floor = status("VmRSS")
    row.train(batches)
    peak = status("VmHWM") - floor + sum(p.nbytes for p in module.parameters())
    found = links.everyone(peak)
    row.close()
    if links.rank == 0:
        print(json.dumps(list(zip(told, found, strict=True))))


def measured(model: str, options: argparse.Namespace, name: str) -> list[list[int]]:
    """(told, needed, resident) of every block of one row."""
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", str(options.blocks)]
    own = [sys.executable, __file__, "--rank", name, "--models", model]
    own += ["--blocks", str(options.blocks), "--batch-size", str(options.batch_size)]
    found = []
    for variables in (RETURNED, {}):
        done = subprocess.run(
            [*mpirun, "--bind-to", "none", *own],
            env=os.environ | variables,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return [[told, needed, kept] for (told, needed), (_, kept) in zip(*found, strict=True)]


def table(found: Mapping[str, Mapping[str, list[list[int]]]]) -> str:
    """Of all rows, each block's cell "told / needed (ratio), resident"."""
    lines = []
    for model, own in found.items():
        count = len(next(iter(own.values())))
        lines += [f"| {model} | " + " | ".join(f"block {k}" for k in range(count)) + " |"]
        lines += ["|---" * (count + 1) + "|"]
        for name, blocks in own.items():
            cells = (
                f"{a / 1e6:.0f} / {b / 1e6:.0f} ({a / b:.2f}), {c / 1e6:.0f}" for a, b, c in blocks
            )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet20,wrn-16-2")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rows", default="", help="only those whose names contain this")
    parser.add_argument("--rank", default="", help="the row of a rank that this program started")
    options = parser.parse_args()
    if options.rank:
        rank(options.models, options.blocks, options.batch_size, options.rank)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, dict[str, list[list[int]]]] = {}
    for model in options.models.split(","):
        found[model] = {}
        for name in rows(options.blocks, options.batch_size):
            if options.rows in name:
                found[model][name] = measured(model, options, name)
                print(table({model: {name: found[model][name]}}).splitlines()[2], flush=True)
    print(table(found))
    if not options.rows:
        body = {**vars(options), "told_needed_resident_bytes": found}
        Path(__file__).with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
