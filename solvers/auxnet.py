"""Auxiliary-variable networks: lam generated from the image, not stored (arXiv 2112.05387)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from solvers.base import (
    Batch,
    Block,
    Links,
    PhaseStats,
    Recorder,
    Rows,
    Shape,
    Solver,
    Window,
)
from solvers.blocks.norms import frozen_statistics
from solvers.kernels import couple


@dataclass
class AuxNet(Solver):
    r"""Penalty splitting with lam_k = a_k(x; v_k), a small network a cut, x the augmented image.

    Block k trains on  beta ||lam_{k+1} - x_k||^2  (k < K-1) or phi (k = K-1), from its own lam_k:

        p_out = -2 beta (lam_{k+1} - x_k)   (k < K-1),   d phi / d x   (k = K-1)
        w_k   <- optimiser step with (1/N) sum over samples of (d x_k / d w_k)^T p_out
        lam*  =  x_{k-1} - eta p_in,        eta = lam_step / (2 beta)
        v_k   <- Adam step on (1/N) sum over samples of 1/2 ||a_k(x; v_k) - lam*||^2

    lam* minimises beta ||lam - x_{k-1}||^2 + lam_step <p_in, lam>; lam_step is small, as p_in is
    no guide where a_k is far from x_{k-1}. No forward pass waits for another: all ranks start from
    the image at once. A mini-batch sends lam_k to the block before and x_k to the block behind.
    Nothing is stored per sample, so every sweep may see newly augmented images.

    With T_d for the data, T_f and T_b for the whole network's forward and backward pass, t_psi for
    the coupling and t_f, t_b for a_k's passes, the predicted speed-up of an epoch is

        rho(K) = (T_d + T_f + T_b) / (T_d + (T_f + T_b)/K + t_psi + t_f + t_b)
    """

    name: ClassVar[str] = "auxnet"
    needs_images: ClassVar[bool] = True

    beta: float = 5e-4
    """Penalty coefficient, of the squared norm over one sample's C, H, W."""
    lam_step: float = 0.1
    """Step of the wanted lam*, in units of 1 / (2 beta)."""
    local_lr: float = 0.1
    """Learning rate of the blocks in the parallel phase, relative to the schedule's."""
    momentum: float | None = 0.9
    """Momentum of the blocks' own SGD in the parallel phase; unset: the exact pass's optimiser."""
    width: int = 16
    """Channels of the networks a_k."""
    depth: int = 1
    """Convolutions of 3 x 3 in a_k; at least one for every halving of the image."""
    aux_lr: float = 1e-3
    """Learning rate of v_k (Adam)."""

    def __post_init__(self) -> None:
        for name in ("beta", "local_lr", "aux_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.lam_step < 0:
            raise ValueError(f"lam_step is {self.lam_step}; it must be 0 or positive")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it must lie in [0, 1)")
        for name in ("width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def prepare(self, block: Block, window_samples: int, exchanges: bool) -> None:
        if self.momentum is not None:
            block.own_sgd(self.momentum)
        self._index, self._device = block.index, block.device
        self._shape: Shape | None = None
        self._network: nn.Module | None = None

    @property
    def recorder(self) -> Recorder:
        return self

    def record(
        self,
        rows: slice,
        lam: Tensor | None,
        p_in: Tensor | None,
        out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        """Keep nothing but the shape at the cut."""
        if lam is not None:
            self._shape = tuple(lam.shape[1:])

    def carried_input(self, rows: Rows) -> Tensor | None:
        return None

    def train(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """Sweep the window; losses, answers and residuals are the last sweep's."""
        stats = PhaseStats()
        with stats.timed(links), frozen_statistics(block.module):
            for number in range(window.sweeps):
                stats.losses, stats.correct, stats.squares, stats.exchanged = [], [], [], []
                stats.samples = 0
                for _, batch in window.sweep(number):
                    self._visit(block, links, batch, stats)
            links.flush()
        return stats

    def _visit(self, block: Block, links: Links, batch: Batch, stats: PhaseStats) -> None:
        images = batch.images()
        generated = None
        if block.first:
            lam = images
        else:
            generated = self._generate(images)
            lam = generated.detach().requires_grad_()
            links.to_previous(generated.detach())
        x = block.forward(lam)
        if block.last:
            labels = batch.labels()
            loss = block.loss(x, labels)
            block.backward(loss)
            stats.classified(x, labels)
            stats.losses.append(loss.detach())
        else:
            links.to_next(x.detach())
            lam_above, samples = links.from_next(), len(batch) / block.loss_scale
            coupling = couple(x.detach(), lam_above, None, self.beta, samples=samples)
            x.backward(coupling.p_out)
            stats.losses.append(coupling.loss / len(batch))
            stats.squares.append(coupling.squares)
        p_in = block.sample_adjoint(lam)
        block.step("local", batch.learning_rate * self.local_lr)
        if generated is not None:
            assert p_in is not None
            self._regress(links.from_previous(), generated, p_in, stats)
        stats.samples += len(batch)
        stats.steps += 1

    def _regress(self, x: Tensor, lam: Tensor, p_in: Tensor, stats: PhaseStats) -> None:
        """One step of v_k towards lam*."""
        residual = lam.detach() - x.to(lam.dtype)
        eta = self.lam_step / (2 * self.beta)
        pull = residual + eta * p_in  # lam - lam*
        lam.backward(pull / len(pull))
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        squares = [torch.sum(residual.square()), torch.sum((2 * self.beta * pull).square())]
        stats.exchanged.append(torch.stack(squares))

    def _generate(self, images: Tensor) -> Tensor:
        if self._network is None:
            assert self._shape is not None
            self._make(tuple(images.shape[1:]), self._shape, images.dtype)
        assert self._network is not None
        generated: Tensor = self._network(images)
        return generated

    def _make(self, image: Shape, cut: Shape, dtype: torch.dtype) -> None:
        made = auxiliary_network(image, cut, self.width, self.depth, seed=self._index)
        self._network = made.to(self._device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._shapes = image, cut
        self._adam = torch.optim.Adam(made.parameters(), lr=self.aux_lr)

    def cut_state(self) -> dict[str, Tensor]:
        if self._network is None:
            return {}
        names = ("shape.image", "shape.cut")
        tensors = {k: torch.tensor(v) for k, v in zip(names, self._shapes, strict=True)}
        tensors |= {f"weights.{k}": v for k, v in self._network.state_dict().items()}
        for index, slots in self._adam.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{slot}": value for slot, value in slots.items()}
        return tensors

    def load_cut_state(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        """Take back v_k and its optimiser's state; ValueError if they are of another a_k."""
        if not before:
            return
        image, cut = (tuple(before[f"shape.{name}"].tolist()) for name in ("image", "cut"))
        weights = {k[8:]: v for k, v in before.items() if k.startswith("weights.")}
        self._make(image, cut, weights["0.weight"].dtype)
        assert self._network is not None
        made = self._network.state_dict()
        if {k: v.shape for k, v in made.items()} != {k: v.shape for k, v in weights.items()}:
            depth = sum(v.dim() == 4 for v in weights.values()) - 1
            raise ValueError(
                f"the checkpoint's auxiliary network is not of width {self.width} and depth "
                f"{self.depth}: resume with solver.width={len(weights['0.weight'])} and "
                f"solver.depth={depth}"
            )
        self._network.load_state_dict(weights)
        parameters = list(self._network.parameters())
        for key, value in before.items():
            kind, _, rest = key.partition(".")
            if kind == "adam":
                index, slot = rest.split(".")
                parameter = parameters[int(index)]
                if value.dim():
                    value = torch.empty_like(parameter, requires_grad=False).copy_(value)
                self._adam.state[parameter][slot] = value


def auxiliary_network(image: Shape, cut: Shape, width: int, depth: int, seed: int) -> nn.Sequential:
    """a_k from images (C, H, W) to a cut's (C', H', W') or (C',): convolutions, BatchNorm, ReLU.

    Convolutions of stride 2 come first until the size fits; what remains is averaged. The weights
    are a function of `seed` alone.
    """
    size = cut[1] if len(cut) == 3 else 1
    halvings = max(0, round(log2(image[1] / size))) if len(cut) == 3 else 2
    layers: list[nn.Module] = []
    channels = image[0]
    for number in range(max(depth, halvings)):
        stride = 2 if number < halvings else 1
        layers += [
            skip_init(nn.Conv2d, channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
    layers.append(nn.AdaptiveAvgPool2d(cut[1:] if len(cut) == 3 else 1))
    layers.append(skip_init(nn.Conv2d, channels, cut[0], 1))
    if len(cut) == 1:
        layers.append(nn.Flatten())
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)
