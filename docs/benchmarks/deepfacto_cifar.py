"""A factorization layer on CIFAR-10, weakly supervised: animal or vehicle, then ten classes.

    python docs/benchmarks/deepfacto_cifar.py --data-dir D
    python docs/benchmarks/deepfacto_cifar.py --data-dir D --seeds 0 --only alone rank-8 rank-64

ResNet-8 learns from the first 5,000 images which are animals, in two blocks with the layer at the
cut before `layer3.0`. Then a linear map (logistic regression on standardized features) to the ten
classes is fitted on 1, 5 and 10 % of those images with their labels, the same number of each class,
and tested on the first 5,000 test images. Features, of 32 maps (the codes: as many as factors):

    codes      the layer's M             plain      of the same network without the layer, trained
    product    M S                                  on the same coarse labels by back-propagation
                                         untrained  of that network before training

each as means over the pixels ("means") and as means over the four quadrants ("quadrants").

    hybrid     block-ADMM, one sweep after every window of 4 of straight-through correction
    alone      block-ADMM without corrections: no gradient crosses the cut; two sweeps, rho 0.1
    rank-R     hybrid with R factors instead of 32

What is already in the JSON is not repeated.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from deepfacto import factorized
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from hybrid import Trainer, data, split
from hybrid.data import Dataset
from hybrid.networks import models
from hybrid.networks.units import Chain, units
from hybrid.settings.config import TrainSettings
from hybrid.solvers import Backprop, BlockADMM, Solver
from hybrid.solvers.layers.projection import Factorization

UNIT, IMAGES, TESTED, EPOCHS = "layer3.0", 5000, 5000, 2
SHARES = (1, 5, 10)
ANIMALS = torch.tensor([2, 3, 4, 5, 6, 7])
FILE = Path(__file__).with_suffix(".json")

Row = dict[str, float]


def train(name: str, sets: tuple[Dataset, Dataset], seed: int) -> tuple[Chain, float]:
    """A network trained on coarse labels, and its test accuracy."""
    chain = network(seed)
    rounds: dict[str, Any] = {}
    solver: Solver = Backprop()
    if name == "plain":
        blocks = split(chain, 1)
    else:
        rank = name.removeprefix("rank-") if name.startswith("rank-") else "32"
        torch.manual_seed(seed)  # of the dictionary
        cut = factorized(chain, UNIT, int(rank))
        blocks = split(chain, cuts=[cut])
        solver, rounds = BlockADMM(), {"window": 4, "sweeps": 1}
        if name == "alone":
            solver = BlockADMM(rho=0.1, factor_rho=0.1, kappa_step=1.0, local_lr=1.0)
            rounds = {"window": 4, "sweeps": 2, "correct_every": 0}
    settings = TrainSettings(threads=1, evaluate_every=1000, seed=seed)
    trainer = Trainer(blocks, solver, train=settings, quiet=True, **rounds)
    return chain, float(trainer.fit(*sets, epochs=EPOCHS)["test_accuracy"])


def network(seed: int) -> Chain:
    torch.manual_seed(seed)
    return models.build("resnet8", 2, channels=3, image_size=32)


@torch.no_grad()
def maps(chain: Chain, images: Tensor) -> dict[str, Tensor]:
    """What there is before `UNIT`, as (N, channels, 2, 2): means over the quadrants."""
    chain.eval()
    found: dict[str, list[Tensor]] = {}
    for x in images.split(500):
        for unit in units(chain):
            layers = list(unit.parts.values())
            if isinstance(layers[0], Factorization):
                codes = layers[0].codes(x)
                found.setdefault("codes", []).append(_quadrants(codes))
                found.setdefault("product", []).append(_quadrants(layers[0].compose(codes)))
                break
            if unit.name == UNIT:
                found.setdefault("plain", []).append(_quadrants(x))
                break
            for layer in layers:
                x = layer(x)
    return {kind: torch.cat(parts) for kind, parts in found.items()}


def _quadrants(x: Tensor) -> Tensor:
    return torch.nn.functional.adaptive_avg_pool2d(x, 2)


def fine(
    train: dict[str, Tensor],
    labels: Tensor,
    test: dict[str, Tensor],
    truth: Tensor,
    seed: int,
) -> Row:
    """Accuracy of linear maps to the ten classes, by features and share of labels."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    row: Row = {}
    for kind in train:
        for view in ("means", "quadrants"):
            x, y = (_features(each[kind], view) for each in (train, test))
            for share in SHARES:
                count = len(labels) * share // 1000
                chosen = torch.cat([order[labels[order] == c][:count] for c in range(10)])
                scaler = StandardScaler().fit(x[chosen])
                fitted = LogisticRegression(max_iter=5000)
                fitted.fit(scaler.transform(x[chosen]), labels[chosen])
                score = fitted.score(scaler.transform(y), truth)
                row[f"{kind}, {view}, {share} %"] = round(float(score), 4)
    return row


def _features(maps: Tensor, view: str) -> Tensor:
    return maps.mean((2, 3)) if view == "means" else maps.flatten(1)


def animals(whole: Dataset) -> Dataset:
    return replace(whole, labels=torch.isin(whole.labels, ANIMALS).long(), classes=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", default=["plain", "hybrid"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Row]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    whole, test = data.load("cifar10", options.data_dir)
    both = whole.take(IMAGES), test.take(TESTED)
    coarse = animals(both[0]), animals(both[1])
    images = [part.batch(torch.arange(len(part)), 0, 0, False) for part in both]
    labels = [part.labels for part in both]
    for seed in options.seeds:
        for name in options.only:
            done = rows.setdefault(name, {})
            if str(seed) in done:
                continue
            row: Row = {}
            if name == "plain":
                before = [{"untrained": maps(network(seed), x)["plain"]} for x in images]
                row |= fine(before[0], labels[0], before[1], labels[1], seed)
            chain, row["coarse"] = train(name, coarse, seed)
            after = [maps(chain, x) for x in images]
            row |= fine(after[0], labels[0], after[1], labels[1], seed)
            done[str(seed)] = row
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
            print(seed, name, row, flush=True)
    table(rows)


def table(rows: dict[str, dict[str, Row]]) -> None:
    print("| run | features | 1 % | 5 % | 10 % | coarse | seeds |\n|---|---|---|---|---|---|---|")
    for name, seeds in rows.items():
        found = list(seeds.values())
        kinds = dict.fromkeys(key.rsplit(", ", 1)[0] for key in found[0] if key != "coarse")
        for kind in kinds:
            cells = [_cell([row[f"{kind}, {share} %"] for row in found]) for share in SHARES]
            cells.append(_cell([row["coarse"] for row in found]))
            print(f"| {name} | {kind} | {' | '.join(cells)} | {len(found)} |")


def _cell(values: list[float]) -> str:
    spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
