"""A bench with torch's own ways to use several ranks among its rows.

    mpirun -n 2 --bind-to none python docs/benchmarks/torch_rows.py --model resnet20 \\
        --micro-batches 4,8 [--batch-size 128] [--turns 7] [--steps 4] [--rows torch,backprop] \\
        [--set section.key=value]... [--out bench]

The rows are those of `hybrid bench`, and DistributedDataParallel and torch.distributed.pipelining
beside them: GPipe, 1F1B and the interleaved zero-bubble schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import measuring
import torch.distributed as dist
from torch_contenders import SCHEDULES, DataParallel, Pipeline, process_group

from hybrid.bench.bench import Bench
from hybrid.bench.contenders import Contender
from hybrid.links.mpi import MpiCommunicator
from hybrid.networks.units import Chain
from hybrid.ranks import launch
from hybrid.settings.resolve import parse_override
from hybrid.training import run_settings


class TorchBench(Bench):
    """A bench with more rows."""

    def loops(self, model: Chain) -> dict[str, Callable[[], Contender]]:
        more: dict[str, Any] = {"torch DistributedDataParallel": DataParallel}
        for kind, m in product(SCHEDULES, self.micro_batches):
            more[f"torch {kind}, m={m}"] = partial(Pipeline, kind=kind, micro_batches=m)
        given = {"optimizer": self.settings.optimizer, "device": self.device}
        return super().loops(model) | {
            name: partial(make, model, **given) for name, make in more.items()
        }


def main() -> None:
    flags = {"model": "resnet8", "data": "synthetic", "batch_size": 128, "micro_batches": "4,8"}
    flags |= {"turns": 7, "steps": 4, "rows": "", "set": [], "out": Path("bench")}
    options = measuring.options(__doc__, **flags)
    parts = [int(part) for part in options.micro_batches.split(",")]
    comm = launch.communicator()
    given: dict[str, Any] = {"model.name": options.model, "data.name": options.data}
    given |= {"train.batch_size": options.batch_size, **dict(map(parse_override, options.set))}
    settings = run_settings.read_settings(None, given)
    words = [word.strip() for word in options.rows.split(",") if word.strip()]
    made = TorchBench(comm, settings, parts, words, options.out)
    made.connect()
    by_mpi = isinstance(comm, MpiCommunicator)
    if by_mpi:  # torchrun's ranks have a process group
        process_group(comm.mpi, made.device)
    table = made.run(options.turns, options.steps)
    if by_mpi:
        dist.destroy_process_group()
    if table is not None:
        print(table)


if __name__ == "__main__":
    main()
