"""Sockets and threads of ranks that torch.distributed joins, while they train.

    torchrun --nproc-per-node 8 docs/benchmarks/connections.py

A chain of N blocks trains for an epoch. Told are rank 0's counts, and the largest of any other
rank: when the ranks have met, in the last passes, and at the end.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch
from torch import Tensor, nn

from hybrid import Trainer, split
from hybrid.ranks import launch
from hybrid.solvers import Backprop


def counts() -> tuple[int, int]:
    """Sockets and threads of this process."""
    sockets = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            sockets += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return sockets, len(os.listdir("/proc/self/task"))


class Counting(nn.Linear):
    """A layer that looks at its process in every pass."""

    counted = (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        Counting.counted = counts()
        return super().forward(x)


def main() -> None:
    job = launch.ranks()
    assert job is not None, "start it by torchrun or mpirun"
    torch.manual_seed(0)
    N = job.comm.size
    network = nn.Sequential(*(Counting(8, 8) for _ in range(max(N, 2))))
    images, labels = torch.randn(256, 8), torch.randint(8, (256,))
    before = counts()
    trainer = Trainer(split(network, N, balance="even"), solver=Backprop())
    trainer.fit((images, labels), (images, labels), epochs=2)
    everyone = job.comm.allgather((before, Counting.counted, counts()))
    if job.comm.rank == 0:
        for k, when in enumerate(("met", "training", "ended")):
            (sockets, threads), *others = [each[k] for each in everyone]
            most = [max(each) for each in zip(*others, strict=True)]
            print(f"{N} ranks, {when}: sockets {sockets}, {most[0]}; threads {threads}, {most[1]}")


main()
