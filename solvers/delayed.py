"""Delayed gradients: DDG, Features Replay, FDG. Every block steps at every tick, none waits."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from solvers.base import GraphBytes, Program, Solver, check_numbers, program_of
from solvers.blocks.draws import Key
from solvers.blocks.norms import frozen_statistics
from solvers.state import State, Tensors, entries
from solvers.windows import Batch, PhaseStats, Window


@dataclass
class Flight:
    """A mini-batch that a block has handed up and whose gradient has yet to come back."""

    step: int
    """Of its mini-batch."""
    lam: Tensor | None = None
    """What its forward pass began with, if that is needed again."""
    stash: Tensors = field(default_factory=dict)
    """What its backward pass needs besides, for a checkpoint."""
    out: Tensor | None = None
    """x_k with its graph, if that is stashed."""

    @property
    def key(self) -> Key:
        """Of its draws."""
        return (0, self.step, 0)


@dataclass(frozen=True)
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

    clip_norm: float = 0.0
    """Largest norm of one block's gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        check_numbers(self, not_negative=("clip_norm",))

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


class DelayedProgram(Program):
    """One rank's ticks, and its flights: what it has handed up and not got back."""

    solver: Delayed

    def begin(self) -> None:
        solver, block = self.solver, self.block
        self._delay = solver.delay(block.index, block.count)
        self._flights: deque[Flight] = deque()
        self._inbox: deque[tuple[Tensor, ...]] = deque()
        self._ticks = 0
        self._rate = 0.0

    def train(self, window: Window) -> PhaseStats:
        """A tick a mini-batch; the pipeline stays filled."""
        stats = PhaseStats()
        with stats.timed(self.links.now):
            for _, batch in window.recorded():
                self._rate = batch.learning_rate
                self._ticks += 1
                if self.block.last:
                    self._last_tick(batch, stats)
                else:
                    self._flights.append(self._forward(self._arrived(batch), batch.step))
                    if len(self._flights) > self._delay:
                        self._backward(self._flights.popleft())
                stats.samples += len(batch)
                stats.steps += 1
        return stats

    def drain(self) -> None:
        while self._flights:
            self._backward(self._flights.popleft())
        self._ticks = 0
        self.links.flush()

    def state(self) -> State:
        if self._ticks == 0:
            return State()
        while len(self._inbox) < self._on_the_way():
            self._inbox.append(self._take())
        rate = torch.tensor(self._rate, dtype=torch.float64)
        state = {"ticks": torch.tensor(self._ticks), "rate": rate}
        for i, flight in enumerate(self._flights):
            state[f"flight {i}.step"] = torch.tensor(flight.step)
            if flight.lam is not None:
                state[f"flight {i}.lam"] = flight.lam.detach()
            state |= {f"flight {i}.{name}": t.detach() for name, t in flight.stash.items()}
        for i, parts in enumerate(self._inbox):
            state |= {f"inbox {i}.{j}": part for j, part in enumerate(parts)}
        return State(flight=state)

    def load_state(self, state: State) -> None:
        found = state.flight
        if not found:
            return
        self._ticks, self._rate = int(found["ticks"]), float(found["rate"])
        for i in range(min(self._ticks, self._delay)):
            stash = entries(found, f"flight {i}.")
            step = int(stash.pop("step"))
            self._flights.append(self._again(Flight(step, stash.pop("lam", None), stash)))
        for i in range(self._on_the_way()):
            self._inbox.append(tuple(entries(found, f"inbox {i}.").values()))

    def _on_the_way(self) -> int:
        """Adjoints that the next block has sent and this one has not asked for."""
        if self.block.last:
            return 0
        next_ = self.solver.delay(self.block.index + 1, self.block.count)
        return min(self._ticks, self._delay) - min(self._ticks, next_)

    def _arrived(self, batch: Batch) -> Tensor:
        return batch.images() if self.block.first else self.links.from_previous()

    @abstractmethod
    def _forward(self, lam: Tensor, step: int) -> Flight:
        """Hand x_k up; keep what the backward pass will need."""

    def _again(self, flight: Flight) -> Flight:
        """A flight as a checkpoint has kept it, ready for its backward pass."""
        return flight

    @abstractmethod
    def _backward(self, flight: Flight) -> None:
        """Bring a flight home: its adjoint goes down, its gradient into a step."""

    def _last_tick(self, batch: Batch, stats: PhaseStats) -> None:
        """The last block's tick: forward, loss, backward, step."""
        lam = self._leaf(self._arrived(batch))
        found = self.block.classify(self.block.forward(lam, (0, batch.step, 0)), batch.labels())
        self.block.backward(found.loss)
        stats.classified(found)
        self._finish(lam)

    def _leaf(self, lam: Tensor | None) -> Tensor:
        assert lam is not None
        return lam.detach().requires_grad_(not self.block.first)

    def _take(self) -> tuple[Tensor, ...]:
        """One message of the next block."""
        return (self.links.from_next(),)

    def _adjoint(self) -> tuple[Tensor, ...]:
        """The oldest message of the next block that has not been worked on."""
        return self._inbox.popleft() if self._inbox else self._take()

    def _finish(self, lam: Tensor) -> None:
        """Hand the adjoint of the leaf lam down, and step."""
        if not self.block.first:
            p_in, shrink = self.block.input_adjoint(lam), self.solver.shrink
            self.links.to_previous(p_in if shrink == 1.0 else shrink * p_in)
        self._step()

    def _step(self) -> None:
        self.block.step("local", self._rate, self.solver.clip_norm)


