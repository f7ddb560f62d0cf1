"""What a step of each optimizer takes, as a share of a mini-batch's passes, on one thread.

    python docs/benchmarks/optimizer_cost.py [--rounds 7] [--rows resnet20]

Passes and steps alternate. The networks are ResNet-20, -56 and -18 on CIFAR-10's images, and one
layer of a Transformer of GPT-2's width (768), of which a mini-batch goes through all layers alike.
Muon's products take about 20 n operations for each weight of an n x m matrix (n <= m), and passes
6 for each sample and position that the weight is used at.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.method.blocks import make_optimizer, output_weight, placed
from hybrid.networks import models
from hybrid.ranks.launch import keep_memory
from hybrid.settings.config import OptimizerSettings

RAW = Path(__file__).with_name("optimizer_cost.json")
NAMES = ("sgd", "adamw", "nadamw", "muon", "soap")


def resnet(name: str, batch: int, side: int = 32) -> tuple[nn.Module, Tensor]:
    return models.build(name, 10, 3, side), torch.randn(batch, 3, side, side)


def transformer(tokens: int) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    return layer, torch.randn(tokens // 512, 512, 768)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "resnet20, 128 images": lambda: resnet("resnet20", 128),
    "resnet56, 128 images": lambda: resnet("resnet56", 128),
    "resnet18, 32 images of 224 x 224": lambda: resnet("resnet18", 32, 224),
    "a layer of GPT-2, 4,096 tokens": lambda: transformer(4096),
}


def measure(make: Callable[[], tuple[nn.Module, Tensor]], rounds: int) -> dict[str, Any]:
    """Seconds of passes and steps, by round."""
    torch.manual_seed(0)
    model, x = make()
    placed(model, torch.device("cpu"))
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    head = output_weight([model]) if x.dim() == 4 else None
    steppers = {
        name: make_optimizer(model, OptimizerSettings(name=name, lr=1e-4), head) for name in NAMES
    }
    seconds: dict[str, list[float]] = {"passes": [], **{name: [] for name in NAMES}}
    for i in range(rounds + 1):
        begun = perf_counter()
        model(x).square().mean().backward()
        took = {"passes": perf_counter() - begun}
        for name, stepper in steppers.items():
            begun = perf_counter()
            stepper.step()
            took[name] = perf_counter() - begun
        model.zero_grad()
        for name, value in took.items() if i else ():  # the first is warm-up
            seconds[name].append(value)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="", help="only networks with this in their names")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    found = json.loads(RAW.read_text()) if RAW.exists() else {}
    print(f"| network | passes, ms | {' | '.join(NAMES)} |\n|---|---|{'---|' * len(NAMES)}")
    for title, make in NETWORKS.items():
        if options.rows not in title:
            continue
        found[title] = measure(make, options.rounds)
        RAW.write_text(json.dumps(found, indent=1) + "\n")
        cells = [f"{1000 * median(found[title]['passes']):.0f}"]
        for name in NAMES:
            shares = [
                100 * step / passes
                for step, passes in zip(found[title][name], found[title]["passes"], strict=True)
            ]
            low, _, high = quantiles(shares, n=4)
            cells.append(f"{median(shares):.1f} % ({low:.1f} to {high:.1f})")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
