"""Auxiliary heads: small classifiers that give a block inside the network a local loss."""

import re
from typing import Annotated

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Allowed
from hybrid.solvers.base import Shape
from hybrid.solvers.block import Block
from hybrid.solvers.numerics.optimizer_state import (
    clone_optimizer,
    from_tensors,
    optimizer_state,
    to_tensors,
)
from hybrid.solvers.state import entries

LINEAR, MLP = "linear", "mlp"


HeadKind = Annotated[
    str,
    Allowed(
        "be linear, or mlp:WIDTH as in mlp:128",
        lambda kind: kind == LINEAR or re.fullmatch(rf"{MLP}:[1-9][0-9]{{0,4}}", kind) is not None,
    ),
]


def sizes(shape: Shape, output: Shape, convolves: bool) -> tuple[int, int]:
    """Features and classes of a head from x_k to the network's output; both shapes are a sample's.

    ValueError for outputs other than vectors of classes or values, one or one for each token.
    """
    tokens = len(shape) == 2 and not convolves
    features = shape[-1] if tokens else shape[0]
    if len(output) < 2:
        return features, output[0] if output else 1
    if tokens and len(output) == 2 and shape[0] in output:
        return features, output[1] if output[0] == shape[0] else output[0]
    raise ValueError(
        f"no auxiliary head makes an output of shape {output} of a block's {shape}: choose another "
        "solver, or a network with a vector, or one for every token, as its output"
    )


def convolves(module: nn.Module) -> bool:
    """Whether its output has features before positions, (N, C, T) in place of (N, T, C)."""
    return any(isinstance(part, nn.Conv1d) for part in module.modules())


class Head:
    """Pooling and a linear layer, or two with WIDTH features and a ReLU between, and an optimizer.

    The pooling depends on the rank of x_k. Images (N, C, H, W) and signals (N, C, T) are averaged
    over positions, and vectors (N, C) are not pooled. Tokens (N, T, C) go through the layers one by
    one, and the mean of the results is taken unless the network has an output for every token,
    (N, T, classes) or (N, classes, T).
    """

    def __init__(self, kind: str, block: Block, shape: Shape, output: Shape) -> None:
        self.shape, self.output = shape, output
        self.tokens = len(shape) == 2 and not convolves(block.module)
        channels, classes = sizes(shape, output, not self.tokens)
        # the same in every run, without a draw from the generator that other threads use
        random = torch.Generator().manual_seed(1 + block.index)
        width = channels if kind == LINEAR else int(kind.partition(":")[2])
        layers = [] if kind == LINEAR else [_linear(channels, width, random), nn.ReLU()]
        self.module = nn.Sequential(*layers, _linear(width, classes, random))
        self.module.to(block.device, block.formats[-1])
        self.optimizer = _optimizer_like(block.optimizers["exact"], self.module)
        block.companions["local"] = self.optimizer

    def __call__(self, block: Block, x: Tensor) -> Tensor:
        """A prediction of the network's output (N, ...) from x (N, ...)."""
        for_each_token = self.tokens and len(self.output) > 1
        with block.numbers():
            if not self.tokens and x.dim() > 2:
                x = x.mean(dim=tuple(range(2, x.dim())))
            logits: Tensor = self.module(x)
            if self.tokens and not for_each_token:
                logits = logits.mean(1)
        if not for_each_token:
            logits = logits.reshape(len(x), *self.output)
        elif self.output[0] != self.shape[0]:  # of as many tokens as x has, which may vary
            logits = logits.transpose(1, 2)
        return logits.float() if block.precision is not torch.float32 else logits

    def state(self) -> dict[str, Tensor]:
        saved = {"shape": torch.tensor(self.shape), "output": torch.tensor(self.output)}
        saved |= {f"head.{name}": tensor for name, tensor in self.module.state_dict().items()}
        for i, slots in self.optimizer.state_dict()["state"].items():
            saved |= {f"optimizer {i} {k}": t for k, t in to_tensors(slots).items()}
        return saved

    @classmethod
    def of_state(cls, kind: str, block: Block, state: dict[str, Tensor]) -> "Head":
        head = cls(kind, block, tuple(state["shape"].tolist()), tuple(state["output"].tolist()))
        head.module.load_state_dict(entries(state, "head."))
        parameters = [p for group in head.optimizer.param_groups for p in group["params"]]
        for i, parameter in enumerate(parameters):
            if slots := entries(state, f"optimizer {i} "):
                model = optimizer_state(head.optimizer, parameter)
                head.optimizer.state[parameter] = from_tensors(model, slots)
        return head


def _optimizer_like(exact: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """One with the same settings; biases decay if one-dimensional parameters do there."""
    decays = [group.get("weight_decay", 0.0) for group in exact.param_groups]
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": max(decays)},
        {"params": [p for p in module.parameters() if p.ndim <= 1], "weight_decay": min(decays)},
    ]
    # the last group is that of vectors, which a matrix may be stepped like, and not the other way
    return clone_optimizer(exact, [exact.param_groups[-1] | group for group in groups])


def _linear(inputs: int, outputs: int, random: torch.Generator) -> nn.Module:
    """A linear layer with torch's initialization, drawn from this generator."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = inputs**-0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=random)
    return layer
