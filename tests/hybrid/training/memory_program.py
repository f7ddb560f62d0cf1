"""Trains a network of 20 million weights in two blocks, and prints the memory of its process."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from hybrid import OptimizerSettings, Trainer, TrainSettings, split
from hybrid.ranks import launch
from hybrid.solvers import DDG

WIDTH, WORDS, LAYERS = 512, 16_000, 3


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def status(name: str) -> int:
    """Bytes of an entry of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def train(network: nn.Module, out: str) -> Trainer:
    words = torch.arange(16)
    trainer = Trainer(
        split(network, 2, sample=words),
        solver=DDG(micro_batches=2),
        loss=F.cross_entropy,
        train=TrainSettings(epochs=1, batch_size=4),
        optimizer=OptimizerSettings(name="adamw", lr=1e-4),
        out=Path(out),
        quiet=True,
    )
    trainer.fit(torch.utils.data.TensorDataset(words, words))
    return trainer


if __name__ == "__main__":
    small = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
    train(small, f"{sys.argv[1]}/small")  # what libraries take is in memory after it
    launch.keep_memory()
    libraries = status("VmRSS")
    layers = [layer() for _ in range(LAYERS)]
    network = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
    blocks = train(network, f"{sys.argv[1]}/large").blocks
    first, last = (sum(p.nbytes for p in blocks.module(k).parameters()) for k in range(2))
    told = 5 * first + 4 * last  # with gradient and moments, and the first block's older version
    found = {"told": told, "largest": 4 * WORDS * WIDTH, "libraries": libraries}
    print(json.dumps({**found, "peak": status("VmHWM")}))
