"""What moving lam and kappa between sweeps is worth: one sweep, two, and how they move.

    python docs/benchmarks/moving.py --data-dir ~/data                       ResNet-8
    python docs/benchmarks/moving.py --data-dir ~/data --model resnet20

CIFAR-10's first 20,000 images, batch 128, 3 epochs, lr 0.1, K = 4, windows of 4 mini-batches, each
corrected by an exact pass; so every row sees the data as often, and trains exactly as often. One
thread; only the accuracy counts. Rows that the JSON holds are not repeated; --rows and --seeds
choose some.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from hybrid import Trainer, data, split
from hybrid.networks import models
from hybrid.rounds.report import DivergedError
from hybrid.settings.config import LinkSettings, OptimizerSettings, TrainSettings
from hybrid.solvers import AugmentedLagrangian, Backprop, BlockADMM, Penalty, Solver

FILE = Path(__file__).with_name("moving.json")
AL = AugmentedLagrangian
ROWS: Mapping[str, tuple[Solver, int, int]] = {
    # solver, sweeps, rounds from one correction to the next
    "exact steps alone": (Backprop(), 0, 0),
    "AL, one sweep": (AL(), 1, 1),
    "AL, two sweeps, limit": (AL(lam_move="limit"), 2, 1),
    "AL, two sweeps, lam_beta 0.05": (AL(lam_move="step", lam_beta=0.05), 2, 1),
    "AL, two sweeps, lam_beta = beta": (AL(lam_move="step"), 2, 1),
    "AL, two sweeps, lam_beta = beta, lam_step 0.1": (AL(lam_move="step", lam_step=0.1), 2, 1),
    "AL, four sweeps, limit": (AL(lam_move="limit"), 4, 1),
    "penalty, one sweep": (Penalty(), 1, 1),
    "penalty, one sweep, lam_step 0.1": (Penalty(lam_step=0.1), 1, 1),
    "penalty, two sweeps": (Penalty(), 2, 1),
    "block-ADMM, two sweeps": (BlockADMM(), 2, 1),
    "block-ADMM, two sweeps, jacobi, 3 hops": (BlockADMM(order="jacobi", z_steps=3), 2, 1),
    "block-ADMM, alone": (BlockADMM(), 2, 0),
}


def train(row: tuple[Solver, int, int], model: str, seed: int, folder: Path) -> float | str:
    """Test accuracy in per cent, or why there is none."""
    torch.set_num_threads(1)
    solver, sweeps, every = row
    images, test = data.load("cifar10", folder, 20_000)
    torch.manual_seed(seed)
    rounds: dict[str, Any] = {"window": 4, "sweeps": sweeps, "correct_every": every}
    trainer = Trainer(
        split(models.build(model, 10, 3, 32), 4 if sweeps else 1),
        solver,
        train=TrainSettings(epochs=3, seed=seed, threads=1, evaluate_every=100),
        optimizer=OptimizerSettings(lr=0.1),
        links=LinkSettings(kind="virtual"),
        quiet=True,
        **(rounds if sweeps else {}),
    )
    try:
        return 100 * float(trainer.fit(images, test)["test_accuracy"])
    except DivergedError as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    options = parser.parse_args()
    for seed in options.seeds:
        for name in options.rows:
            key = f"{options.model}: {name}"
            if str(seed) in known().get(key, {}):
                continue
            found = train(ROWS[name], options.model, seed, options.data_dir)
            rows = known()
            rows.setdefault(key, {})[str(seed)] = found
            FILE.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print("| run | test accuracy | seeds |\n|---|---|---|")
    for key, by_seed in known().items():
        values = [v for v in by_seed.values() if not isinstance(v, str)]
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        said = f"{mean(values):.1f}{spread} %" if values else "diverged"
        print(f"| {key} | {said} | {len(by_seed)} |")


def known() -> dict[str, dict[str, Any]]:
    """The figures there are."""
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


if __name__ == "__main__":
    main()
