"""Time to a stated test accuracy: every row trains from the same seeds, epoch by epoch in turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import torch

from hybrid.bench.contender import Contender
from hybrid.bench.measure import meet, timed
from hybrid.bench.recipes import OwnContender
from hybrid.data import Dataset
from hybrid.links import run_threads
from hybrid.models import Chain
from hybrid.ranks import launch
from hybrid.rounds.schedule import Schedule
from hybrid.rounds.windows import Windows
from hybrid.samplers import Uniform
from hybrid.settings.config import Config
from hybrid.training.evaluation import accuracy
from solvers.blocks.block import Block


@dataclass
class Runs:
    """Trainings of one row for one number of epochs, a value a seed."""

    name: str
    epochs: int
    test_accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Training time, evaluation left out."""

    def spread(self) -> tuple[float, float]:
        """Mean and standard deviation of the final accuracy."""
        values = self.test_accuracy
        return mean(values), stdev(values) if len(values) > 1 else 0.0


def to_accuracy(
    comm: Any,
    make_contenders: Callable[[int], Mapping[str, Contender]],
    make_model: Callable[[int], Chain],
    settings: Config,
    data: tuple[Dataset, Dataset],
    target: float,
    lengths: Sequence[int],
    seeds: int,
    say: Callable[[str], None],
) -> list[Runs]:
    """Train every row for each number of epochs until its mean final accuracy reaches `target`.

    The learning rate falls to zero at the end of each run, so a run's accuracy before its end is no
    measure; a row's time to accuracy is that of its shortest run that gets there.
    `make_contenders(seed)` makes all rows with the weights of `make_model(seed)`.
    """
    done: list[Runs] = []
    reached: set[str] = set()
    for epochs in sorted(lengths):
        runs: dict[str, Runs] = {}
        for seed in range(settings.train.seed, settings.train.seed + seeds):
            rows = {n: row for n, row in make_contenders(seed).items() if n not in reached}
            seconds = _train(comm, rows, settings, data[0], epochs, seed)
            for name, row in rows.items():
                state = row.state_dict()
                found = _test(make_model(seed), state, data[1]) if state is not None else 0.0
                meet(comm)
                run = runs.setdefault(name, Runs(name, epochs))
                run.test_accuracy.append(comm.bcast(found))
                run.seconds.append(seconds[name])
                row.close()
        for run in runs.values():
            done.append(run)
            say(f"{run.name}, {epochs} epochs: {run.spread()[0]:.2%} in {mean(run.seconds):.1f} s")
            if run.spread()[0] >= target:
                reached.add(run.name)
    return done


def shortest(runs: Sequence[Runs], name: str, target: float) -> Runs | None:
    """The shortest of a row's runs that reaches `target` on average."""
    found = [r for r in runs if r.name == name and r.spread()[0] >= target]
    return min(found, key=lambda run: mean(run.seconds)) if found else None


def _train(
    comm: Any,
    rows: Mapping[str, Contender],
    settings: Config,
    train: Dataset,
    epochs: int,
    seed: int,
) -> dict[str, float]:
    """Seconds of each row."""
    batch_size = settings.train.batch_size
    every = len(train) // batch_size
    schedule = Schedule(settings.schedule, settings.optimiser.lr, every, epochs)
    sampler = Uniform(len(train), seed)
    device = launch.device(settings.train.device)
    windows = Windows(train, batch_size, every, False, 1, seed, schedule, sampler, device)
    totals = dict.fromkeys(rows, 0.0)
    for epoch in range(epochs):
        trained, _ = next(windows.of_epoch(epoch, epoch * every))
        for name, row in rows.items():
            if isinstance(row, OwnContender):
                row.begin_epoch()
            work = trained.batches
            totals[name] += timed(comm, lambda row=row, work=work: row.train(work))  # type: ignore[misc]
    return totals


def _test(model: Chain, state: dict[str, torch.Tensor], test: Dataset) -> float:
    model.load_state_dict(state)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    block = Block(model, 0, 1, {})
    threads = torch.get_num_threads()
    return run_threads(1, lambda links: accuracy(block, links, test), threads)[0]
