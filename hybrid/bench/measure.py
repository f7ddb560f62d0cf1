"""What a bench compares: the rows are timed in turn, so a machine that drifts affects all."""

import ctypes
import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from hybrid.data import Data
from hybrid.links.communicator import Communicator
from hybrid.rounds.windows import EpochSource
from hybrid.solvers import Batch

CPU = torch.device("cpu")


class Contender(Protocol):
    """One way to train the network, which is a row of the table. Every rank has one."""

    def train(self, batches: Sequence[Batch]) -> None:
        """Take one step for each mini-batch; every rank calls it with the same mini-batches."""

    def end_epoch(self) -> None:
        """Finish what is under way, and forget what is kept of an epoch; all ranks call it."""
        return

    def state_dict(self) -> dict[str, Tensor] | None:
        """The whole network's state under its global names, on rank 0 only. All must call it."""

    def spent(self) -> tuple[float, float]:
        """Bytes this rank has sent, and seconds it had nothing to do, in `train` so far."""
        ...

    def close(self) -> None:
        """Release the network and what belongs to it."""
        return


@dataclass
class Speed:
    """The measurements of a row, one for each turn."""

    name: str
    images_per_second: list[float] = field(default_factory=list)
    idle_share: list[list[float]] = field(default_factory=list)
    """Of every rank, in every turn."""
    bytes_per_image: float = 0.0
    """Over all ranks."""
    working_bytes: list[int | None] = field(default_factory=list)
    """Of every rank: growth of resident (on a GPU: allocated) memory while training."""

    def speed_up(self, base: "Speed") -> tuple[float, float, float]:
        """Median and quartiles over the turns of the ratio of rates."""
        pairs = zip(self.images_per_second, base.images_per_second, strict=True)
        ratios = sorted(mine / theirs for mine, theirs in pairs)
        return median(ratios), ratios[len(ratios) // 4], ratios[len(ratios) - 1 - len(ratios) // 4]


def fastest(speeds: Sequence[Speed], names: Sequence[str]) -> Speed:
    """The base case: of the rows of those names that with the largest median rate."""
    return max(
        (speed for speed in speeds if speed.name in names),
        key=lambda speed: median(speed.images_per_second),
    )


@dataclass
class Runs:
    """Trainings of a row for one number of epochs: one value for each seed."""

    name: str
    epochs: int
    test_accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Training time, evaluation left out."""

    def spread(self) -> tuple[float, float]:
        """Mean and standard deviation of the final accuracy."""
        values = self.test_accuracy
        return mean(values), stdev(values) if len(values) > 1 else 0.0


def throughput(
    comm: Communicator,
    rows: Mapping[str, Contender],
    batches: Sequence[Batch],
    turns: int,
    say: Callable[[str], None],
) -> list[Speed]:
    """Train every row on `batches`, `turns` times round after one to warm up; then its memory."""
    images = sum(len(batch) for batch in batches)
    speeds = [Speed(name) for name in rows]
    for turn in range(turns + 1):
        for row, speed in zip(rows.values(), speeds, strict=True):
            before = row.spent()
            seconds = timed(comm, partial(row.train, batches))
            mine, waited = (after - start for after, start in zip(row.spent(), before, strict=True))
            idle_shares, sent = comm.allgather(waited / seconds), sum(comm.allgather(mine))
            if turn:
                speed.images_per_second.append(images / seconds)
                speed.idle_share.append(idle_shares)
                speed.bytes_per_image = sent / images
        say(f"turn {turn}/{turns}" if turn else "warmed up")
    for row, speed in zip(rows.values(), speeds, strict=True):
        speed.working_bytes = comm.allgather(_working_bytes(row, batches[:1]))
        comm.barrier()
    return speeds


def still_batches(data: Data, size: int, count: int, device: torch.device) -> list[Batch]:
    """Mini-batches with a learning rate near 0, so that no row diverges while it is timed."""
    source = EpochSource(data, 0, 0, True, device)
    ids = torch.arange(count * size).remainder(len(data)).split(size)
    return [Batch(i, 1e-6, source) for i in ids]


def timed(comm: Communicator, work: Callable[[], None]) -> float:
    """Seconds from a common start until the last rank is done."""
    comm.barrier()
    start = perf_counter()
    work()
    seconds = perf_counter() - start
    comm.barrier()
    return float(max(comm.allgather(seconds)))


def _working_bytes(row: Contender, batches: Sequence[Batch]) -> int | None:
    """Growth of this process's memory while `row` trains, as the system sees it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        row.train(batches)
        return int(torch.cuda.max_memory_allocated() - before)
    try:
        # hand free memory back, or what an earlier row has left behind would hide the growth
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
    except (OSError, AttributeError):
        row.train(batches)
        return None
    row.train(batches)
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
