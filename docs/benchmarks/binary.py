"""Binary activations at a cut: block-ADMM, which never differentiates them, and straight-through.

    python docs/benchmarks/binary.py

Digits; a hidden layer of {-1, 1} values (`Sign`, of hybrid.solvers.layers.projection) between two
halves:

    Linear 64-128, ReLU, Linear 128-64, BatchNorm | Sign, Linear 64-128, ReLU, Linear 128-10

    straight-through  `backprop`: the sign's derivative is the identity's on [-1, 1]
    block-ADMM        alone, one block a half: Z in {-1, 1}^64 at the cut, no derivative of the sign
    hybrid            block-ADMM sweeps between straight-through corrections
    blocked           `backprop` with a sign of zero derivative: only the second half learns
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import Trainer, split
from hybrid.data.generated import digits
from hybrid.settings.config import OptimizerSettings, ScheduleSettings, TrainSettings
from hybrid.solvers import Backprop, BlockADMM
from hybrid.solvers.layers.projection import Sign


class BlockedSign(nn.Module):
    """The sign as autograd has it: its derivative is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x >= 0, 1.0, -1.0)


def network(seed: int, sign: nn.Module) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU()),
        nn.Sequential(nn.Linear(128, 64), nn.BatchNorm1d(64)),
        sign,
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def run(name: str, seed: int, epochs: int) -> dict[str, Any]:
    train = TrainSettings(threads=1, evaluate_every=1000, seed=seed)
    common: dict[str, Any] = {"train": train, "quiet": True}
    if name in ("straight-through", "blocked"):
        blocks = split(network(seed, BlockedSign() if name == "blocked" else Sign()), 1)
        return Trainer(blocks, Backprop(), **common).fit(*digits(), epochs=epochs)
    blocks = split(network(seed, Sign()), cuts=["2"])
    if name == "hybrid":
        solver = BlockADMM(rho=0.1, lam_step=1.0)
        return Trainer(blocks, solver, window=4, sweeps=2, **common).fit(*digits(), epochs=epochs)
    solver = BlockADMM(
        rho=RHO, order="jacobi", lam_step=1.0, kappa_step=KAPPA, optimizer="adam", local_lr=1.0
    )
    return Trainer(
        blocks,
        solver,
        window="all",
        correct_every=0,
        optimizer=OptimizerSettings(lr=0.003, weight_decay=0.0),
        schedule=ScheduleSettings(warmup_epochs=0.0),
        **common,
    ).fit(*digits(), epochs=epochs)


RHO, KAPPA = 0.1, 0.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    for name in ("straight-through", "block-ADMM", "hybrid", "blocked"):
        for seed in options.seeds:
            accuracy = run(name, seed, options.epochs)["test_accuracy"]
            rows.setdefault(name, []).append(accuracy)
        values = rows[name]
        spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
        print(f"| {name} | {100 * mean(values):.2f}{spread} % | {len(values)} |", flush=True)
    Path(__file__).with_name("binary.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
