"""A plain network of 20 sigmoid layers on digits: block-ADMM, and SGD under the same budget.

    python docs/benchmarks/deep_mlp.py

Weights are normal with standard deviation 4 / sqrt(fan in), which keeps variances through sigmoids
at first order, biases zero. Block-ADMM works alone in its batch setting, every block on a thread;
SGD is `backprop` on one block. Both see the training set `--epochs` times; SGD gets the best of
several learning rates, and a run of three times the epochs as well.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from hybrid import Trainer, split
from hybrid.data.sources import digits
from hybrid.settings.config import OptimizerSettings, ScheduleSettings, TrainSettings
from hybrid.solvers import Backprop, BlockADMM

LAYERS, WIDTH, GAIN = 20, 64, 4.0
LEARNING_RATES = (0.01, 0.1, 1.0)


def network(seed: int) -> nn.Sequential:
    """Flatten, 19 hidden layers of sigmoids, a linear layer."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for number in range(LAYERS):
        layer = nn.Linear(64 if number == 0 else WIDTH, 10 if number == LAYERS - 1 else WIDTH)
        nn.init.normal_(layer.weight, std=GAIN / layer.in_features**0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer] if number == LAYERS - 1 else [layer, nn.Sigmoid()]
    return nn.Sequential(*layers)


def cuts(blocks: int) -> list[str]:
    """Before linear layers, evenly; layer i is unit 1 + 2i."""
    return [str(1 + 2 * round(k * LAYERS / blocks)) for k in range(1, blocks)]


def train_settings(seed: int) -> TrainSettings:
    return TrainSettings(threads=1, evaluate_every=1000, seed=seed)


def admm(seed: int, epochs: int, blocks: int, order: str) -> dict[str, Any]:
    solver = BlockADMM(
        rho=1.0, lam_step=0.5, kappa_step=0.3, theta_steps=2, optimizer="adam", order=order,
        local_lr=1.0,
    )  # fmt: skip
    trainer = Trainer(
        split(network(seed), cuts=cuts(blocks)),
        solver,
        window="all",
        correct_every=0,
        train=train_settings(seed),
        optimizer=OptimizerSettings(lr=0.01, weight_decay=0.0),
        schedule=ScheduleSettings(warmup_epochs=0.0),
        quiet=True,
    )
    return trainer.fit(*digits(), epochs=epochs)


def sgd(seed: int, epochs: int, lr: float) -> dict[str, Any]:
    trainer = Trainer(
        split(network(seed), 1),
        Backprop(),
        train=train_settings(seed),
        optimizer=OptimizerSettings(lr=lr, weight_decay=0.0),
        quiet=True,
    )
    return trainer.fit(*digits(), epochs=epochs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    residuals: dict[str, list[float]] = {}
    for seed in options.seeds:
        for lr in LEARNING_RATES:
            found = sgd(seed, options.epochs, lr)
            rows.setdefault(f"SGD, lr {lr:g}", []).append(found["test_accuracy"])
            # two weight steps a visit: as many epochs again, so as not to favor block-ADMM
            found = sgd(seed, 3 * options.epochs, lr)
            rows.setdefault(f"SGD, lr {lr:g}, 3 x the epochs", []).append(found["test_accuracy"])
        for blocks, order in ((7, "jacobi"), (7, "gauss-seidel"), (10, "jacobi")):
            name = f"block-ADMM, {blocks} blocks, {order}"
            found = admm(seed, options.epochs, blocks, order)
            rows.setdefault(name, []).append(found["test_accuracy"])
            residuals.setdefault(name, []).append(max(found["residual"]))
        print(seed, {name: values[-1] for name, values in rows.items()}, flush=True)
    file = Path(__file__).with_name("deep_mlp.json")
    file.write_text(json.dumps({"accuracy": rows, "residual": residuals}, indent=1) + "\n")
    for name, values in rows.items():
        spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
        print(f"| {name} | {100 * mean(values):.2f}{spread} % | {len(values)} |")


if __name__ == "__main__":
    main()
