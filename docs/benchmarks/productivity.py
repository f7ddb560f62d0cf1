"""Productivity of a local epoch: its progress over that of exact steps from the same weights.

    python docs/benchmarks/productivity.py --data-dir DIR [--model resnet8] [--processor-minutes 15]

One serial run gives weights and momenta at 0, 25, 50, 75 and 90 % of its schedule. From each, over
the same quarter of an epoch, augmented, the learning rate falling from the schedule's to zero:

    exact   a step a mini-batch
    local   window by window a forward and backward pass that records without a step, then the
            sweeps of the augmented Lagrangian: its local steps alone make progress
    held    as exact, but the rate stays: then the noise of the steps hides what they have learnt

Progress is that of the test accuracy and of the loss on training images; productivity the local
one's over the exact one's. `along` is <d, e> / <e, e> of the ways d and e that the weights went in
local and in exact steps, `cosine` that of their angle. Running statistics are measured anew before
every test. Results go to productivity.json beside this file; what it holds is skipped. Weights
of the serial run and of exact steps are kept in --work.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import nn

from hybrid import data
from hybrid.data import Dataset
from hybrid.data.sampling import epoch_order
from hybrid.links import RankLinks, run_virtual
from hybrid.method.blocks import make_block
from hybrid.method.schedule import Schedule
from hybrid.networks import models
from hybrid.networks.partition import split
from hybrid.ranks import launch
from hybrid.rounds.windows import EpochSource
from hybrid.settings.config import OptimizerSettings, ScheduleSettings
from hybrid.solvers import AugmentedLagrangian, Batch, Setup, Window
from hybrid.solvers.base import Recording
from hybrid.solvers.blocks.block import Block
from hybrid.solvers.exact.exact_pass import ExactPass, PassSettings

BATCH, IMAGES, BLOCKS, PEAK = 128, 20_000, 4, 0.1
TESTED, FITTED = 5_000, 2_000
"""Test images for the accuracy, training images, not augmented, for the loss."""
STEPS = IMAGES // BATCH
SHARES = (0, 25, 50, 75, 90)
QUARTER = STEPS // 4
GRID = [
    *product((1,), (4, QUARTER, 16), (1.0,), SHARES),
    *product((2,), (4,), (1.0,), (75, 25, 90)),
    *product((1,), (16,), (0.3,), (75, 90)),
    *product((0,), (2,), (0.3,), (75, 90)),
    (1, 1, 1.0, 50),
    (1, QUARTER, 0.3, 90),
    (1, 16, 0.3, 25),
    (1, QUARTER, 0.3, 75),
    (4, 4, 1.0, 75),
]
"""(sweeps, window, local rate, share), the most important first.

One sweep of a window of 1 at the local rate 1 is an exact step. 0 sweeps: exact ones.
"""
FILE = Path(__file__).with_suffix(".json")

States = list[dict[str, Any]]
"""Of every block's optimizer."""


