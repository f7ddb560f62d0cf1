"""Auxiliary networks: a small network per cut generates lam from the image (arXiv 2112.05387)."""

from dataclasses import dataclass
from math import log2, prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from hybrid.solvers.acting import Count, NotNegative, Positive, Share
from hybrid.solvers.base import Program, Setup, Shape, Solver, program_of
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.numerics.optimizer_state import from_tensors, optimizer_state, with_momentum
from hybrid.solvers.numerics.uncompiled import paired
from hybrid.solvers.splitting.penalty import couple_backward
from hybrid.solvers.state import State, Tensors, entries
from hybrid.solvers.windows import Batch, PhaseStats, Window

HASHED = 4096
"""Integers in a network's input are reduced modulo this number, and divided by it."""


@dataclass(frozen=True)
class AuxNet(Solver):
    r"""The splitting with lam_k = a_k(x; v_k), a small network for each cut; x is the input image.

    Local loss of block k < K-1, per sample, from its own lam_k (block K-1: phi):

        beta ||lam_{k+1} - x_k||^2

        p_out = -2 beta (lam_{k+1} - x_k)   (k < K-1),   d phi / d x   (k = K-1)
        w_k   <- optimizer step with (1/N) sum over samples of (d x_k / d w_k)^T p_out
        lam*  =  x_{k-1} - eta p_in,        eta = lam_step / (2 beta)
        v_k   <- Adam step on (1/N) sum over samples of 1/2 ||a_k(x; v_k) - lam*||^2

    lam_k is sent down and x_k up. lam* minimizes beta ||lam - x_{k-1}||^2 + lam_step <p_in, lam>.
    a_k gets the image, but not the label, so it learns E[p_in | x]: the part of p_in that the image
    determines. Only this part of the loss reaches the blocks before the cut. For the same reason a
    full step (lam_step 1) does not make lam diverge, although with a small beta it is 1000 p_in.

    No forward pass waits for another: all ranks start from the image at once. Nothing is stored
    per sample, so every sweep may use newly augmented images.

    With T_d for the data, T_f and T_b for the whole network's forward and backward pass, t_psi for
    the coupling and t_f, t_b for a_k's passes, the predicted speed-up of an epoch is

        rho(K) = (T_d + T_f + T_b) / (T_d + (T_f + T_b)/K + t_psi + t_f + t_b)
    """

    name: ClassVar[str] = "auxnet"
    steps_alike: ClassVar[bool] = False
    has_auxiliary_weights: ClassVar[bool] = True
    alternates: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"images"})

    beta: Positive = 5e-4
    """Coefficient of the coupling, for the squared norm of one sample."""
    lam_step: NotNegative = 1.0
    """Step size from x_{k-1} to the target lam*, in units of 1 / (2 beta)."""
    local_lr: Positive | None = None
    """Learning rate of local steps, relative to the schedule; unset: 0.1, or 1 uncorrected."""
    momentum: Share | None = 0.9
    """Momentum of a separate SGD for local steps; unset: the exact pass's optimizer."""
    width: Count = 16
    """Channels or features of the networks a_k."""
    depth: Count = 1
    """Layers of a_k; for images at least one 3 x 3 convolution per halving of the size."""
    aux_lr: Positive = 1e-3
    """Learning rate of v_k (Adam)."""

    def check(self, setup: Setup) -> None:
        for unit in setup.integer_cuts:
            raise ValueError(
                f"integers or booleans cross the cut before {unit}, and {self.name!r} would "
                "generate them: cut elsewhere by split.cuts, or choose another solver"
            )


