"""What choosing samples is worth: test accuracy after every epoch's worth of passes.

    python docs/benchmarks/samplers.py --data-dir ~/data [--model resnet8] [--rows uniform]
        [--seeds 0 1 2] [--noise 0 0.2]
    python docs/benchmarks/samplers.py --model texts --seeds 0 1 2
    python docs/benchmarks/samplers.py --model gpt --noise 0
    python docs/benchmarks/samplers.py --only-collect

    resnet8, ...  CIFAR-10's first 20,000 images, batch 128, lr 0.1, six epochs of 156 mini-batches
    texts         a Transformer (one layer, width 64): from which of eight packages of Python's
                  library are 48 bytes? 6,400 texts, batch 32, AdamW, lr 1e-3, 4 epochs of 200
    gpt           gpt-2-64: the next byte of 64, 6,400 texts, 3 epochs; accuracy is -bits per byte

One block, one thread; the default schedule. With --noise so many of the labels are replaced by
another one, drawn uniformly; test labels are right. Rows that the JSON holds are not repeated.

An epoch is as many passes, whichever samples they are of. The table says how many passes a sampler
needs to reach what uniform samples give after all, by a straight line between epochs, and the
processor's seconds of a training, assistant and tests included.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import measuring
import torch
from to_the_end import corpus
from torch import Tensor, nn

from hybrid import Callback, Trainer, data, split
from hybrid.data.samplers import Sampler, Uniform
from hybrid.data.sampling import uniform
from hybrid.networks import models
from hybrid.networks.models.gpt import DecoderLayer, Embedding
from hybrid.solvers import Backprop
from hybrid_samplers import AutoAssist, SelectiveBackprop

RAW = measuring.Raw(__file__)
SECONDS, EPOCHS = "processor seconds", {"texts": 4, "gpt": 3}
ROWS: dict[str, Sampler] = {
    "uniform": Uniform(),
    "auto-assist": AutoAssist(),
    "auto-assist, a module": AutoAssist(assistant="samplers:Words", optimizer="adamw"),
    "selective-backprop": SelectiveBackprop(),
    "selective-backprop, beta 2": SelectiveBackprop(beta=2.0),
}


class Words(nn.Module):
    """An assistant: a bag of embeddings with that of the class, and two layers."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        super().__init__()
        self.words, self.classes = nn.EmbeddingBag(256, 16), nn.EmbeddingBag(256, 16)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        bags = self.words(inputs), self.classes(targets.reshape(len(inputs), -1))
        logits: Tensor = self.layers(torch.cat(bags, 1))[:, 0]
        return logits


@dataclass
class Task:
    train: Any
    test: Any
    network: nn.Module
    settings: dict[str, Any]
    metric: str = "test_accuracy"
    factor: float = 100.0


OPTIMIZER = {"name": "adamw", "lr": 1e-3}
CLASSES = "asyncio ctypes email encodings importlib multiprocessing tkinter unittest"
LENGTH, TEXTS = 48, 6_400


def task(model: str, folder: Path, noise: float, seed: int) -> Task:
    """What is trained, on labels of which a share is wrong."""
    torch.manual_seed(seed)
    library = Path(sysconfig.get_paths()["stdlib"])
    train = {"epochs": EPOCHS.get(model, 6), "seed": seed, "threads": 1, "batch_size": 32}
    settings: dict[str, Any] = {"train": train, "optimizer": OPTIMIZER}
    if model == "gpt":
        text, test = data.load_text(corpus(Path("runs/samplers")), 64)
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0))
        text = replace(text, starts=text.starts[order[:TEXTS]])
        network = models.gpt(2, 64, 256, 64)
        return Task(text, test.take(512), network, settings, "test_bits_per_byte", -1.0)
    if model == "texts":
        texts, labels = packages(library)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
        texts, labels = texts[order], labels[order]
        test = texts[TEXTS : TEXTS + 2048], labels[TEXTS : TEXTS + 2048]
        layers = Embedding(256, LENGTH, 64), DecoderLayer(64), Mean(), nn.Linear(64, 8)
        pair = texts[:TEXTS], noisy(labels[:TEXTS], 8, noise)
        return Task(pair, test, nn.Sequential(*layers), settings)
    images, test = data.load("cifar10", folder, 20_000)
    images = replace(images, labels=noisy(images.labels, images.classes, noise))
    settings = {"train": {**train, "batch_size": 128}, "optimizer": {"lr": 0.1}}
    return Task(images, test, measuring.resnet(model, seed), settings)


