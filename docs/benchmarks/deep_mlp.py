"""Deep networks of sigmoids, and networks of signs and of arg-maxes, on digits: who trains them?

    python docs/benchmarks/deep_mlp.py backprop    # minutes
    python docs/benchmarks/deep_mlp.py admm        # half an hour
    python docs/benchmarks/deep_mlp.py signs       # minutes
    python docs/benchmarks/deep_mlp.py flips       # why three signs fail, in two tables
    python docs/benchmarks/deep_mlp.py table

Back-propagation and block-ADMM have the same networks, initial weights, optimizers, learning rates
and see the training set `--epochs` times. Back-propagation gets the whole grid with every seed, and
constant rates, too. Block-ADMM, which takes ten times as long, gets it with the first seed, the
linear decay and a quarter of the epochs; its best row is then trained in full with every seed (all
rows where there is one step). Rows that the raw file has are not run again.

Sigmoids: 19 hidden layers of 64 and a linear layer, from one of three initial weights:

    zero biases       normal weights with standard deviation 4 / sqrt(fan in)
    centered biases   the same, with biases that center the inputs of the sigmoids
    PyTorch's         nn.Linear's own

Steps: layers whose gradient is zero almost everywhere. Back-propagation trains what is above the
last of them, or passes its gradient "straight through". A step is a sign, or the arg-max of each
group of 8 values as a one-hot vector:

    three     64-64 | step, 64-64 | step, 64-64 | step, 64-10
    one       64-128, ReLU, 128-64, BatchNorm | step, 64-128, ReLU, 128-10

Three, five and nine signs, each the first layer of a block: block-ADMM online, with Z from a
forward pass in every mini-batch, and the straight-through estimator. Both get the linear decay and
Adam at 1e-3, 3e-3 and 1e-2, the first seed for a quarter of the epochs, and the best with all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import measuring
import torch
from torch import Tensor, nn

from hybrid import Trainer, split
from hybrid.data.sources import digits
from hybrid.rounds.phase_report import DivergedError
from hybrid.settings.config import OptimizerSettings, ScheduleSettings, TrainSettings
from hybrid.solvers import Backprop, BlockADMM
from hybrid.solvers.layers.projection import Projection, Sign

FILE = Path(__file__).with_suffix(".json")
LAYERS, WIDTH, GAIN, GROUP, BLOCKS = 20, 64, 4.0, 8, 10
WEIGHTS = ("zero biases", "centered biases", "PyTorch's")
STEPS = ("one sign", "one arg-max", "three signs", "three arg-maxes")
SIGNS = {"three signs": 3, "five signs": 5, "nine signs": 9}
RATES = {"sgd": (0.01, 0.1, 1.0), "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
SCHEDULES = ("linear", "constant")
WHAT = ("backprop", "admm", "signs", "flips", "table")


@dataclass(frozen=True)
class Row:
    """A training."""

    network: str
    """The initial weights of the sigmoids, or the step between the layers."""
    method: str
    optimizer: str
    lr: float
    schedule: str
    seed: int
    epochs: int
    accuracy: float = 0.0
    """Of the test set; 0 if the training diverged."""
    seconds: float = 0.0


class ArgMax(Projection):
    """One-hot vectors of the arg-max of each group of values."""

    def project(self, z: Tensor) -> Tensor:
        groups = z.unflatten(1, (-1, GROUP))
        hot = nn.functional.one_hot(groups.argmax(2), GROUP)
        return hot.flatten(1).to(z.dtype)


class Flat(nn.Module):
    """A step with the gradient that it has: none."""

    def __init__(self, step: Projection) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step.project(x).detach()


def sigmoids(weights: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for number in range(LAYERS):
        layer = nn.Linear(64 if number == 0 else WIDTH, 10 if number == LAYERS - 1 else WIDTH)
        if weights != "PyTorch's":
            nn.init.normal_(layer.weight, std=GAIN / layer.in_features**0.5, generator=generator)
            nn.init.zeros_(layer.bias)
        if weights == "centered biases" and number:
            with torch.no_grad():
                layer.bias.copy_(layer.weight.sum(1) / -2)
        layers += [layer] if number == LAYERS - 1 else [layer, nn.Sigmoid()]
    return nn.Sequential(*layers)


def steps(kind: str, seed: int, flat: bool) -> nn.Sequential:
    torch.manual_seed(seed)

    def step() -> nn.Module:
        layer = Sign() if "sign" in kind else ArgMax()
        return Flat(layer) if flat else layer

    if kind.startswith("one"):
        below = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
        norm = nn.Sequential(nn.Linear(128, WIDTH), nn.BatchNorm1d(WIDTH))
        above = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 10))
        return nn.Sequential(below, norm, step(), above)
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(SIGNS.get(kind, 3)):
        layers += [nn.Linear(64, WIDTH), step()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def admm_of(network: str, online: bool = False) -> tuple[list[str], BlockADMM]:
    """Its cuts, of sigmoids before linear layers and evenly, and its settings."""
    if network in (*STEPS, *SIGNS):
        last = 1 if network.startswith("one") else SIGNS.get(network, 3)
        cuts = [str(2 * k) for k in range(1, last + 1)]
        common: dict[str, Any] = {"rho": 0.1, "lam_step": 1.0, "local_lr": 1.0}
        if online:
            return cuts, BlockADMM(order="gauss-seidel", **common)
        return cuts, BlockADMM(kappa_step=0.1, order="jacobi", **common)
    cuts = [str(1 + 2 * round(k * LAYERS / BLOCKS)) for k in range(1, BLOCKS)]
    return cuts, BlockADMM(
        rho=1.0, lam_step=0.5, kappa_step=0.3, theta_steps=2, order="jacobi", local_lr=1.0
    )  # fmt: skip


def train(row: Row, out: str | None = None) -> Row:
    if row.network in (*STEPS, *SIGNS):
        network = steps(row.network, row.seed, row.method == "back-propagation")
    else:
        network = sigmoids(row.network, row.seed)
    name = {"adam": "adamw"}.get(row.optimizer, row.optimizer)  # without decay they are one
    optimizer = OptimizerSettings(name=name, lr=row.lr, weight_decay=0.0)
    schedule = ScheduleSettings(name=row.schedule, warmup_epochs=0.0)
    settings = TrainSettings(threads=1, evaluate_every=1 if out else 1000, seed=row.seed)
    common: dict[str, Any] = {
        "train": settings,
        "optimizer": optimizer,
        "schedule": schedule,
        "quiet": True,
    }
    if row.method.startswith("block-ADMM"):
        online = "online" in row.method
        cuts, solver = admm_of(row.network, online)
        if "no dual" in row.method:
            solver = replace(solver, kappa_step=0.0)
        rounds: dict[str, Any] = {"window": 1, "sweeps": 1} if online else {"window": "all"}
        blocks = split(network, cuts=cuts)
        trainer = Trainer(blocks, solver, correct_every=0, out=out, **rounds, **common)
    else:
        trainer = Trainer(split(network, 1), Backprop(), **common)
    begin = perf_counter()
    accuracy = 0.0
    with suppress(DivergedError):
        accuracy = trainer.fit(*digits(), epochs=row.epochs)["test_accuracy"]
    return replace(row, accuracy=accuracy, seconds=round(perf_counter() - begin, 1))


class Rows:
    """The raw file: rows that are there are not run again."""

    def __init__(self) -> None:
        raw = json.loads(FILE.read_text()) if FILE.exists() else []
        self.rows = [Row(**row) for row in raw]

    def get(self, wanted: Row) -> Row:
        wanted = replace(wanted, accuracy=0.0, seconds=0.0)
        for row in self.rows:
            if replace(row, accuracy=0.0, seconds=0.0) == wanted:
                return row
        self.rows.append(train(wanted))
        print(self.rows[-1], flush=True)
        lines = ",\n".join(f" {json.dumps(asdict(row))}" for row in self.rows)
        FILE.write_text(f"[\n{lines}\n]\n")
        return self.rows[-1]


def grid() -> Iterator[tuple[str, float]]:
    for optimizer, rates in RATES.items():
        for lr in rates:
            yield optimizer, lr


def backprop(rows: Rows, epochs: int, seeds: list[int]) -> None:
    for network in (*WEIGHTS, *STEPS):
        methods = ["back-propagation", *(["straight-through"] if network in STEPS else [])]
        for method, (optimizer, lr), schedule in product(methods, grid(), SCHEDULES):
            for seed in seeds:
                rows.get(Row(network, method, optimizer, lr, schedule, seed, epochs))


def admm(rows: Rows, epochs: int, seeds: list[int]) -> None:
    for network in (*WEIGHTS, *STEPS):
        method = f"block-ADMM {len(admm_of(network)[0]) + 1}"
        tried = [
            rows.get(Row(network, method, optimizer, lr, SCHEDULES[0], seeds[0], epochs // 4))
            for optimizer, lr in grid()
        ]
        chosen = max(tried, key=lambda row: row.accuracy)
        whole = tried if network.startswith("one") else [chosen]
        for row, seed in product(whole, seeds):
            rows.get(replace(row, seed=seed, epochs=epochs))


def signs(rows: Rows, epochs: int, seeds: list[int], part: str) -> None:
    for network, method in product(SIGNS, ("straight-through", "block-ADMM online")):
        if part not in f"{network}, {method}":
            continue
        trials = [Row(network, method, "adam", lr, SCHEDULES[0], seeds[0], epochs // 4)
                  for lr in (1e-3, 3e-3, 1e-2)]  # fmt: skip
        chosen = max(map(rows.get, trials), key=lambda row: row.accuracy)
        for seed in seeds:
            rows.get(replace(chosen, seed=seed, epochs=epochs))


def flips(epochs: int) -> None:
    """What happens to the signs of Z, and what the last block makes of them; Adam at 3e-3.

    A flip changes ||Z - old Z||^2 by 4.
    """
    for method in "block-ADMM 4", "block-ADMM, no dual", "block-ADMM online":
        lines = []
        with TemporaryDirectory() as folder:
            row = train(Row("three signs", method, "adam", 3e-3, "linear", 0, epochs), folder)
            raw = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
        rho = admm_of(row.network)[1].rho
        for number in sorted({1, 5, 10, epochs}):
            test = next(r for r in raw if r["phase"] == "test" and r["epoch"] == number)
            windows = [r for r in raw if r["phase"] == "parallel" and r["epoch"] == number - 1]
            values = WIDTH * sum(w["samples"] for w in windows)
            cuts = zip(*(w["dual"] for w in windows), strict=True)
            flipped = [sum((d / rho) ** 2 for d in cut) / 4 / values for cut in cuts]
            share = ", ".join(f"{100 * f:.1f}" for f in flipped)
            right = 100 * mean(w["accuracy"] for w in windows)
            lines.append((number, share, f"{right:.1f}", f"{100 * test['test_accuracy']:.1f}"))
        print(f"\n{method}\n")
        measuring.show("epoch | flips at each cut, % | right from Z, % | test, %", lines)


def best(rows: list[Row], epochs: int, seeds: list[int]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of the best learning rate and schedule by network, method and optimizer."""

    def place(row: Row) -> tuple[str, str, str]:
        return row.network, row.method, row.optimizer

    whole = sorted((row for row in rows if row.epochs == epochs), key=place)
    for (network, method, optimizer), group in groupby(whole, place):
        trials: dict[tuple[float, str], list[Row]] = {}
        for row in group:
            trials.setdefault((row.lr, row.schedule), []).append(row)
        name = f"{network} | {method}, {optimizer}"
        if done := [trial for trial in trials.values() if len(trial) == len(seeds)]:
            yield name, max(done, key=lambda trial: mean(row.accuracy for row in trial))


def main() -> None:
    options = measuring.options(__doc__, what=WHAT, epochs=120, seeds=[0, 1, 2], rows="")
    rows = Rows()
    if options.what == "flips":
        flips(options.epochs // 4)
        return
    if options.what == "signs":
        signs(rows, options.epochs, options.seeds, options.rows)
        return
    if options.what != "table":
        {"backprop": backprop, "admm": admm}[options.what](rows, options.epochs, options.seeds)
        return
    lines = []
    for name, trial in best(rows.rows, options.epochs, options.seeds):
        values, row = [100 * row.accuracy for row in trial], trial[0]
        each = ", ".join(f"{value:.1f}" for value in values)
        seconds = f"{mean(row.seconds for row in trial):.0f} s"
        title = f"{name}, {row.lr:g}, {row.schedule}"
        lines.append((title, measuring.spread(values), each, seconds))
    measuring.show("network | training | accuracy, % | by seed | time", lines)


if __name__ == "__main__":
    main()
