"""One rank's block, with its optimizer, on its device."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from hybrid.networks.blocks import Blocks
from hybrid.optimizers import optimizer as optimizers
from hybrid.settings.config import DelaySettings, OptimizerSettings, TrainSettings
from hybrid.solvers.blocks.block import Block
from hybrid.solvers.blocks.draws import Draws
from hybrid.solvers.blocks.optimizer_state import Average
from hybrid.solvers.layers.projection import leading_projection
from hybrid.solvers.optimizers.mends import Extrapolation

M = TypeVar("M", bound=nn.Module)


def make_block(
    blocks: Blocks,
    index: int,
    optimizer: OptimizerSettings | optimizers.Factory,
    device: torch.device,
    train: TrainSettings | None = None,
    drawing: dict[nn.Module, tuple[int, ...]] | None = None,
    replica: int = 0,
    delay: DelaySettings | None = None,
    steps_late: float = 0.0,
    total_steps: int = 0,
) -> Block:
    """Block `index` in training mode on its device, with the optimizers of its steps.

    Those of a solver whose gradients are `steps_late` may be mended, and exact ones never are.
    """
    train = train or TrainSettings()
    module = placed(blocks.module(index), device)
    head = optimizers.output_weight(blocks.module(k) for k in range(len(blocks)))
    exact = optimizers.make_optimizer(module, optimizer, head, steps_late, total_steps)
    steps = {"exact": exact, "local": exact}
    if delay is not None and delay.mend == "extrapolate" and steps_late:
        steps["local"] = Extrapolation(exact.param_groups, exact, min(delay.cap, steps_late))
    if train.ema:
        weights = [p for group in exact.param_groups for p in group["params"]]
        steps["ema"] = Average(weights, train.ema)
    if train.compile:
        module.compile(dynamic=False)
    last = index == len(blocks) - 1
    return Block(
        module.train(),
        index,
        len(blocks),
        steps,
        device,
        getattr(torch, train.precision),
        cut_after=None if last else leading_projection(blocks.module(index + 1)),
        draws=Draws(train.seed, drawing, replica) if drawing else None,
    )


def placed(module: M, device: torch.device) -> M:
    """A module on a device, its convolutions of images channels_last."""
    module.to(device)
    for parameter in module.parameters():
        if parameter.dim() == 4:
            # not contiguous(): of one channel that keeps strides that say nothing
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return module