class Mean(nn.Module):
    """The mean over positions, (N, T, C) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]).mean(1)


def packages(library: Path) -> tuple[Tensor, Tensor]:
    """1,200 pieces of the sources of each package (N, LENGTH), and which package it is."""
    texts = []
    for name in CLASSES.split():
        files = sorted(p for p in (library / name).rglob("*.py") if "test" not in p.parts)
        text = b"".join(p.read_bytes() for p in files)
        pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        pieces = pieces[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
        every = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
        texts.append(pieces[every[:1200]].long())
    labels = [torch.full((len(each),), i) for i, each in enumerate(texts)]
    return torch.cat(texts), torch.cat(labels)


def noisy(labels: Tensor, classes: int, share: float) -> Tensor:
    """With so many labels replaced, each by another one."""
    ids = torch.arange(len(labels))
    wrong = uniform(1, 0, ids, 1) < share
    shift = 1 + (uniform(1, 0, ids, 2) * (classes - 1)).long()
    return torch.where(wrong, (labels + shift) % classes, labels)


class Curve(Callback):
    """The test's metric after every epoch."""

    def __init__(self, of: Task) -> None:
        self.task, self.points = of, list[float]()

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        self.points.append(round(self.task.factor * float(results[self.task.metric] or 0.0), 3))


def curve(sampler: Sampler, of: Task) -> tuple[list[float], float]:
    """Test accuracies in per cent, and the processor's seconds."""
    seen, begun = Curve(of), process_time()
    trainer = Trainer(
        split(of.network, 1),
        Backprop(),
        sampler=sampler,
        callbacks=[seen],
        quiet=True,
        **of.settings,
    )
    trainer.fit(of.train, of.test)
    return seen.points, round(process_time() - begun, 1)


def needed(points: list[float], target: float) -> float:
    """Epochs until the target, between two by a straight line; infinite if it is not reached."""
    before = 0.0 if target > 0 else -8.0  # bits per byte
    for epoch, point in enumerate(points):
        if point >= target:
            return epoch + (target - before) / (point - before)
        before = point
    return float("inf")


def cells(model: str, key: str, figures: dict[str, dict[str, list[float]]]) -> tuple[object, ...]:
    """A row of the table."""
    noise, _, name = key.partition(", ")
    seeds, base = figures[key], figures.get(f"{noise}, uniform", {})
    last = [points[-1] for points in seeds.values()]
    reached = [needed(seeds[s], base[s][-1]) for s in seeds if s in base]
    epochs = ", ".join("not" if x == float("inf") else f"{x:.1f}" for x in reached)
    seconds = RAW.get(SECONDS, model, key).values()
    each = f"{measuring.spread([*seconds])} s" if seconds else ""
    return noise, name, measuring.spread(last, ".2f"), len(last), epochs, each


def main() -> None:
    options = measuring.options(
        __doc__,
        data_dir=measuring.DATA,
        model="resnet20",
        seeds=[0],
        rows=[*ROWS],
        noise=[0.0, 0.2],
        only_collect=False,
    )
    for seed in () if options.only_collect else options.seeds:
        for noise in options.noise:
            for name in options.rows:
                key = options.model, f"{100 * (1 - noise):.0f} % right, {name}", str(seed)
                if not RAW.get(*key):
                    made = task(options.model, options.data_dir, noise, seed)
                    points, seconds = curve(ROWS[name], made)
                    RAW.keep(*key, value=points)
                    RAW.keep(SECONDS, *key, value=seconds)
    for model, rows in RAW.read().items():
        if model != SECONDS:
            print(f"\n{model}\n")
            header = "labels | sampler | at the end | seeds | epochs to uniform's | processor"
            measuring.show(header, (cells(model, key, rows) for key in rows))


if __name__ == "__main__":
    main()
