"""A factorization layer on digits: supervised, and weakly supervised by odd and even.

    python docs/benchmarks/deepfacto.py

ResNet-8, two blocks, 12 epochs. Supervised: the ten digits, with the layer before `--unit` and
without. Weakly supervised: the network learns odd or even only; then a linear map (logistic
regression on standardized features) from 100 labeled images, ten a digit, to the ten digits, from

    codes      the layer's M, a mean over pixels
    product    M S, a mean over pixels
    behind     what the plain network has at the same cut, a mean over pixels
    untrained  the same of a plain network before training
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from hybrid import Trainer, split
from hybrid.data import Dataset
from hybrid.data.generated import digits
from hybrid.networks import models
from hybrid.networks.units import Chain, units
from hybrid.settings.config import TrainSettings
from hybrid.solvers import Backprop, BlockADMM, Solver
from hybrid.solvers.layers.projection import Factorization


def network(seed: int, classes: int, unit: str = "", rank: int = 0) -> tuple[Chain, str]:
    torch.manual_seed(seed)
    chain = models.build("resnet8", classes, channels=1, image_size=8)
    return (chain, factorized(chain, unit, rank)) if rank else (chain, "")


def factorized(chain: Chain, unit: str, rank: int) -> str:
    """Put a factorization before a unit of a stage; the name of the unit that it is."""
    stage, _, number = unit.rpartition(".")
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for name, child in chain.get_submodule(stage).named_children():
        if name == number:
            convolution = next(m for m in child.modules() if isinstance(m, nn.Conv2d))
            children["factors"] = Factorization(convolution.in_channels, rank)
        children[name] = child
    setattr(chain, stage, nn.Sequential(children))
    return f"{stage}.factors"


def train(chain: Chain, cut: str, data: tuple[Dataset, Dataset], seed: int, epochs: int) -> float:
    solver: Solver = BlockADMM() if cut else Backprop()
    blocks = split(chain, cuts=[cut]) if cut else split(chain, 1)
    settings = TrainSettings(threads=1, evaluate_every=1000, seed=seed)
    trainer = Trainer(blocks, solver, train=settings, quiet=True)
    return float(trainer.fit(*data, epochs=epochs)["test_accuracy"])


@torch.no_grad()
def features(chain: Chain, unit: str, images: Tensor, kind: str) -> Tensor:
    """(N, features): a mean over pixels of what there is before `unit`."""
    chain.eval()
    x = images
    for part in units(chain):
        layers = list(part.parts.values())
        if kind == "codes" and isinstance(layers[0], Factorization):
            return layers[0].codes(x).flatten(2).mean(2)
        if part.name == unit:
            break
        for layer in layers:
            x = layer(x)
    return x.flatten(2).mean(2)


def linear_map(train: Tensor, labels: Tensor, test: Tensor, truth: Tensor, seed: int) -> float:
    """Accuracy of a map fitted to ten samples a class."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = torch.cat([order[labels[order] == digit][:10] for digit in range(10)])
    scaler = StandardScaler().fit(train[chosen])
    fitted = LogisticRegression(max_iter=2000).fit(scaler.transform(train[chosen]), labels[chosen])
    return float(fitted.score(scaler.transform(test), truth))


def odd_or_even(data: Dataset) -> Dataset:
    return replace(data, labels=data.labels % 2, classes=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--unit", default="layer3.0")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    whole = digits()
    weak = (odd_or_even(whole[0]), odd_or_even(whole[1]))
    ids = [torch.arange(len(part)) for part in whole]
    images = [part.batch(i, 0, 0, False) for part, i in zip(whole, ids, strict=True)]
    truth = [part.labels for part in whole]
    rows: dict[str, list[float]] = {}
    for seed in options.seeds:
        for name, wanted in (("plain", 0), ("factorized", options.rank)):
            chain, cut = network(seed, 10, options.unit, wanted)
            accuracy = train(chain, cut, whole, seed, options.epochs)
            rows.setdefault(f"supervised, {name}", []).append(accuracy)
            chain, cut = network(seed, 2, options.unit, wanted)

            def mapped(kind: str, chain: Chain = chain, seed: int = seed) -> None:
                train_x, test_x = (features(chain, options.unit, x, kind) for x in images)
                found = linear_map(train_x, truth[0], test_x, truth[1], seed)
                rows.setdefault(f"ten digits from 100 labels, {kind}", []).append(found)

            if not cut:
                mapped("untrained")
            odd = train(chain, cut, weak, seed, options.epochs)
            rows.setdefault(f"odd or even, {name}", []).append(odd)
            for kind in ("codes", "product") if cut else ("behind",):
                mapped(kind)
        print(seed, {name: round(values[-1], 4) for name, values in rows.items()}, flush=True)
    Path(__file__).with_name("deepfacto.json").write_text(json.dumps(rows, indent=1) + "\n")
    for name, values in rows.items():
        spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
        print(f"| {name} | {100 * mean(values):.2f}{spread} % | {len(values)} |")


if __name__ == "__main__":
    main()
