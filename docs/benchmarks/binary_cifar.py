"""A binary cut on CIFAR-10: block-ADMM, which never differentiates it, and straight-through.

    python docs/benchmarks/binary_cifar.py --data-dir ~/data

ResNet-8 whose activations before `layer3.0`, normalized, are held to {-1, 1}; the first 10,000
images, 3 epochs, batch 128, lr 0.1, two blocks, one thread; test accuracy.

    straight-through  back-propagation: the sign's derivative is the identity's on [-1, 1]
    hybrid            the same, and after every 4 mini-batches two sweeps of block-ADMM over them
    block-ADMM        alone: Z in {-1, 1} at the cut, no derivative of the sign
    blocked           a sign of zero derivative: only what lies behind it learns
    no sign           the same network without it

Rows that the JSON holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import Trainer, data, split
from hybrid.networks import models
from hybrid.networks.units import units
from hybrid.settings.config import OptimizerSettings, TrainSettings
from hybrid.solvers import Backprop, BlockADMM
from hybrid.solvers.layers.projection import Sign

FILE = Path(__file__).with_suffix(".json")
ROWS = ("no sign", "straight-through", "hybrid", "block-ADMM", "blocked")


class BlockedSign(nn.Module):
    """The sign as autograd has it: its derivative is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x >= 0, 1.0, -1.0)


class Whole(nn.Sequential):
    """One unit."""


def network(seed: int, sign: nn.Module) -> nn.Sequential:
    """Units by name, `sign` before "layer3.0"."""
    torch.manual_seed(seed)
    made: list[tuple[str, nn.Module]] = []
    for unit in units(models.build("resnet8", 10, 3, 32)):
        if unit.name == "layer3.0":
            made += [("norm", nn.BatchNorm2d(32)), ("sign", sign)]
        made.append((unit.name.replace(".", "_"), Whole(*unit.parts.values())))
    return nn.Sequential(OrderedDict(made))


def run(name: str, seed: int, folder: Path) -> float:
    """Test accuracy in per cent."""
    torch.set_num_threads(1)
    images, test = data.load("cifar10", folder, 10_000)
    sign = {"blocked": BlockedSign(), "no sign": nn.Identity()}.get(name, Sign())
    sweeping = name in ("hybrid", "block-ADMM")
    sample = images.sample(2)[0]
    cuts: dict[str, Any] = {"cuts": ["sign"]} if sweeping else {"blocks": 1}
    blocks = split(network(seed, sign), sample=sample, **cuts)
    rounds: dict[str, Any] = {}
    if sweeping:
        rounds = {"window": 4, "correct_every": 1 if name == "hybrid" else 0}
    trainer = Trainer(
        blocks,
        BlockADMM(lam_step=1.0) if sweeping else Backprop(),
        train=TrainSettings(epochs=3, seed=seed, threads=1, evaluate_every=100),
        optimizer=OptimizerSettings(lr=0.1),
        quiet=True,
        **rounds,
    )
    return 100 * float(trainer.fit(images, test)["test_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    options = parser.parse_args()
    for seed in options.seeds:
        for name in options.rows:
            if str(seed) not in known().get(name, {}):
                found = run(name, seed, options.data_dir)
                rows = known()
                rows.setdefault(name, {})[str(seed)] = found
                FILE.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print("| run | test accuracy | seeds |\n|---|---|---|")
    for name, by_seed in known().items():
        values = list(by_seed.values())
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        print(f"| {name} | {mean(values):.1f}{spread} % | {len(values)} |")


def known() -> dict[str, dict[str, float]]:
    """The figures there are."""
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


if __name__ == "__main__":
    main()
