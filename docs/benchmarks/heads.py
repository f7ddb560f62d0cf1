"""Local updates by their auxiliary heads: on ResNet-20 and on a GPT.

    python docs/benchmarks/heads.py resnet gpt --data-dir ~/data [--seeds 0 1] [--rows "K=4"]
    python docs/benchmarks/heads.py --only-collect

    resnet    ResNet-20, 20,000 images of CIFAR-10, 6 epochs, mini-batches of 128, SGD at 0.1
    gpt       gpt-8-64 as to_the_end.py gpt: 1,500 steps of 32 texts of 128 bytes, Muon

On the virtual clock, one thread. Runs that the JSON holds are not repeated. Heads beside linear
and mlp:WIDTH: "1c2f", a convolution and two linear layers (InfoPro, arXiv 2101.10832); "later
layers", two layers like those that follow, evenly spaced (AugLocal, arXiv 2402.17318); for the GPT
"norm", the network's own kind of output, LayerNorm and a linear layer, and "hidden", with another
layer between.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measuring
import to_the_end
import torch
from torch import Tensor, nn

from hybrid import Trainer, data, split
from hybrid.networks import models
from hybrid.solvers import DDG, Backprop, LocalUpdates, Solver

RAW = measuring.Raw(__file__)
Row = tuple[int, Solver]
"""Blocks and a method."""


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    filters = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(filters, nn.BatchNorm2d(outputs), nn.ReLU())


def pooled(channels: int, output: Any, width: int = 128) -> list[nn.Module]:
    layers = nn.Linear(channels, width), nn.ReLU(), nn.Linear(width, *output)
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers]


def one_convolution(index: int, shape: Any, output: Any) -> nn.Module:
    """1c2f."""
    return nn.Sequential(conv(shape[0], 128), *pooled(128, output))


def later_layers(index: int, shape: Any, output: Any) -> nn.Module:
    """The second of two is like the network's last, the first like one between."""
    channels = shape[0]
    between, last = min(64, 2 * channels), 64
    first = conv(channels, between, between // channels)
    return nn.Sequential(first, conv(between, last, last // between), *pooled(last, output))


def norm(index: int, shape: Any, output: Any) -> nn.Module:
    """(N, T, C) -> (N, bytes, T), as the network's output."""
    return nn.Sequential(nn.LayerNorm(shape[1]), Bytes(shape[1], output[0]))


class Bytes(nn.Linear):
    """A linear layer, with the classes before the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def hidden(index: int, shape: Any, output: Any) -> nn.Module:
    """The same with a hidden layer."""
    first = nn.Linear(shape[1], 256), nn.GELU()
    return nn.Sequential(nn.LayerNorm(shape[1]), *first, Bytes(256, output[0]))


def resnet() -> Iterator[tuple[str, Row]]:
    yield "backprop", (1, Backprop())
    for K in 4, 2, 8:
        yield f"ddg, K={K}", (K, DDG(micro_batches=8))
        kinds = {"linear": "linear", "mlp:128": "mlp:128"}
        kinds |= {"1c2f": "heads:one_convolution", "later layers": "heads:later_layers"}
        for name, kind in kinds.items():
            yield f"{name}, K={K}", (K, LocalUpdates(head=kind))
    yield "overlapping, 1c2f, K=4", (4, LocalUpdates("overlapping", head="heads:one_convolution"))


def gpt() -> Iterator[tuple[str, Row]]:
    for K in 2, 8, 4:
        kinds = {"linear": "linear", "norm": "heads:norm", "hidden": "heads:hidden"}
        for name, kind in kinds.items():
            yield f"{name}, K={K}", (K, LocalUpdates(head=kind))


TABLES = {"resnet": resnet, "gpt": gpt}


def train(table: str, row: Row, seed: int, options: Any) -> dict[str, Any]:
    K, solver = row
    settings: dict[str, Any]
    if table == "gpt":
        optimizer = to_the_end.of_text("muon", to_the_end.BEST["Muon"])
        text = to_the_end.Row(1, Backprop(), optimizer, windows=to_the_end.WINDOWS)
        samples, test = to_the_end.samples(text, options.data_dir, options.runs)
        network = models.gpt, (8, 64, 256, to_the_end.LENGTH)
        settings = {"optimizer": optimizer, "schedule": {"warmup_epochs": to_the_end.WARM_UP}}
        epochs, size = 1, to_the_end.SIZE
    else:
        samples, test = data.load("cifar10", options.data_dir, 20_000)
        network = models.resnet, (20,)
        settings, epochs, size = {"optimizer": {"lr": 0.1}}, 6, 128
    torch.manual_seed(seed)
    make, arguments = network
    summary = Trainer(
        split(make(*arguments), K),
        solver,
        train={"epochs": epochs, "batch_size": size, "seed": seed, "threads": 1},
        links={"kind": "virtual"},
        quiet=True,
        **settings,
    ).fit(samples, test)
    names = "test_accuracy", "test_bits_per_byte", "images_per_second"
    return {name: summary[name] for name in names if name in summary}


def main() -> None:
    runs = Path("runs/heads")
    options = measuring.options(__doc__, **{**measuring.GRID, "tables": TABLES, "runs": runs})
    torch.set_num_threads(1)
    for table in options.tables:
        for seed in options.seeds:
            for name, row in measuring.chosen(TABLES[table](), options):
                if not RAW.get(table, name, str(seed)) and not options.only_collect:
                    value = train(table, row, seed, options)
                    RAW.keep(table, name, str(seed), value=value)
                    print(table, name, seed, value, flush=True)
    for table, rows in RAW.read().items():
        of, factor = ("test_accuracy", 100) if table == "resnet" else ("test_bits_per_byte", 1)
        measuring.show(
            f"{table} | result | seeds | samples/s (simulated)",
            (
                (
                    name,
                    measuring.spread([factor * s[of] for s in seeds.values()], ".3f"),
                    len(seeds),
                    f"{max(s['images_per_second'] for s in seeds.values()):.0f}",
                )
                for name, seeds in rows.items()
            ),
        )


if __name__ == "__main__":
    main()
