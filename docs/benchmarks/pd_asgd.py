"""PD-ASGD on four replicas of one block, of which some are late.

    python docs/benchmarks/pd_asgd.py time accuracy gossip --data-dir ~/data [--seeds 0 1]
    python docs/benchmarks/pd_asgd.py --only-collect

    time        steps a second on the virtual clock at 1 Gb/s: ResNet-20, shares of 32 images
    accuracy    ResNet-8, 10,000 images of CIFAR-10, 6 epochs of mini-batches of 128, lr 0.1
    gossip      the paper's form, simulated: each rank takes mini-batches of 32 at its own pace, in
                forward and backward slots, and after a unit's step averages that unit's weights
                with those of another rank, drawn at random; the same network and images

A stall adds to a forward pass a multiple of the time of a step. "One slow": the first replica's
steps take twice as long. "Any, now and then": one step in eight takes five times as long, on each
replica independently. In `gossip` all ranks work in one process, by events; a step takes 3 ticks
of a device that runs its slots at once.
Rows that the JSON holds are not measured again.
"""

from __future__ import annotations

import copy
import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import measuring
import torch
from torch import Tensor, nn

from hybrid import Trainer, data, split
from hybrid.data.dataset import Dataset
from hybrid.links.virtual import VirtualLinks
from hybrid.networks import models
from hybrid.solvers import Backprop, Batch, Block, Solver
from hybrid.solvers.micro_batches import split_into_micro_batches
from hybrid.solvers.sync import AllReduce, LocalSGD
from hybrid.solvers.sync.base import Strategy
from hybrid_messages import PDASGD
from hybrid_messages.by_unit.unit_passes import UnitFlight, Units

RAW = measuring.Raw(__file__)
REPLICAS, BATCH, LR, EPOCHS, IMAGES = 4, 128, 0.1, 6, 10_000
METHODS: dict[str, tuple[Solver, Strategy]] = {
    "backprop, all-reduce": (Backprop(), AllReduce()),
    "sums by unit": (PDASGD(), AllReduce()),
    "sums by unit, lag 1": (PDASGD(lag=1), AllReduce()),
    "sums by unit, lag 4": (PDASGD(lag=4), AllReduce()),
    "1 : 1, sums by unit": (PDASGD(backward_slots=1), AllReduce()),
    "1 : 1, sums by unit, lag 1": (PDASGD(backward_slots=1, lag=1), AllReduce()),
    "backprop, local-sgd, h = 8": (Backprop(), LocalSGD(steps=8)),
}
STALLS: dict[str, Callable[[int, Random], float]] = {
    "none": lambda replica, draw: 0.0,
    "one slow": lambda replica, draw: 1.0 if replica == 0 else 0.0,
    "any, now and then": lambda replica, draw: 4.0 if draw.random() < 1 / 8 else 0.0,
}
STEPS = 16


class Stall(nn.Module):
    """Makes a replica's forward passes take longer on the virtual clock."""

    links = threading.local()
    kind, seconds = "none", 0.0

    def __init__(self) -> None:
        super().__init__()
        self._draw: Random | None = None

    def forward(self, x: Tensor) -> Tensor:
        mine = getattr(Stall.links, "mine", None)
        if self.training and mine is not None:
            replica = mine.place.replica
            self._draw = self._draw or Random(replica)
            mine.work(Stall.seconds * STALLS[Stall.kind](replica, self._draw))
        return x


