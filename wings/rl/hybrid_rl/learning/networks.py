"""Dense blocks, and the critics and the policy that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LEAST_LOG_STD, _MOST_LOG_STD = -20.0, 2.0


class Dense(nn.Module):
    """Dense blocks: y = [g(W x + b), x], so that every layer sees all before it, and the input.

    g is swish(BN(.)), as in OFENet (arXiv 2003.01629), or relu, as in the wide networks of
    arXiv 2102.07920. (N, inputs) -> (N, inputs + the sum of units).
    """

    def __init__(self, inputs: int, units: Sequence[int], normalized: bool = False) -> None:
        super().__init__()
        sizes = [inputs + sum(units[:i]) for i in range(len(units) + 1)]
        self.outputs = sizes[-1]
        pairs = zip(sizes, units, strict=False)
        self.layers = nn.ModuleList(nn.Linear(size, own) for size, own in pairs)
        # eps as the paper's TensorFlow has it
        norms = (nn.BatchNorm1d(own, eps=1e-3) for own in (units if normalized else ()))
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            y = F.silu(self.norms[i](y)) if self.norms else F.relu(y)
            x = torch.cat([y, x], 1)
        return x


class Head(nn.Module):
    """Two dense layers of `width` units, and a linear one: a critic, or what a policy needs."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.dense = Dense(inputs, [width, width])
        self.last = nn.Linear(self.dense.outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dense(x))
        return out


class Policy(nn.Module):
    """a = tanh(u), u ~ N(mu(z_s), sigma(z_s)^2), an action within -1..1 (arXiv 1812.05905).

    log pi(a | s) = sum_i  log N(u_i; mu_i, sigma_i^2) - log(1 - tanh(u_i)^2)
    """

    def __init__(self, inputs: int, width: int, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.head = Head(inputs, width, 2 * actions)

    def forward(self, z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (N, actions) for standard normal noise, and log pi (N, 1)."""
        mean, log_std = self.head(z).chunk(2, 1)
        log_std = log_std.clamp(_LEAST_LOG_STD, _MOST_LOG_STD)
        u = mean + log_std.exp() * noise
        normal = -0.5 * noise**2 - log_std - 0.5 * log(2 * torch.pi)
        # log(1 - tanh(u)^2), without a logarithm of nearly nothing
        squashed = 2 * (log(2) - u - F.softplus(-2 * u))
        return torch.tanh(u), (normal - squashed).sum(1, keepdim=True)

    def best(self, z: Tensor) -> Tensor:
        """tanh(mu), (N, actions)."""
        return torch.tanh(self.head(z).chunk(2, 1)[0])


def flat(*modules: nn.Module) -> Tensor:
    """One vector with a copy of all numbers that forward passes in evaluation mode use."""
    return torch.cat([t.detach().reshape(-1) for t in _numbers(modules)])


@torch.no_grad()
def fill(vector: Tensor, *modules: nn.Module) -> None:
    """Copy a vector made by `flat` into modules of the same shapes."""
    tensors = _numbers(modules)
    for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _numbers(modules: Sequence[nn.Module]) -> list[Tensor]:
    found = (t for module in modules for t in module.state_dict().values())
    return [t for t in found if t.is_floating_point()]