@program_of(AuxNet)
class AuxNetProgram(Program):
    """One rank's block and, behind the first, its auxiliary network a_k."""

    solver: AuxNet

    def begin(self) -> None:
        solver, block = self.solver, self.block
        if solver.momentum is not None:
            block.optimizers["local"] = with_momentum(block.optimizers["exact"], solver.momentum)
        usual = 0.1 if self.setup.correct_every else 1.0
        self._local_lr = usual if solver.local_lr is None else solver.local_lr
        self._network: nn.Sequential | None = None
        self._saved: Tensors = {}
        """The tensors of a checkpoint, until the first images give the network's shape."""
        self._sweep = 0

    def train(self, window: Window) -> PhaseStats:
        """Sweep the window; losses, answers and residuals are the last sweep's."""
        stats = PhaseStats()
        with stats.timed(self.links), frozen_statistics(self.block.module):
            for self._sweep in range(window.sweeps):
                stats.losses, stats.correct, stats.squares, stats.exchanged = [], [], [], []
                stats.samples = 0
                for _, batch in window.sweep(self._sweep):
                    self._visit(batch, stats)
            self.links.flush()
        return stats

    def _visit(self, batch: Batch, stats: PhaseStats) -> None:
        block, links = self.block, self.links
        lam = images = batch.images()
        generated = None
        if not block.first:
            generated = self._generate(images)
            lam = generated.detach().requires_grad_()
            links.to_previous(generated.detach())
        x = block.forward(lam, (1, batch.step, self._sweep))
        if block.last:
            labels = batch.labels()
            result = block.compute_loss(x, labels, block.part_weight(batch, labels))
            block.backward(result.loss if batch.share == 1 else result.loss * batch.share)
            stats.count_loss(result)
        else:
            links.to_next(x.detach())
            lam_above = links.from_next()
            beta, size = self.solver.beta, batch.size
            coupling = couple_backward((), block, x, lam_above, None, beta, 1, size)
            stats.losses.append(coupling.loss / len(batch))
            stats.squares.append(coupling.squares)
        p_in = block.sample_adjoint(lam, batch.size)
        block.step("local", batch.learning_rate * self._local_lr)
        if generated is not None:
            assert p_in is not None
            squares = self._regress(links.from_previous(), generated, p_in, batch.size)
            stats.exchanged.append(squares)
        stats.samples += len(batch)
        stats.steps += 1

    def _regress(self, x: Tensor, lam: Tensor, p_in: Tensor, size: int) -> Tensor:
        """Step v_k towards lam*; return the squares of the residual and of the change."""
        residual = lam.detach() - x.to(lam.dtype)
        eta = self.solver.lam_step / (2 * self.solver.beta)
        pull = residual + eta * p_in  # lam - lam*
        paired(lam, pull / size).backward()
        self.block.step("auxiliary", self.solver.aux_lr)
        squares = [torch.sum(residual.square()), torch.sum((2 * self.solver.beta * pull).square())]
        return torch.stack(squares)

    def _generate(self, images: Tensor) -> Tensor:
        if not images.is_floating_point():  # such as token ids
            images = (images % HASHED / HASHED).to(self.block.formats[0])
        if self._network is None:
            self._network = self._make_network(images)
        generated: Tensor = self._network(images)
        return generated

    def _make_network(self, images: Tensor) -> nn.Sequential:
        """Build a_k, with weights and optimizer state from the checkpoint if there is one.

        ValueError if these belong to another a_k.
        """
        solver, block = self.solver, self.block
        cut = self.setup.shape_before(block.index)
        assert cut is not None
        shape = tuple(images.shape[1:])
        network = auxiliary_network(shape, cut, solver.width, solver.depth, block.index)
        network.to(block.device, images.dtype)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._adam = torch.optim.Adam(network.parameters(), lr=solver.aux_lr)
        block.optimizers["auxiliary"] = self._adam
        block.rates["auxiliary"] = 1.0
        saved, self._saved = self._saved, {}
        if not saved:
            return network
        weights, new = entries(saved, "weights."), network.state_dict()
        if {k: v.shape for k, v in new.items()} != {k: v.shape for k, v in weights.items()}:
            raise ValueError(
                f"the checkpoint's auxiliary network is not of width {solver.width} and depth "
                f"{solver.depth}: resume with the solver.width and solver.depth of its run"
            )
        network.load_state_dict(weights)
        for i, p in enumerate(network.parameters()):
            if slots := entries(saved, f"adam.{i}."):
                self._adam.state[p] = from_tensors(optimizer_state(self._adam, p), slots)
        return network

    def state(self) -> State:
        if self._network is None:
            return State(cut=dict(self._saved))
        tensors = {f"weights.{k}": v for k, v in self._network.state_dict().items()}
        for index, slots in self._adam.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{slot}": value for slot, value in slots.items()}
        return State(cut=tensors)

    def load_state(self, state: State) -> None:
        self._network, self._saved = None, dict(state.cut)


def auxiliary_network(shape: Shape, cut: Shape, width: int, depth: int, seed: int) -> nn.Sequential:
    """Build a_k from an input to the tensor at a cut; both shapes are a sample's.

    From images (C, H, W) to images or vectors it has convolutions, BatchNorm and ReLU, first with
    stride 2 until the size fits, then average pooling. Other inputs are flattened and go through
    linear layers. The weights depend on `seed` only.
    """
    if len(shape) == 3 and len(cut) in (1, 3):
        layers = _convolutions(shape, cut, width, depth)
    else:
        layers = [nn.Flatten()]
        features = prod(shape)
        for _ in range(depth):
            layers += [skip_init(nn.Linear, features, width), nn.ReLU()]
            features = width
        layers += [skip_init(nn.Linear, features, prod(cut)), nn.Unflatten(1, cut)]
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def _convolutions(image: Shape, cut: Shape, width: int, depth: int) -> list[nn.Module]:
    halvings = max(0, round(log2(image[1] / cut[1]))) if len(cut) == 3 else 2
    layers: list[nn.Module] = []
    channels = image[0]
    for number in range(max(depth, halvings)):
        stride = 2 if number < halvings else 1
        convolution = skip_init(nn.Conv2d, channels, width, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    layers.append(nn.AdaptiveAvgPool2d(cut[1:] if len(cut) == 3 else 1))
    layers.append(skip_init(nn.Conv2d, channels, cut[0], 1))
    return [*layers, nn.Flatten()] if len(cut) == 1 else layers
