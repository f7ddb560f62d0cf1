"""Does a cut inside a residual block, which two tensors cross, pay where units are coarse?

    mpirun -n 2 --bind-to none python docs/benchmarks/finer_cuts.py --data-dir ~/data

ResNet-20, batch 128, K = 2, m = 4, one thread a rank: images/s and idle shares of trainings of 16
mini-batches, interleaved.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median

import torch
from mpi4py import MPI

from hybrid import Trainer, TrainSettings, data, models, split
from hybrid.solvers import DDG, FDG

STEPS = 16
CUTS = ("layer2.0", "layer2.0.conv2", "layer2.1")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    images, test = data.load("cifar10", options.data_dir, 128 * STEPS)
    rows = {f"{s.name}, {cut}": (s, cut) for s in (DDG(4), FDG(4)) for cut in CUTS}
    found: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in rows}
    for turn in range(options.turns + 1):
        for name, (solver, cut) in rows.items():
            torch.manual_seed(0)
            blocks = split(models.build("resnet20", 10, 3, 32), cuts=[cut], inside=True)
            settings = TrainSettings(epochs=1, threads=1, report_every=STEPS)
            made = Trainer(blocks, solver, train=settings, quiet=True).fit(images, test.take(128))
            if turn:
                found[name].append((made["images_per_second"], made["idle_share"]))
    if MPI.COMM_WORLD.rank:
        return
    print("| | images/s, median (least, most) | idle shares |\n|---|---|---|")
    for name, turns in found.items():
        rates, idle = zip(*turns, strict=True)
        shares = " / ".join(f"{mean(rank):.0%}" for rank in zip(*idle, strict=True))
        print(f"| {name} | {median(rates):.0f} ({min(rates):.0f}, {max(rates):.0f}) | {shares} |")
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
