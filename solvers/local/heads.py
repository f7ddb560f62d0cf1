"""Auxiliary heads: small networks that give a block inside the network a local loss."""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybrid.solvers.acting import Allowed
from hybrid.solvers.base import Shape
from hybrid.solvers.block import Block
from hybrid.solvers.named import is_reference, load_object, made_by_user
from hybrid.solvers.numerics.draws import Drawing, Key
from hybrid.solvers.numerics.optimizer_state import (
    clone_optimizer,
    from_tensors,
    optimizer_state,
    to_tensors,
)
from hybrid.solvers.state import entries

LINEAR, MLP = "linear", "mlp"
NUMBER = 3
"""Distinguishes the random numbers of heads from those of a network's units."""


HeadKind = Annotated[
    str,
    Allowed(
        "be linear, mlp:WIDTH as in mlp:128, or your package.module:function",
        lambda kind: kind == LINEAR or is_reference(kind) or _width(kind) > 0,
    ),
]


def _width(kind: str) -> int:
    """WIDTH of mlp:WIDTH; 0 for other kinds."""
    form, _, width = kind.partition(":")
    return int(width) if form == MLP and width.isdecimal() and len(width) < 6 else 0


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


class Pooled(nn.Module):
    """Pooling and a linear layer, or two with WIDTH features and a ReLU between.

    The pooling depends on the rank of x_k. Images (N, C, H, W) and signals (N, C, T) are averaged
    over positions, and vectors (N, C) are not pooled. Tokens (N, T, C) go through the layers one by
    one, and the mean of the results is taken unless the network has an output for every token,
    (N, T, classes) or (N, classes, T).
    """

    def __init__(self, kind: str, shape: Shape, output: Shape, tokens: bool) -> None:
        channels, classes = sizes(shape, output, not tokens)
        width = _width(kind) or channels
        layers = [] if kind == LINEAR else [nn.Linear(channels, width), nn.ReLU()]
        super().__init__()
        self.layers = nn.Sequential(*layers, nn.Linear(width, classes))
        self.shape, self.output, self.tokens = shape, output, tokens

    def forward(self, x: Tensor) -> Tensor:
        """A prediction of the network's output (N, ...) from x (N, ...)."""
        for_each_token = self.tokens and len(self.output) > 1
        if not self.tokens and x.dim() > 2:
            x = x.mean(dim=tuple(range(2, x.dim())))
        logits: Tensor = self.layers(x)
        if self.tokens and not for_each_token:
            logits = logits.mean(1)
        if not for_each_token:
            return logits.reshape(len(x), *self.output)
        # of as many tokens as x has, which may vary
        return logits.transpose(1, 2) if self.output[0] != self.shape[0] else logits


class Head:
    """A block's head and its optimizer, the same in every run: g(x_k; v_k).

    It is `Pooled`, or what the user's function(index, shape, output) makes: a module from x_k (N,
    *shape) of block `index` to a prediction of the network's output (N, *output), in training mode.
    Its random numbers depend on the seed, the step and the block alone.
    """

    def __init__(self, kind: str, block: Block, shape: Shape, output: Shape, seed: int = 0) -> None:
        self.shape, self.output, self.seed = shape, output, seed
        self.draws, self.module = False, nn.Module()
        with Drawing((seed, NUMBER, block.index)):
            if is_reference(kind):
                function = load_object(kind, "solver.head=")
                self.module = made_by_user(
                    f"solver.head={kind} of block {block.index}",
                    lambda: function(block.index, shape, output),
                    nn.Module,
                )
            else:
                tokens = len(shape) == 2 and not convolves(block.module)
                self.module = Pooled(kind, shape, output, tokens)
        self.module.to(block.device, block.formats[-1]).train()
        if is_reference(kind):
            self._try(kind, block)
        self.optimizer = _optimizer_like(block.optimizers["exact"], self.module)
        block.companions["local"] = self.optimizer

    def _try(self, kind: str, block: Block) -> None:
        """ValueError unless the head makes the network's output; sees whether it draws numbers."""
        x = torch.zeros(2, *self.shape, device=block.device, dtype=block.formats[-1])
        buffers = [(b, b.clone()) for b in self.module.buffers() if not is_lazy(b)]
        with torch.no_grad(), block.numbers(), Drawing((self.seed,)) as drawing:
            what = f"solver.head={kind} of block {block.index}"
            out = made_by_user(what, lambda: self.module(x), Tensor)
        for buffer, before in buffers:
            buffer.copy_(before)
        self.draws = drawing.drew
        if out.shape != (2, *self.output):
            raise ValueError(
                f"solver.head={kind} of block {block.index} makes an output of shape "
                f"{tuple(out.shape[1:])}, and the network one of {tuple(self.output)}: the head "
                "must make the same"
            )

    def __call__(self, block: Block, x: Tensor, key: Key = ()) -> Tensor:
        """A prediction of the network's output (N, ...) from x (N, ...)."""
        with block.numbers():
            if self.draws:
                replica = block.sync.peers.replica if block.sync is not None else 0
                with Drawing((self.seed, *key, NUMBER, block.index, replica)):
                    logits: Tensor = self.module(x)
            else:
                logits = self.module(x)
        return logits.float() if block.precision is not torch.float32 else logits

    def state(self) -> dict[str, Tensor]:
        saved = {"shape": torch.tensor(self.shape), "output": torch.tensor(self.output)}
        saved |= {f"head.{name}": tensor for name, tensor in self.module.state_dict().items()}
        for i, slots in self.optimizer.state_dict()["state"].items():
            saved |= {f"optimizer {i} {k}": t for k, t in to_tensors(slots).items()}
        return saved

    @classmethod
    def of_state(cls, kind: str, block: Block, state: dict[str, Tensor], seed: int = 0) -> "Head":
        shape, output = (tuple(state[each].tolist()) for each in ("shape", "output"))
        head = cls(kind, block, shape, output, seed)
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