def known_to_stalls(run: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(links: VirtualLinks, program: Any) -> Any:
        Stall.links.mine = links
        return run(links, program)

    return wrapped


def time(options: Any) -> None:
    VirtualLinks.run = known_to_stalls(VirtualLinks.run)  # type: ignore[method-assign]
    samples, _ = data.load("cifar10", options.data_dir, STEPS * BATCH)
    for turn in range(3):
        plain = timed_row(samples, "none", "backprop, all-reduce", 1)
        Stall.seconds = BATCH / REPLICAS / plain["images_per_second"]
        for kind in STALLS:
            for name in METHODS:
                if not RAW.get("time", kind, name, str(turn)):
                    value = timed_row(samples, kind, name, REPLICAS)
                    RAW.keep("time", kind, name, str(turn), value=value)
                    print(turn, kind, name, value, flush=True)


def timed_row(samples: Dataset, kind: str, name: str, replicas: int) -> dict[str, Any]:
    """One epoch of a few steps."""
    Stall.kind, (solver, sync) = kind, METHODS[name]
    size = BATCH // REPLICAS * replicas
    torch.manual_seed(0)
    network = nn.Sequential(Stall(), *models.build("resnet20", 10, 3, 32).children())
    more = {"replicas": replicas, "sync": sync} if replicas > 1 else {}
    summary = Trainer(
        split(network, 1),
        solver,
        train={"epochs": 1, "batch_size": size, "threads": 1},
        links={"kind": "virtual", "gigabits_per_second": 1.0},
        quiet=True,
        **more,
    ).fit(samples.take(STEPS * size), None)
    return {name: summary[name] for name in ("images_per_second", "idle_share")}


def accuracy(options: Any) -> None:
    samples, test = data.load("cifar10", options.data_dir, IMAGES)
    for seed in options.seeds:
        for name, (solver, sync) in METHODS.items():
            if RAW.get("accuracy", name, str(seed)):
                continue
            torch.manual_seed(seed)
            summary = Trainer(
                split(models.build("resnet8", 10, 3, 32), 1),
                solver,
                replicas=REPLICAS,
                sync=sync,
                train={"epochs": EPOCHS, "batch_size": BATCH, "seed": seed, "threads": 1},
                links={"kind": "virtual"},
                optimizer={"lr": LR},
                quiet=True,
            ).fit(samples, test)
            RAW.keep("accuracy", name, str(seed), value=summary["test_accuracy"])
            print(seed, name, summary["test_accuracy"], flush=True)


@dataclass(frozen=True)
class Gossip:
    """A row of the paper's form."""

    ranks: int = REPLICAS
    forward_slots: int = 1
    backward_slots: int = 2
    slow: float = 1.0
    """How many times as long the first rank's passes take."""
    size: int = BATCH // REPLICAS


GOSSIP = {
    "one rank, mini-batches of 128": Gossip(1, 1, 0, size=BATCH),
    "plain steps": Gossip(backward_slots=0),
    "1 : 2": Gossip(),
    "1 : 2, one rank 6 times slower": Gossip(slow=6.0),
    "2 : 3": Gossip(forward_slots=2, backward_slots=3),
    "1 : 1": Gossip(backward_slots=1),
    "plain steps, one rank 6 times slower": Gossip(backward_slots=0, slow=6.0),
}


class Images:
    """A source of normalized images that flips them."""

    mixes = joint = False

    def __init__(self, of: Dataset, like: Dataset, seed: int = 0) -> None:
        x, over = (each.images.float() for each in (of, like))
        mean, deviation = over.mean((0, 2, 3), True), over.std((0, 2, 3), keepdim=True)
        self.x = ((x - mean) / deviation).contiguous(memory_format=torch.channels_last)
        self.y, self.seed = of.labels.long(), seed

    def images(self, ids: Tensor, step: int = 0) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        flips = torch.rand(len(ids), 1, 1, 1, generator=draw) < 0.5
        return torch.where(flips, self.x[ids].flip(3), self.x[ids])

    def labels(self, ids: Tensor, step: int = 0) -> Tensor:
        return self.y[ids]


@dataclass
class Rank:
    """A replica, its slots, and the graphs that wait for one."""

    units: Units
    pace: float
    free: list[int]
    """Slots for forward and for backward passes."""
    waiting: deque[UnitFlight] = field(default_factory=deque)
    alternating: bool = False
    busy: float = 0.0


class Events:
    """Ranks that take mini-batches from one stream until it ends."""

    def __init__(self, row: Gossip, source: Images, seed: int) -> None:
        self.row, self.source, self.draw = row, source, Random(seed)
        torch.manual_seed(seed)
        network = models.build("resnet8", 10, 3, 32).to(memory_format=torch.channels_last)
        self.ranks = [self._rank(network, i) for i in range(row.ranks)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self.now = count(), 0.0
        self.parts = self._parts(len(source.y), seed)

    def _rank(self, network: nn.Module, index: int) -> Rank:
        module = split(copy.deepcopy(network), 1).module(0).train()
        sgd = torch.optim.SGD(module.parameters(), LR, 0.9, weight_decay=5e-4, nesterov=True)
        units = Units(Block(module, 0, 1, {"exact": sgd, "local": sgd}), 0.0)
        row = self.row
        slots = [row.forward_slots, row.backward_slots]
        alternating = row.backward_slots == 0
        pace = (1.0 if index else row.slow) * row.size * REPLICAS / BATCH
        return Rank(units, pace, slots, alternating=alternating)

    def _parts(self, images: int, seed: int) -> Iterator[Batch]:
        """The mini-batches of all epochs, at rates that rise for an epoch and then fall to 0."""
        draw, total, taken = torch.Generator().manual_seed(seed), EPOCHS * images, 0
        for _ in range(EPOCHS):
            for ids in torch.randperm(images, generator=draw).split(self.row.size):
                rate = LR * min((taken + len(ids)) / images, (total - taken) / (total - images))
                taken += len(ids)
                yield Batch(ids, rate, self.source, step=taken)

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def run(self) -> None:
        for rank in self.ranks:
            for _ in range(self.row.forward_slots):
                self.begin_forward(rank)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def begin_forward(self, rank: Rank) -> None:
        """Where a slot is free and no graph waits."""
        if not rank.free[0] or rank.waiting:
            return
        batch = next(self.parts, None)
        if batch is None:
            return
        rank.free[0] -= 1
        (part,) = split_into_micro_batches(batch, 1, rank.units.block)
        assert part.images is not None
        self.forward(rank, rank.units.new_flight(part, part.images), 0)

    def forward(self, rank: Rank, flight: UnitFlight, unit: int) -> None:
        rank.units.forward(flight, unit)
        tick = rank.pace / rank.units.count
        rank.busy += tick
        if unit + 1 < rank.units.count:
            self.at(tick, lambda: self.forward(rank, flight, unit + 1))
        else:
            self.at(tick, lambda: self.end_forward(rank, flight))

    def end_forward(self, rank: Rank, flight: UnitFlight) -> None:
        assert flight.part.labels is not None
        rank.units.compute_loss(flight, flight.part.labels)
        if rank.alternating:
            self.backward(rank, flight)
            return
        rank.free[0] += 1
        rank.waiting.append(flight)
        self.begin_backward(rank)
        self.begin_forward(rank)

    def begin_backward(self, rank: Rank) -> None:
        if rank.free[1] and rank.waiting:
            rank.free[1] -= 1
            self.backward(rank, rank.waiting.popleft())
            self.begin_forward(rank)

    def backward(self, rank: Rank, flight: UnitFlight) -> None:
        """The next unit's part, which takes twice as long as forward; its step comes at the end."""
        tick = 2 * rank.pace / rank.units.count
        rank.busy += tick

        def end() -> None:
            unit = flight.units_left - 1
            rank.units.backward(flight, unit)
            self.average(rank, unit)
            if flight.units_left:
                self.backward(rank, flight)
                return
            rank.free[0 if rank.alternating else 1] += 1
            self.begin_backward(rank)
            self.begin_forward(rank)

        self.at(tick, end)

    def average(self, rank: Rank, unit: int) -> None:
        """Of a unit's weights, with another rank's; graphs under way keep the old ones."""
        others = [other for other in self.ranks if other is not rank]
        if not others:
            return
        other = self.draw.choice(others)
        names = rank.units.parameters[unit]
        other.units.stashes[unit].before_step()
        rank.units.stashes[unit].before_step()
        with torch.no_grad():
            for name, p in names.items():
                q = other.units.parameters[unit][name]
                p.data = q.data = (p.data + q.data) / 2
                q.data = q.data.clone()

    def join(self) -> nn.Module:
        """The first rank's module with the means over ranks."""
        modules = [rank.units.block.module for rank in self.ranks]
        for tensors in zip(*(m.state_dict(keep_vars=True).values() for m in modules), strict=True):
            if tensors[0].is_floating_point():
                tensors[0].data = torch.stack([t.data for t in tensors]).mean(0)
        return modules[0].eval()


def gossip(options: Any) -> None:
    samples, test = data.load("cifar10", options.data_dir, IMAGES)
    tested = Images(test, samples)
    for seed in options.seeds:
        source = Images(samples, samples, seed)
        for name, row in GOSSIP.items():
            if RAW.get("gossip", name, str(seed)):
                continue
            events = Events(row, source, seed)
            events.run()
            module = events.join()
            with torch.no_grad():
                parts = zip(tested.x.split(500), tested.y.split(500), strict=True)
                right = sum(int((module(x).argmax(1) == y).sum()) for x, y in parts)
            busy = [rank.busy / events.now for rank in events.ranks]
            value = {"accuracy": right / len(tested.y), "ticks": events.now, "busy": busy}
            RAW.keep("gossip", name, str(seed), value=value)
            print(seed, name, value, flush=True)


TABLES = {"time": time, "accuracy": accuracy, "gossip": gossip}


def main() -> None:
    defaults = {"tables": TABLES, "data_dir": Path("data"), "seeds": [0], "only_collect": False}
    options = measuring.options(__doc__, **defaults)
    torch.set_num_threads(1)
    for table in options.tables:
        if not options.only_collect:
            TABLES[table](options)
    cells = {
        name: [
            measuring.spread([100 * a for a in RAW.get("accuracy", name).values()] or [0.0]),
            *(
                measuring.extremes(
                    [t["images_per_second"] / BATCH for t in RAW.get("time", kind, name).values()]
                )
                for kind in STALLS
                if RAW.get("time", kind, name)
            ),
        ]
        for name in METHODS
    }
    measuring.show(
        f"four replicas | accuracy, % | {' | '.join(f'steps/s, {kind}' for kind in STALLS)}",
        ((name, *row) for name, row in cells.items()),
    )
    measuring.show(
        "gossip | accuracy, % | ticks",
        (
            (
                name,
                measuring.spread([100 * s["accuracy"] for s in seeds.values()]),
                f"{max(s['ticks'] for s in seeds.values()):.0f}",
            )
            for name, seeds in RAW.read().get("gossip", {}).items()
        ),
    )


if __name__ == "__main__":
    main()
