"""Sockets, threads and seconds of a rank whose blocks torch.distributed joins, by a training.

    torchrun --nproc-per-node 8 docs/benchmarks/connections.py

It trains a chain of N blocks for an epoch and prints the largest count of any rank, seen from a
callback at the last step. Also by mpirun, for comparison.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hybrid import Callback, Trainer, split
from hybrid.ranks import launch
from hybrid.solvers import Backprop


def counts() -> tuple[int, int]:
    """Sockets and threads of this process."""
    sockets = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            sockets += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return sockets, len(os.listdir("/proc/self/task"))


class Counting(Callback):
    """What this rank has at its last report."""

    found = (0, 0)

    def on_report(self, *arguments: Any, **named: Any) -> None:
        self.found = counts()


def main() -> None:
    found = launch.ranks()
    assert found is not None, "start it by torchrun or mpirun"
    torch.manual_seed(0)
    N = found.comm.size
    network = nn.Sequential(*(nn.Linear(8, 8) for _ in range(max(N, 2))))
    images, labels = torch.randn(256, 8), torch.randint(8, (256,))
    counting = Counting()
    before = counts()
    blocks = split(network, N, balance="even")
    trainer = Trainer(blocks, solver=Backprop(), callbacks=[counting])
    trainer.fit((images, labels), (images, labels), epochs=1)
    everyone = found.comm.allgather((before, counting.found, counts()))
    if found.comm.rank == 0:
        for when, rows in zip(
            ("met", "trained", "ended"), zip(*everyone, strict=True), strict=True
        ):
            sockets, threads = (max(each) for each in zip(*rows, strict=True))
            print(f"{N} ranks, {when}: {sockets} sockets, {threads} threads a rank at most")


main()
