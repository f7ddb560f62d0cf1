"""Measurement of a bench: the rows take turns, so a drift of the machine affects all alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter

import torch

from hybrid.bench.contenders import Contender
from hybrid.data import Data
from hybrid.links.communicator import Communicator
from hybrid.ranks.progress import Bar
from hybrid.rounds.epoch_windows import EpochSource
from hybrid.solvers import Batch


@dataclass
class Speed:
    """The measurements of a row, one for each turn."""

    name: str
    images_per_second: list[float] = field(default_factory=list)
    idle_share: list[list[float]] = field(default_factory=list)
    """Of every rank, in every turn."""
    bytes_per_image: float = 0.0
    """Over all ranks."""

    def speed_up(self, base: "Speed") -> tuple[float, float, float]:
        """Compute median and quartiles, over the turns, of the ratio of rates."""
        pairs = zip(self.images_per_second, base.images_per_second, strict=True)
        ratios = sorted(rate / base_rate for rate, base_rate in pairs)
        return median(ratios), ratios[len(ratios) // 4], ratios[len(ratios) - 1 - len(ratios) // 4]


def fastest(speeds: Sequence[Speed], names: Sequence[str]) -> Speed:
    """Return the base case: among some rows, the one with the largest median rate."""
    return max(
        (speed for speed in speeds if speed.name in names),
        key=lambda speed: median(speed.images_per_second),
    )


def throughput(
    comm: Communicator,
    rows: Mapping[str, Contender],
    batches: Sequence[Batch],
    turns: int,
    say: Callable[[str], None],
    bar: Bar,
) -> list[Speed]:
    """Train every row on `batches` in turn, `turns` times after a warm-up.

    The bar is drawn between measurements; without a bar, `say` reports every turn.
    """
    images = sum(len(batch) for batch in batches)
    speeds = [Speed(name) for name in rows]
    bar.total = (turns + 1) * len(rows)
    for turn in range(turns + 1):
        for row, speed in zip(rows.values(), speeds, strict=True):
            turn_name = f"turn {turn}/{turns}" if turn else "warming up"
            bar.update(text=f"{turn_name}: {speed.name}", now=True)
            before = row.spent()
            seconds = timed(comm, partial(row.train, batches))
            sent_here, waited = (
                after - start for after, start in zip(row.spent(), before, strict=True)
            )
            idle_shares, sent = comm.allgather(waited / seconds), sum(comm.allgather(sent_here))
            if turn:
                speed.images_per_second.append(images / seconds)
                speed.idle_share.append(idle_shares)
                speed.bytes_per_image = sent / images
            bar.update(bar.done + 1)
        if not bar.shown:
            say(f"turn {turn}/{turns}" if turn else "warmed up")
    return speeds


def still_batches(data: Data, size: int, count: int, device: torch.device) -> list[Batch]:
    """Make mini-batches with a learning rate near 0, so that no row diverges."""
    source = EpochSource(data, 0, 0, True, device)
    ids = torch.arange(count * size).remainder(len(data)).split(size)
    return [Batch(i, 1e-6, source) for i in ids]


def timed(comm: Communicator, work: Callable[[], None]) -> float:
    """Return the seconds from a common start until the last rank has finished."""
    comm.barrier()
    start = perf_counter()
    work()
    seconds = perf_counter() - start
    comm.barrier()
    return float(max(comm.allgather(seconds)))