class Network:
    """The network in blocks, and its steps from given weights and momenta."""

    def __init__(self, model: str, train: Dataset, test: Dataset) -> None:
        torch.manual_seed(0)
        self.train, self.test = train, test
        self.model = models.build(model, classes=10, channels=3, image_size=32)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.blocks = split(self.model, BLOCKS, balance="operations")
        self.shapes = tuple(self.blocks.cut_shapes(train.sample(2)[0]))
        self.states: States = []

    def take(self, kept: dict[str, Any]) -> None:
        """Go back to weights and momenta."""
        self.model.load_state_dict(kept["weights"])
        self.states = deepcopy(kept["states"])

    def keep(self) -> dict[str, Any]:
        """Weights and momenta as they are."""
        return {"weights": deepcopy(self.model.state_dict()), "states": deepcopy(self.states)}

    def weights(self) -> torch.Tensor:
        """All of them."""
        return torch.cat([p.detach().double().flatten() for p in self.model.parameters()])

    def batches(self, epoch: int, rate: Callable[[int], float]) -> list[Batch]:
        """The augmented mini-batches of an epoch."""
        source = EpochSource(self.train, 0, epoch, True, torch.device("cpu"))
        order = epoch_order(0, epoch, IMAGES)
        ids = [order[i * BATCH : (i + 1) * BATCH] for i in range(STEPS)]
        return [Batch(own, rate(i), source, epoch * STEPS + i) for i, own in enumerate(ids)]

    def exact(self, batches: list[Batch]) -> None:
        """A step a mini-batch."""

        def work(block: Block, links: RankLinks) -> float:
            exact = ExactPass(PassSettings(), block, links, Setup(self.shapes, BATCH))
            exact.train(Window(batches))
            return 0.0

        self._on_every_block(work)

    def local(self, batches: list[Batch], window: int, sweeps: int, rate: float) -> float:
        """Windows that are recorded and swept; the largest relative residual of a cut."""

        def work(block: Block, links: RankLinks) -> float:
            setup = Setup(self.shapes, BATCH, min(window, len(batches)), sweeps)
            program = AugmentedLagrangian(local_lr=rate).start(block, links, setup)
            assert isinstance(program, Recording)
            exact = ExactPass(PassSettings(), block, links, setup)
            residuals = []
            for start in range(0, len(batches), window):
                each = Window(batches[start : start + window], sweeps)
                exact.observe(each, program)
                residuals.append(program.train(each).residual())
            return sum(residuals) / len(residuals)

        return max(self._on_every_block(work))

    def _on_every_block(self, work: Callable[[Block, RankLinks], float]) -> list[float]:
        def program(links: RankLinks) -> tuple[dict[str, Any], float]:
            block = make_block(self.blocks, links.rank, OptimizerSettings(), torch.device("cpu"))
            optimizer = block.optimizers["exact"]
            if self.states:
                optimizer.load_state_dict(self.states[links.rank])
            found = work(block, links)
            return deepcopy(optimizer.state_dict()), found

        found = run_virtual(BLOCKS, program)
        self.states = [state for state, _ in found]
        return [each for _, each in found]

    @torch.no_grad()
    def measured(self) -> dict[str, float]:
        """Test accuracy and loss on training images, with running statistics of these weights."""
        norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        for images, _ in _parts(self.train, 16 * BATCH, BATCH):
            self.model.train()(images)
        for norm in norms:
            norm.momentum = 0.1
        self.model.eval()
        right = loss = 0.0
        for images, labels in _parts(self.test, TESTED):
            right += float((self.model(images).argmax(1) == labels).sum())
        for images, labels in _parts(self.train, FITTED):
            loss += float(nn.functional.cross_entropy(self.model(images), labels, reduction="sum"))
        self.model.train()
        return {"accuracy": right / TESTED, "loss": loss / FITTED}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--processor-minutes", type=float, default=15.0)
    parser.add_argument("--work", type=Path, default=Path("/tmp/productivity"))
    options = parser.parse_args()
    launch.keep_memory()
    torch.set_num_threads(1)
    train, test = data.load("cifar10", options.data_dir, IMAGES)
    network = Network(options.model, train, test)
    schedule = Schedule(ScheduleSettings(), PEAK, STEPS, options.epochs)
    kept = serial_run(network, schedule, options)
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    rows = found.setdefault(options.model, {})
    ends = [(0, window, 1.0, share) for window in (0, 1, 2) for share in SHARES]
    for sweeps, window, local, share in [*ends, *GRID]:
        kind = f"window {window}, sweeps {sweeps}" if sweeps else ("start", "held", "exact")[window]
        kind += f", local rate {local:g}" if local != 1 else ""
        key = f"{share} %, {kind}"
        if key in rows:
            continue
        if process_time() > 60 * options.processor_minutes:
            print("the processor time is used up")
            return
        step = share * STEPS * options.epochs // 100
        rate = schedule(step) if step else PEAK
        network.take(kept[share])
        falling = partial(_rate, rate * (1.0 if sweeps else local), kind == "held")
        batches = network.batches(options.epochs + share, falling)[:QUARTER]
        way = options.work / f"{options.model}-{options.epochs}-{share}.pt"
        went = trained(network, batches, sweeps, window, local, way)
        rows[key] = {"learning_rate": rate} | went | network.measured()
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{process_time():6.0f} s  {key}: {rows[key]}", flush=True)


def trained(
    network: Network, batches: list[Batch], sweeps: int, window: int, local: float, way: Path
) -> dict[str, float]:
    """Train a part of GRID; `way` keeps the way of the exact steps, which local ones compare to."""
    before = network.weights()
    if sweeps:
        residual = network.local(batches, window, sweeps, local)
        d, e = network.weights() - before, torch.load(way, weights_only=True)
        along, cosine = float(d @ e / (e @ e)), float(d @ e / (d.norm() * e.norm()))
        return {"residual": residual, "along": along, "cosine": cosine}
    if window:
        network.exact(batches)
    if window == 2 and local == 1:
        torch.save(network.weights() - before, way)
    return {}


def serial_run(network: Network, schedule: Schedule, options: Any) -> dict[int, dict[str, Any]]:
    """Weights and momenta at the shares of a serial run's schedule."""
    file = options.work / f"{options.model}-{options.epochs}.pt"
    if file.exists():
        found: dict[int, dict[str, Any]] = torch.load(file, weights_only=True)
        return found
    found, done = {0: network.keep()}, 0
    every = list(_steps(network, schedule, options.epochs))
    for share in SHARES[1:]:
        until = share * len(every) // 100
        network.exact(every[done:until])
        found[share], done = network.keep(), until
        print(f"{process_time():6.0f} s  {share} %: {network.measured()}", flush=True)
        network.take(found[share])
    options.work.mkdir(parents=True, exist_ok=True)
    torch.save(found, file)
    return found


def _rate(first: float, held: bool, step: int) -> float:
    return first if held else first * (1 - step / QUARTER)


def _steps(network: Network, schedule: Schedule, epochs: int) -> Iterator[Batch]:
    for epoch in range(epochs):
        rates = [schedule(epoch * STEPS + i) for i in range(STEPS)]
        yield from network.batches(epoch, rates.__getitem__)


def _parts(images: Dataset, count: int, size: int = 500) -> Iterator[tuple[Any, Any]]:
    for ids in torch.arange(count).split(size):
        inputs = images.batch(ids, seed=0, epoch=0, augment=False)
        yield inputs.contiguous(memory_format=torch.channels_last), images.targets(ids)


if __name__ == "__main__":
    main()
