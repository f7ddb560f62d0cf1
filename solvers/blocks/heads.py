"""Auxiliary heads: small classifiers that give a block in mid-network a loss of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from solvers.blocks.block import Block
from solvers.state import entries

LINEAR, MLP = "linear", "mlp"


def check(kind: str) -> None:
    """ValueError unless `kind` is "linear" or "mlp:WIDTH"."""
    if kind != LINEAR and not re.fullmatch(rf"{MLP}:[1-9][0-9]{{0,4}}", kind):
        raise ValueError(f"head is {kind!r}; write linear, or mlp:WIDTH as in mlp:128")


class Head:
    """Pooling and a linear layer, or a layer of WIDTH and ReLU between, with its own optimiser."""

    def __init__(self, kind: str, block: Block, channels: int, classes: int) -> None:
        # the same on every launch, and no draw from the generator that other threads use
        random = torch.Generator().manual_seed(1 + block.index)
        width = channels if kind == LINEAR else int(kind.partition(":")[2])
        layers = [] if kind == LINEAR else [_linear(channels, width, random), nn.ReLU()]
        self.module = nn.Sequential(*layers, _linear(width, classes, random))
        self.module.to(block.device, block.dtype)
        self.optimiser = _optimiser_like(block.optimisers["exact"], self.module)
        block.companions["local"] = self.optimiser
        self.sizes = (channels, classes)

    def __call__(self, block: Block, x: Tensor) -> Tensor:
        """Logits (N, classes) of x (N, C, H, W) or (N, C)."""
        with block.numbers():
            pooled = x.mean(dim=tuple(range(2, x.dim()))) if x.dim() > 2 else x
            logits: Tensor = self.module(pooled)
        return logits.float() if block.precision is not torch.float32 else logits

    def state(self) -> dict[str, Tensor]:
        found = {"sizes": torch.tensor(self.sizes)}
        found |= {f"head.{name}": tensor for name, tensor in self.module.state_dict().items()}
        for i, kept in self.optimiser.state_dict()["state"].items():
            found |= {f"optimiser {i} {k}": t for k, t in kept.items() if torch.is_tensor(t)}
        return found

    @classmethod
    def of_state(cls, kind: str, block: Block, state: dict[str, Tensor]) -> Head:
        """The head that gave `state`."""
        channels, classes = state["sizes"].tolist()
        made = cls(kind, block, channels, classes)
        made.module.load_state_dict(entries(state, "head."))
        kept: dict[int, dict[str, Tensor]] = {}
        for key, tensor in entries(state, "optimiser ").items():
            i, name = key.split(" ")
            kept.setdefault(int(i), {})[name] = tensor.clone()
        made.optimiser.load_state_dict({**made.optimiser.state_dict(), "state": kept})
        return made


def _optimiser_like(exact: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """One of the same settings; biases decay if one-dimensional parameters do there."""
    decays = [group["weight_decay"] for group in exact.param_groups]
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": max(decays)},
        {"params": [p for p in module.parameters() if p.ndim <= 1], "weight_decay": min(decays)},
    ]
    kind: Callable[[Any], torch.optim.Optimizer] = type(exact)
    return kind([exact.param_groups[0] | group for group in groups])


def _linear(inputs: int, outputs: int, random: torch.Generator) -> nn.Module:
    """A linear layer as torch starts it, from this generator."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = inputs**-0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=random)
    return layer
