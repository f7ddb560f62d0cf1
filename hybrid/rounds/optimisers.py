"""The optimiser of a block's exact steps."""

from __future__ import annotations

import torch
from torch import nn

from hybrid.settings.config import OptimiserSettings

SLOTS: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
}
"""What an optimiser keeps of each parameter."""


def make(module: nn.Module, settings: OptimiserSettings) -> torch.optim.Optimizer:
    """SGD or AdamW over a block; biases and BatchNorm parameters decay only if asked to."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    # an optimiser needs a parameter, and a block may have none
    parameters = parameters or [nn.Parameter(torch.zeros(0, 0))]
    plain = [p for p in parameters if p.ndim <= 1 and not settings.decay_all]
    decaying = [p for p in parameters if p.ndim > 1 or settings.decay_all]
    kinds = (decaying, settings.weight_decay), (plain, 0.0)
    groups = [{"params": own, "weight_decay": decay} for own, decay in kinds if own]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.momentum, 0.999))
    nesterov = settings.nesterov and settings.momentum > 0
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov)
