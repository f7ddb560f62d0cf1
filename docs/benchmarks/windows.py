"""The window that follows the training against fixed ones: test accuracy at equal epochs.

    python docs/benchmarks/windows.py --data-dir DIR [--seeds 1] [--epochs 3] [--images 10000]
        [--rows "window 4"]

The augmented Lagrangian over four blocks, one sweep a window, every round corrected, so all but the
serial run do the same exact and local steps on the same mini-batches and differ in when. Results
go to windows.json beside this file, with the residual that each window left; what it holds is
skipped. Run folders are kept in --work.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from hybrid import Trainer, split
from hybrid import data as sources
from hybrid.networks import models
from hybrid.settings.config import LinkSettings, TrainSettings
from hybrid.solvers import AugmentedLagrangian, Backprop

BLOCKS, REPORT_EVERY = 4, 8
RUNS: dict[str, dict[str, Any]] = {
    "window 4": {"window": 4},
    "window auto, residual_limit 0.1": {"window": "auto", "residual_limit": 0.1},
    "window 16": {"window": 16},
    "window auto, residual_limit 0.25": {"window": "auto", "residual_limit": 0.25},
    "window 1": {"window": 1},
    "serial": {},
}
FILE = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rows", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--work", type=Path, default=Path("/tmp/windows"))
    options = parser.parse_args()
    loaded = sources.load("cifar10", options.data_dir, options.images)
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    rows = found.setdefault(f"{options.model}, {options.images}, {options.epochs} epochs", {})
    for seed in range(options.seeds):
        for name in options.rows:
            key = f"{name}, seed {seed}"
            if key not in rows:
                rows[key] = trained(options, loaded, name, seed)
                FILE.write_text(json.dumps(found, indent=1) + "\n")
                print(key, rows[key], flush=True)


def trained(options: Any, loaded: Any, name: str, seed: int) -> dict[str, Any]:
    """One training: its test accuracy and loss, and how its rounds went."""
    torch.manual_seed(seed)
    model = models.build(options.model, classes=10, channels=3, image_size=32)
    blocks = split(model, BLOCKS, balance="operations")
    solver = AugmentedLagrangian() if RUNS[name] else Backprop()
    out = options.work / f"{options.model}-{options.images}-{options.epochs}-{name}-{seed}"
    train = TrainSettings(
        epochs=options.epochs,
        seed=seed,
        report_every=REPORT_EVERY,
        evaluate_every=options.epochs,
        threads=1,
    )
    links = LinkSettings(kind="virtual")  # one core; its clock is not used
    made = Trainer(blocks, solver, **RUNS[name], train=train, links=links, out=out, quiet=True)
    summary = made.fit(*loaded)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    swept = [line for line in lines if line["phase"] == "parallel"]
    return {
        "accuracy": summary["test_accuracy"],
        "loss": summary["test_loss"],
        "returns_to_serial": summary["returns_to_serial"],
        "windows": [
            [next(same)["step"], length]
            for length, same in groupby(swept, lambda line: line.get("window"))
            if length
        ],
        "residual": [[line["step"], round(max(line["residual"]), 4)] for line in swept],
    }


if __name__ == "__main__":
    main()
