"""Delayed gradients: DDG, Features Replay, FDG. Every block steps at every tick, none waits."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from solvers.base import (
    Batch,
    Block,
    GraphBytes,
    Links,
    PhaseStats,
    Solver,
    Window,
)
from solvers.blocks.clipping import clip_gradients, gradient_norms
from solvers.blocks.norms import frozen_statistics


@dataclass
class Flight:
    """A mini-batch that a block has handed up and whose gradient has yet to come back."""

    lam: Tensor | None = None
    """What its forward pass began with, if that is kept."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """What its backward pass needs besides, for a checkpoint."""
    out: Tensor | None = None
    """x_k with its graph, if that is kept."""


@dataclass
class Delayed(Solver):
    r"""At its n-th tick, block k

        lam_k = x_{k-1} of mini-batch n,   x_k = f_k(lam_k; w_k^n)             forward, sent up
        p_k = b (d x_k / d lam_k)^T p_{k+1}  of mini-batch n - d_k             backward, sent down
        w_k^{n+1} <- optimiser step with (d x_k / d w_k)^T p_{k+1} of that mini-batch

    where the delay d_k is fixed, so the result does not depend on timing. A tick has no other
    order than what these messages need; block K-1 has d = 0 and works as back-propagation does.
    K = 1 is back-propagation, bit for bit.

    d_k = K-1-k is as far as an adjoint comes when forward passes are locked: mini-batch n passes
    all blocks before any begins n+1. d_k = 2 (K-1-k) unlocks them: block k works on mini-batch n at
    tick n + k of the whole pipeline. The pipeline is drained at the end of an epoch and before a
    serial correction: the gradients in flight come back, no mini-batch goes up, none is lost.
    """

    standalone: ClassVar[bool] = True

    clip_norm: float = 0.0
    """Largest norm of one block's gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        if self.clip_norm < 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be 0 (off) or positive")

    def delay(self, index: int, count: int) -> int:
        """d_k in ticks of block k = `index` of K = `count`."""
        return count - 1 - index

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        return graph(module, lam) + self.delay(index, count) * tensor_bytes([lam])

    @property
    def shrink(self) -> float:
        """b, by which an adjoint shrinks at every hop."""
        return 1.0

    def prepare(self, block: Block, window_samples: int, exchanges: bool) -> None:
        """Begin with an empty pipeline."""
        self._flights: deque[Flight] = deque()
        self._inbox: deque[tuple[Tensor, ...]] = deque()
        self._ticks = 0
        self._rate = 0.0

    def train(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """A tick a mini-batch; the pipeline stays filled."""
        stats = PhaseStats()
        with stats.timed(links):
            for _, batch in window.recorded():
                self._rate = batch.learning_rate
                self._ticks += 1
                if block.last:
                    self._turn(block, links, batch, stats)
                else:
                    self._flights.append(
                        self._forward(block, links, self._arrived(block, links, batch))
                    )
                    if len(self._flights) > self.delay(block.index, block.count):
                        self._backward(block, links)
                stats.samples += len(batch)
                stats.steps += 1
        return stats

    def drain(self, block: Block, links: Links) -> None:
        while self._flights:
            self._backward(block, links)
        self._ticks = 0
        links.flush()

    def flight_state(self, block: Block, links: Links) -> dict[str, Tensor]:
        if self._ticks == 0:
            return {}
        while len(self._inbox) < self._on_the_way(block):
            self._inbox.append(self._take(links))
        rate = torch.tensor(self._rate, dtype=torch.float64)
        state = {"ticks": torch.tensor(self._ticks), "rate": rate}
        for i, flight in enumerate(self._flights):
            if flight.lam is not None:
                state[f"flight {i}.lam"] = flight.lam.detach()
            state |= {f"flight {i}.{name}": t.detach() for name, t in flight.kept.items()}
        for i, parts in enumerate(self._inbox):
            state |= {f"inbox {i}.{j}": part for j, part in enumerate(parts)}
        return state

    def load_flight_state(self, block: Block, state: dict[str, Tensor]) -> None:
        if not state:
            return
        self._ticks, self._rate = int(state["ticks"]), float(state["rate"])
        for i in range(min(self._ticks, self.delay(block.index, block.count))):
            kept = _part(state, f"flight {i}.")
            self._flights.append(self._again(block, kept.pop("lam", None), kept))
        for i in range(self._on_the_way(block)):
            self._inbox.append(tuple(_part(state, f"inbox {i}.").values()))

    def _on_the_way(self, block: Block) -> int:
        """Adjoints that the next block has sent and this one has not asked for."""
        if block.last:
            return 0
        mine, next_ = (self.delay(k, block.count) for k in (block.index, block.index + 1))
        return min(self._ticks, mine) - min(self._ticks, next_)

    def _arrived(self, block: Block, links: Links, batch: Batch) -> Tensor:
        return batch.images() if block.first else links.from_previous()

    @abstractmethod
    def _forward(self, block: Block, links: Links, lam: Tensor) -> Flight:
        """Hand x_k up; keep what the backward pass will need."""

    @abstractmethod
    def _again(self, block: Block, lam: Tensor | None, kept: dict[str, Tensor]) -> Flight:
        """A flight as a checkpoint has kept it."""

    @abstractmethod
    def _backward(self, block: Block, links: Links) -> None:
        """Bring the oldest flight home: its adjoint goes down, its gradient into a step."""

    def _turn(self, block: Block, links: Links, batch: Batch, stats: PhaseStats) -> None:
        """The last block's tick: forward, loss, backward, step."""
        lam = self._arrived(block, links, batch).detach().requires_grad_(not block.first)
        self._classified(block, block.forward(lam), batch, stats)
        if not block.first:
            self._hand_down(block, links, lam)
        self._step(block)

    def _classified(self, block: Block, out: Tensor, batch: Batch, stats: PhaseStats) -> None:
        labels = batch.labels()
        loss = block.loss(out, labels)
        stats.classified(out, labels)
        block.backward(loss)
        stats.losses.append(loss.detach())

    def _take(self, links: Links) -> tuple[Tensor, ...]:
        """One message of the next block."""
        return (links.from_next(),)

    def _adjoint(self, links: Links) -> tuple[Tensor, ...]:
        """The oldest message of the next block that has not been worked on."""
        return self._inbox.popleft() if self._inbox else self._take(links)

    def _hand_down(self, block: Block, links: Links, lam: Tensor) -> None:
        p_in = block.input_adjoint(lam)
        assert p_in is not None
        links.to_previous(p_in if self.shrink == 1.0 else self.shrink * p_in)

    def _step(self, block: Block) -> None:
        if self.clip_norm:
            block.unscale("local")
            gradients = block.gradients()
            clip_gradients(gradients, self.clip_norm, gradient_norms(gradients))
        block.step("local", self._rate)


@dataclass
class DDG(Delayed):
    r"""Decoupled parallel back-propagation with delayed gradients (Huo et al., arXiv 1804.10574).

    `Delayed` with d_k = K-1-k; the gradient of mini-batch n - d_k is taken at the weights its
    forward pass had, w_k^{n - d_k}, of which block k keeps d_k copies with their graphs.
    """

    name: ClassVar[str] = "ddg"

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        d = self.delay(index, count)
        return (d + 1) * graph(module, lam) + d * tensor_bytes(module.parameters())

    def _forward(self, block: Block, links: Links, lam: Tensor) -> Flight:
        weights = {n: p.detach().clone() for n, p in block.module.named_parameters()}
        flight = self._computed(block, lam, weights)
        assert flight.out is not None
        links.to_next(flight.out.detach())
        return flight

    def _computed(self, block: Block, lam: Tensor, weights: dict[str, Tensor]) -> Flight:
        lam = lam.detach().requires_grad_(not block.first)
        for name, parameter in block.module.named_parameters():
            weights[name].requires_grad_(parameter.requires_grad)
        with block.numbers():
            out = functional_call(block.module, weights, (lam,))
        return Flight(lam, weights, out)

    def _again(self, block: Block, lam: Tensor | None, kept: dict[str, Tensor]) -> Flight:
        assert lam is not None
        weights = {}
        for name, parameter in block.module.named_parameters():
            # the parameter's strides: of a single channel, layouts look alike and compute otherwise
            weights[name] = torch.empty_like(parameter, requires_grad=False).copy_(kept[name])
        with frozen_statistics(block.module):
            return self._computed(block, lam, weights)

    def _backward(self, block: Block, links: Links) -> None:
        flight = self._flights.popleft()
        (p_out,) = self._adjoint(links)
        assert flight.out is not None
        if flight.out.requires_grad:
            block.backward(flight.out, p_out)
        for name, parameter in block.module.named_parameters():
            parameter.grad = flight.kept[name].grad
        if not block.first:
            assert flight.lam is not None
            self._hand_down(block, links, flight.lam)
        self._step(block)


@dataclass
class FDG(DDG):
    r"""Fully decoupled training with delayed gradients (Zhuang et al., github ZHUANGHP/FDG).

    `DDG` with forward passes unlocked, d_k = 2 (K-1-k), and adjoints that shrink by b at every
    hop, since what comes from afar is older.
    """

    name: ClassVar[str] = "fdg"

    gradient_shrinking: float = 1.0
    """b, by which an adjoint is multiplied at every hop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gradient_shrinking <= 1:
            raise ValueError(
                f"gradient_shrinking is {self.gradient_shrinking}; it must lie in (0, 1]"
            )

    def delay(self, index: int, count: int) -> int:
        return 2 * super().delay(index, count)

    @property
    def shrink(self) -> float:
        return self.gradient_shrinking


@dataclass
class FeaturesReplay(Delayed):
    r"""Features Replay (Huo et al., arXiv 1807.04511).

    `Delayed` with d_k = K-1-k; a block keeps the inputs of d_k mini-batches, no graph and no
    weights. The backward pass replays mini-batch n - d_k at the newest weights w_k^n, and moves
    BatchNorm's running statistics, which the first forward pass leaves alone.
    """

    name: ClassVar[str] = "features-replay"

    def _forward(self, block: Block, links: Links, lam: Tensor) -> Flight:
        with torch.no_grad(), frozen_statistics(block.module):
            links.to_next(block.forward(lam))
        return Flight(lam)

    def _again(self, block: Block, lam: Tensor | None, kept: dict[str, Tensor]) -> Flight:
        return Flight(lam)

    def _backward(self, block: Block, links: Links) -> None:
        kept = self._flights.popleft().lam
        assert kept is not None
        lam = kept.detach().requires_grad_(not block.first)
        (p_out,) = self._adjoint(links)
        out = block.forward(lam)
        if out.requires_grad:
            block.backward(out, p_out)
        if not block.first:
            self._hand_down(block, links, lam)
        self._step(block)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries of that prefix, in order, without it."""

    def entries() -> Iterator[tuple[str, Tensor]]:
        for name in sorted(state):
            if name.startswith(prefix):
                yield name.removeprefix(prefix), state[name]

    return dict(entries())