@dataclass(frozen=True)
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


@program_of(DDG)
class StashingProgram(DelayedProgram):
    """Keeps the graph of every flight, over a copy of the weights that it met."""

    def _forward(self, lam: Tensor, step: int) -> Flight:
        weights = {n: p.detach().clone() for n, p in self.block.module.named_parameters()}
        flight = Flight(step, lam, weights)
        self.links.to_next(self._compute(flight).detach())
        return flight

    def _compute(self, flight: Flight) -> Tensor:
        flight.lam = self._leaf(flight.lam)
        for name, parameter in self.block.module.named_parameters():
            flight.stash[name].requires_grad_(parameter.requires_grad)
        flight.out = self.block.forward(flight.lam, flight.key, flight.stash)
        return flight.out

    def _again(self, flight: Flight) -> Flight:
        for name, parameter in self.block.module.named_parameters():
            # the parameter's strides: of a single channel, layouts look alike and compute otherwise
            made = torch.empty_like(parameter, requires_grad=False)
            flight.stash[name] = made.copy_(flight.stash[name])
        with frozen_statistics(self.block.module):
            self._compute(flight)
        return flight

    def _backward(self, flight: Flight) -> None:
        (p_out,) = self._adjoint()
        assert flight.out is not None
        assert flight.lam is not None
        self.block.backward(flight.out, p_out)
        for name, parameter in self.block.module.named_parameters():
            parameter.grad = flight.stash[name].grad
        self._finish(flight.lam)


@dataclass(frozen=True)
class FDG(DDG):
    r"""Fully decoupled training with delayed gradients (Zhuang et al., github ZHUANGHP/FDG).

    `DDG` with forward passes unlocked, d_k = 2 (K-1-k), and adjoints that shrink by b at every
    hop, since what comes from afar is older.
    """

    name: ClassVar[str] = "fdg"

    gradient_shrinking: float = 1.0
    """b in (0, 1], by which an adjoint is multiplied at every hop."""

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


@dataclass(frozen=True)
class FeaturesReplay(Delayed):
    r"""Features Replay (Huo et al., arXiv 1807.04511).

    `Delayed` with d_k = K-1-k; a block keeps the inputs of d_k mini-batches, no graph and no
    weights. The backward pass replays mini-batch n - d_k at the newest weights w_k^n, and moves
    BatchNorm's running statistics, which the first forward pass leaves alone.
    """

    name: ClassVar[str] = "features-replay"


@program_of(FeaturesReplay)
class ReplayingProgram(DelayedProgram):
    """Keeps the inputs of its flights alone."""

    def _forward(self, lam: Tensor, step: int) -> Flight:
        flight = Flight(step, lam)
        with torch.no_grad(), frozen_statistics(self.block.module):
            self.links.to_next(self.block.forward(lam, flight.key))
        return flight

    def _backward(self, flight: Flight) -> None:
        lam = self._leaf(flight.lam)
        (p_out,) = self._adjoint()
        self.block.backward(self.block.forward(lam, flight.key), p_out)
        self._finish(lam)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
