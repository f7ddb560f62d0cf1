"""Checkpoints of small split models, for tests."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid import split
from hybrid.folder import checkpoint
from hybrid.folder.writer import Writer
from hybrid.links import RankLinks, run_threads
from hybrid.method.optimizers import make_optimizer
from hybrid.networks import models
from hybrid.networks.blocks import Blocks
from hybrid.settings.config import OptimizerSettings

MANIFEST = {"model": "resnet8", "epoch": 1}


def trained(blocks: int, seed: int, name: str = "sgd", own: bool = False) -> tuple[Blocks, Any]:
    """A split model and its optimizers, one set a rank, after two steps on random gradients."""
    torch.manual_seed(seed)
    model = models.build("resnet8", 4, 1, 8).to(memory_format=torch.channels_last)
    cut = split(model, blocks, balance="even")
    optimizers = []
    for rank in range(blocks):
        exact = make_optimizer(cut.module(rank), OptimizerSettings(name=name))
        local = make_optimizer(cut.module(rank), OptimizerSettings(momentum=0.5)) if own else exact
        optimizers.append({"exact": exact, "local": local})
        for optimizer in optimizers[-1].values():
            for _ in range(2):
                for parameter in cut.module(rank).parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
    return cut, optimizers


def saved(root: Path, blocks: int = 2, step: int = 7, **how: Any) -> tuple[Blocks, Any, Path]:
    """A checkpoint of `trained` blocks, written by as many threads."""
    cut, optimizers = trained(blocks, 0, **how)
    run_threads(blocks, lambda links: save(root, step, links, cut, optimizers))
    return cut, optimizers, root / f"{step:08d}"


def save(
    root: Path, step: int, links: RankLinks, cut: Blocks, optimizers: Any, keep_last: int = 0
) -> None:
    """Write a checkpoint."""
    units = units_of(links.rank, cut, optimizers)
    Writer(root, links, keep_last).write(step, units, {}, MANIFEST)


def units_of(rank: int, cut: Blocks, optimizers: Any) -> dict[str, dict[str, Tensor]]:
    """The tensors of one rank's unit files."""
    return {u.name: checkpoint.tensors_of(u, optimizers[rank]) for u in cut.units_of(rank)}
