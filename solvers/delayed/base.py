"""The tick of a pipeline that is never flushed: what all methods with delayed gradients share."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import get_args

import torch
from torch import Tensor, nn

from solvers.acting import Acts, CountOrZero, Needs, NotNegative
from solvers.base import GraphBytes, Program, Solver
from solvers.exact.micro_batches import MicroBatch, micro_batches
from solvers.exact.wire import Wire, WireFormat
from solvers.state import State, Tensors, entries
from solvers.sync.base import statistics
from solvers.windows import PhaseStats, Window

_FORMATS = get_args(WireFormat)
_PRECISIONS = torch.float32, torch.bfloat16, torch.float16


@dataclass
class Flight:
    """A micro-batch that a block has handed up and whose adjoint has yet to come back."""

    part: MicroBatch
    lam: Tensor | None = None
    """What its forward pass began with, if that is needed again."""
    stash: Tensors = field(default_factory=dict)
    """What its backward pass needs besides and no other flight does, for a checkpoint."""
    weights: Tensors | None = None
    """The version of the weights that it met, if that is needed again."""
    out: Tensor | None = None
    """x_k with its graph, if that is kept."""


NOT_COMPILED = Needs(
    "train.compile is false, because it goes through its blocks unit by unit",
    lambda run: not run.setup.compiled,
    "leave train.compile out, or choose another solver",
)
ONE_REPLICA = Needs(
    "there is one replica, since replicas cannot agree on steps of single units",
    lambda run: run.setup.replicas == 1,
    "take one replica, or another solver",
)
NOT_FLOAT16 = Needs(
    "train.precision is not 'float16', whose loss scale may change between the steps of its units",
    lambda run: run.train.precision != "float16",
    "choose bfloat16",
)
SEVERAL_BLOCKS = Acts("there are several blocks", lambda run: run.setup.blocks > 1)


@dataclass(frozen=True)
class Delayed(Solver):
    r"""Mini-batches go through the blocks in m micro-batches. At its n-th tick, block k

        lam_k = x_{k-1} of micro-batch n,   x_k = f_k(lam_k; w_k)               forward, sent up
        p_k = b (d x_k / d lam_k)^T p_{k+1}  of micro-batch n - d_k             backward, sent down
        w_k <- optimizer step with the sum of (d x_k / d w_k)^T p_{k+1} over the micro-batches of a
               mini-batch, after the backward pass of its last

    where d_k is fixed, so the result does not depend on timing. The pipeline is never flushed: a
    micro-batch takes a tick, whatever K is. The gradient of a mini-batch is d_k / m steps late: its
    first d_k micro-batches went up before the newest step (before the newest two, if d_k > m, ...).
    Block K-1 has d = 0 and works as back-propagation does. K = 1 is the pipelined pass with as many
    micro-batches, and plain back-propagation with m = 1, bit for bit.

    d_k = K-1-k is one forward, one backward: a block has as many graphs under way as a flushed
    pipeline has, and waits for its neighbor if a message takes long (PipeDream, arXiv 1806.03377,
    steps in this order after every micro-batch). d_k = 2 (K-1-k) gives every message a tick of
    slack. The pipeline is drained at the end of an epoch and before a serial correction: the
    gradients in flight come back, nothing goes up, none is lost.
    """

    micro_batches: CountOrZero = 0
    """m, parts of a mini-batch, which shorten delays; 0: 8, but at least 16 samples each."""
    messages: WireFormat = "float32"
    """Number format of what crosses a cut: float32, bfloat16, float16 or int8."""
    clip_norm: NotNegative = 0.0
    """Largest norm of one block's gradient; 0: no clipping."""

    def delay(self, index: int, count: int) -> int:
        """d_k in ticks of block k = `index` of K = `count`."""
        return count - 1 - index

    def parts(self, size: int) -> int:
        return min(self.micro_batches or max(1, min(8, size // 16)), size)

    def versions(self, index: int, count: int, size: int) -> int:
        """Older weights that block `index` of `count` keeps at most beside its newest."""
        return 0

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        d, x = self.delay(index, count), self.first_part(lam)
        return graph(module, x) + d * tensor_bytes([x])

    def first_part(self, lam: Tensor) -> Tensor:
        """The first, and largest, micro-batch of a mini-batch."""
        size = ceil(len(lam) / self.parts(len(lam)))
        return lam.detach()[:size].clone().requires_grad_(lam.requires_grad)

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
        self._wire = Wire(solver.messages)
        self._flights: deque[Flight] = deque()
        self._inbox: deque[tuple[Tensor, ...]] = deque()
        self._ticks = 0
        self._rate = 0.0

    def train(self, window: Window) -> PhaseStats:
        """A tick a micro-batch; the pipeline stays filled."""
        stats = PhaseStats()
        with stats.timed(self.links.now):
            for _, batch in window.recorded():
                self._rate = batch.learning_rate
                losses = []
                for part in micro_batches(batch, self.solver.parts(len(batch)), self.block):
                    self._ticks += 1
                    if self.block.last:
                        losses.append(self._last_tick(part, stats))
                    else:
                        self._flights.append(self._forward(self._arrived(part), part))
                        if len(self._flights) > self._delay:
                            self._backward(self._flights.popleft())
                if losses:
                    stats.losses.append(torch.stack(losses).sum())
                stats.samples += len(batch)
                stats.steps += 1
        return stats

    def drain(self) -> PhaseStats:
        while self._flights:
            self._backward(self._flights.popleft())
        self._ticks = 0
        self.links.flush()
        return PhaseStats()

    def state(self) -> State:
        if self._ticks == 0:
            return State()
        while len(self._inbox) < self._on_the_way():
            self._inbox.append(self._take())
        rate = torch.tensor(self._rate, dtype=torch.float64)
        state = {"ticks": torch.tensor(self._ticks), "rate": rate}
        state["sent as"] = torch.tensor(_FORMATS.index(self.solver.messages))
        state["computed in"] = torch.tensor(_PRECISIONS.index(self.block.precision))
        for name, parameter in self.block.module.named_parameters():
            if parameter.grad is not None:
                state[f"gradient {name}"] = parameter.grad
        if self.setup.replicas > 1:  # which are alike after a step, and not while one is prepared
            own = statistics(self.block.module)
            state |= {f"statistic {i}": x for i, x in enumerate(own)}
        versions: list[Tensors] = []
        for i, flight in enumerate(self._flights):
            state[f"flight {i}.part"] = torch.tensor(flight.part[:6])
            if flight.lam is not None:
                state[f"flight {i}.lam"] = flight.lam.detach()
            state |= {f"flight {i}.{name}": t.detach() for name, t in flight.stash.items()}
            if flight.weights is not None:
                if not versions or flight.weights is not versions[-1]:
                    versions.append(flight.weights)
                state[f"flight {i}.version"] = torch.tensor(len(versions) - 1)
        for v, weights in enumerate(versions):
            state |= {f"version {v}.{name}": w.detach() for name, w in weights.items()}
        for i, parts in enumerate(self._inbox):
            state |= {f"inbox {i}.{j}": part for j, part in enumerate(parts)}
        return State(flight=state)

    def load_state(self, state: State) -> None:
        found = state.flight
        if not found:
            return
        self._refuse_other("solver.messages", self.solver.messages, _FORMATS[int(found["sent as"])])
        before, now = _PRECISIONS[int(found["computed in"])], self.block.precision
        self._refuse_other(
            "train.precision", *(str(p).removeprefix("torch.") for p in (now, before))
        )
        self._ticks, self._rate = int(found["ticks"]), float(found["rate"])
        for i, own in enumerate(statistics(self.block.module)):
            own.copy_(found.get(f"statistic {i}", own))
        versions: dict[int, Tensors] = {}
        for i in range(len({name.partition(".")[0] for name in found if name[:6] == "flight"})):
            stash = entries(found, f"flight {i}.")
            flight = Flight(MicroBatch(*stash.pop("part").tolist()), stash.pop("lam", None))
            if "version" in stash:
                v = int(stash.pop("version"))
                if v not in versions:
                    versions[v] = self._like_parameters(entries(found, f"version {v}."))
                flight.weights = versions[v]
            flight.stash = stash
            self._flights.append(self._again(flight))
        for i in range(self._on_the_way()):
            self._inbox.append(tuple(entries(found, f"inbox {i}.").values()))
        for name, kept in self._like_parameters(entries(found, "gradient ")).items():
            self.block.module.get_parameter(name).grad = kept

    @staticmethod
    def _refuse_other(setting: str, now: str, before: str) -> None:
        """ValueError if what is under way was made otherwise."""
        if now != before:
            raise ValueError(f"{setting} is {now!r}, and {before!r} for what is under way")

    def _like_parameters(self, kept: Tensors) -> Tensors:
        """With the parameters' strides: of a single channel, layouts look alike, and compute
        otherwise."""
        empty = {n: torch.empty_like(self.block.module.get_parameter(n)).detach() for n in kept}
        return {name: empty[name].copy_(tensor) for name, tensor in kept.items()}

    def _on_the_way(self) -> int:
        """Adjoints that the next block has sent and this one has not asked for."""
        if self.block.last:
            return 0
        next_ = self.solver.delay(self.block.index + 1, self.block.count)
        return min(self._ticks, self._delay) - min(self._ticks, next_)

    def _arrived(self, part: MicroBatch) -> Tensor:
        if part.images is not None:
            return part.images
        return self._wire.receive(self.links.from_previous, self.block.dtype)

    @abstractmethod
    def _forward(self, lam: Tensor, part: MicroBatch) -> Flight:
        """Hand x_k up; keep what the backward pass will need."""

    def _again(self, flight: Flight) -> Flight:
        """A flight as a checkpoint has kept it, ready for its backward pass."""
        return flight

    @abstractmethod
    def _backward(self, flight: Flight) -> None:
        """Bring a flight home: its adjoint goes down, its gradient is added."""

    def _last_tick(self, part: MicroBatch, stats: PhaseStats) -> Tensor:
        """The last block's tick: forward, loss, backward; its share of the mini-batch's loss."""
        lam = self._leaf(self._arrived(part))
        assert part.labels is not None
        found = self.block.classify(self.block.forward(lam, part.key), part.labels)
        self.block.backward(found.loss * part.share, key=part.key)
        stats.scored(found)
        self._finish(part, lam)
        return found.loss.detach() * part.own_share

    def _leaf(self, lam: Tensor | None) -> Tensor:
        assert lam is not None
        return lam.detach() if self.block.first else lam.detach().requires_grad_()

    def _up(self, out: Tensor) -> None:
        self._wire.send(self.links.to_next, out)

    def _take(self) -> tuple[Tensor, ...]:
        """One message of the next block, as it is on the wire."""
        return tuple(self.links.from_next() for _ in range(self._wire.tensors))

    def _message(self) -> Callable[[], Tensor]:
        """Gives the tensors of the oldest message that has not been worked on."""
        return partial(next, iter(self._inbox.popleft() if self._inbox else self._take()))

    def _adjoint(self, part: MicroBatch, dtype: torch.dtype) -> Tensor:
        """p_{k+1} of the oldest flight, for an output of `dtype`."""
        wide = dtype if self.block.scaler is None else torch.float32
        return self._wire.receive_adjoint(self._message(), wide, part.size)

    def _finish(self, part: MicroBatch, lam: Tensor) -> None:
        """Hand the adjoint of the leaf lam down; step if its mini-batch is complete."""
        if not self.block.first:
            self._down(lam, self.block.input_adjoint(lam), part)
        self._step(part)

    def _down(self, lam: Tensor, p_in: Tensor, part: MicroBatch) -> None:
        """One message to the previous block."""
        shrink = self.solver.shrink
        p_in = p_in if shrink == 1.0 else shrink * p_in
        self._wire.send_adjoint(self.links.to_previous, p_in, part.size)

    def _step(self, part: MicroBatch) -> None:
        """Step if that was its mini-batch's last micro-batch."""
        if part.ends:
            self.block.step("local", self._rate, self.solver.clip_norm)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
