"""The tick of a pipeline that is never flushed, which all methods with delayed gradients share."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Acts, CountOrZero, Needs, NotNegative
from hybrid.solvers.base import GraphBytes, Program, Solver
from hybrid.solvers.delayed.filling import Filling
from hybrid.solvers.delayed.stash import Flight, load_flights, save_flights, with_parameter_strides
from hybrid.solvers.exact.pipeline import MicroBatch, Wire, WireFormat, split_into_micro_batches
from hybrid.solvers.peers import statistics
from hybrid.solvers.state import State, entries
from hybrid.solvers.windows import Batch, PhaseStats, Window

_FORMATS = get_args(WireFormat)
_PRECISIONS = torch.float32, torch.bfloat16, torch.float16

LONGEST_DELAY = 0.5
"""Steps by which the first block's gradients may be late where m is not set."""
SHORTEST_PART = 16
"""Samples of a micro-batch, at least: BatchNorm's statistics and a core's rate suffer below."""

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
    r"""Mini-batches go through the blocks in m micro-batches. At its n-th tick, block k computes

        lam_k = x_{k-1} of micro-batch n,   x_k = f_k(lam_k; w_k)               forward, sent up
        p_k = b (d x_k / d lam_k)^T p_{k+1}  of micro-batch n - d_k             backward, sent down
        w_k <- optimizer step at the learning rate eta_t with the sum of (d x_k / d w_k)^T p_{k+1}
               over the micro-batches of mini-batch t, after the backward pass of its last

    where d_k is fixed, so the result does not depend on timing. A late step is made at the rate of
    the mini-batch whose gradient it is, eta_t on every block, and not at that of the mini-batch
    that goes forward meanwhile. The pipeline is never flushed: a micro-batch takes one tick,
    whatever K is. The gradient of a mini-batch is d_k / m steps late: the forward passes of its
    first d_k micro-batches came before the newest step (before the newest two, if d_k > m, ...).
    Block K-1 has d = 0 and works as back-propagation does. K = 1 is the pipelined pass with as many
    micro-batches, and with m = 1 it is plain back-propagation, bit for bit.

    d_k = K-1-k is one forward, one backward: a block has as many graphs under way as in a flushed
    pipeline, and waits for its neighbor if a message takes long (PipeDream, arXiv 1806.03377, steps
    in this order after every micro-batch). d_k = 2 (K-1-k) gives every message one tick of slack.
    The pipeline is drained at the end of an epoch and before a serial correction: all backward
    passes under way are completed, no forward pass begins, and no gradient is lost.
    """

    sums_mini_batches: ClassVar[bool] = True
    """Whether a step is on the sum over a mini-batch, which is exact where weights are equal."""

    micro_batches: CountOrZero = 0
    """m, micro-batches per mini-batch: more make delays shorter. 0: the smallest power of
    two with which no gradient is over half a step late, at least 16 samples each."""
    messages: WireFormat = "float32"
    """Number format of messages between blocks."""
    clip_norm: NotNegative = 0.0
    """Clip the norm of each block's gradient (not in serial rounds); 0: no clipping."""

    def delay(self, index: int, count: int) -> int:
        """d_k in ticks of block k = `index` of K = `count`."""
        return count - 1 - index

    def num_micro_batches(self, size: int, count: int) -> int:
        if self.micro_batches:
            return min(self.micro_batches, size)
        m = 1
        while self.delay(0, count) > LONGEST_DELAY * m and size >= 2 * m * SHORTEST_PART:
            m *= 2
        return m

    def versions(self, index: int, count: int, size: int) -> int:
        """Most older versions of its weights that block `index` of `count` keeps at once."""
        return 0

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        d, x = self.delay(index, count), self.first_part(lam, count)
        return graph(module, x) + d * tensor_bytes([x])

    def first_part(self, lam: Tensor, count: int) -> Tensor:
        """The first, and largest, micro-batch of a mini-batch."""
        size = ceil(len(lam) / self.num_micro_batches(len(lam), count))
        return lam.detach()[:size].clone().requires_grad_(lam.requires_grad)

    @property
    def shrink(self) -> float:
        """b, by which an adjoint shrinks at every hop."""
        return 1.0

    def lossless(self, formats: bool = False) -> Delayed:
        """The same, whose gradients at equal weights are exact; `formats`: but for rounding."""
        plain: dict[str, Any] = {} if formats else {"messages": "float32"}
        return replace(self, clip_norm=0.0, **plain)


class DelayedProgram(Program):
    """One rank's ticks, and the micro-batches whose backward pass is yet to come."""

    solver: Delayed
    filling: Filling | None = None
    """Local work where this rank would wait; None: it waits."""

    def begin(self) -> None:
        solver, block = self.solver, self.block
        self._delay = solver.delay(block.index, block.count)
        self._wire = Wire(solver.messages)
        self._flights: deque[Flight] = deque()
        """Oldest first."""
        self._inbox: deque[tuple[Tensor, ...]] = deque()
        """Messages of the next block that a checkpoint held."""
        self._losses: list[Tensor] = []
        """Of the micro-batches of a mini-batch."""
        self._ticks = 0

    def num_micro_batches(self, batch: Batch) -> int:
        """Micro-batches of a mini-batch in the method's own steps, the same on every replica.

        Replicas' shares differ by a sample, and what is late by a number of micro-batches must be
        late by the same on all of them: the smallest share counts.
        """
        share = max(1, batch.size // self.setup.replicas)
        return int(self.solver.num_micro_batches(share, self.block.count))

    def train(self, window: Window) -> PhaseStats:
        """One tick for each micro-batch; the pipeline stays filled."""
        stats, block = PhaseStats(), self.block
        with stats.timed(self.links):
            for _, batch in window.recorded():
                if self.filling is not None:
                    self.filling.take(batch)
                for part in split_into_micro_batches(batch, self.num_micro_batches(batch), block):
                    self._ticks += 1
                    self._tick(part, stats)
                if self._losses:
                    stats.losses.append(torch.stack(self._losses).sum())
                    self._losses.clear()
                stats.samples += len(batch)
                stats.steps += 1
        return stats

    def _tick(self, part: MicroBatch | None, stats: PhaseStats) -> None:
        """A forward pass and the backward pass that is due; in a drain (None) the latter alone.

        The order is that of `waits.delayed_order`.
        """
        block, flights = self.block, self._flights
        if part is not None:
            flight = Flight(part, self._leaf(self._fetch(part)))
            if block.last:
                flight.out = self._classify(flight, stats)
            else:
                self._wire.send(self.links.to_next, self._forward(flight))
            flights.append(flight)
        if part is None or len(flights) > self._delay:
            self._come_back(flights.popleft())

    def _come_back(self, flight: Flight) -> None:
        """The rest of a tick: backward pass, local work beside it, and the step if it is due."""
        block, filling = self.block, self.filling
        if filling is not None:
            filling.work(flight, 0, filling.waits.adjoint)
        p_in = self._loss_adjoint(flight) if block.last else self._backward(flight)
        if p_in is not None:
            p_in = self._shrunk(p_in)
            self._send_adjoint(p_in, flight)
        if filling is not None:
            filling.record(flight, p_in)
            filling.work(flight, filling.waits.adjoint, filling.waits.activation)
        if flight.part.is_last:
            if filling is not None:
                filling.add(flight.part.step)
            self._step(flight)

    def drain(self) -> PhaseStats:
        stats = PhaseStats()
        while self._flights:
            self._tick(None, stats)
        self._ticks = 0
        if self.filling is not None:
            self.filling.begin()
        self.links.flush()
        return stats

    def state(self) -> State:
        if self._ticks == 0:
            return State()
        while len(self._inbox) < self._adjoints_sent():
            self._inbox.append(self._receive_message())
        state = {
            "ticks": torch.tensor(self._ticks),
            "sent as": torch.tensor(_FORMATS.index(self.solver.messages)),
            "computed in": torch.tensor(_PRECISIONS.index(self.block.precision)),
        }
        for name, parameter in self.block.module.named_parameters():
            if parameter.grad is not None:
                state[f"gradient {name}"] = parameter.grad
        if self.setup.replicas > 1:  # which are alike after a step, and not while one is prepared
            running = statistics(self.block.module)
            state |= {f"statistic {i}": x for i, x in enumerate(running)}
        state |= save_flights(self._flights)
        if self.filling is not None:
            state |= self.filling.state()
        for i, message in enumerate(self._inbox):
            state |= {f"inbox {i}.{j}": tensor for j, tensor in enumerate(message)}
        return State(flight=state)

    def load_state(self, state: State) -> None:
        saved, module = state.flight, self.block.module
        if not saved:
            return
        for setting, now, before in (
            ("solver.messages", self.solver.messages, _FORMATS[int(saved["sent as"])]),
            ("train.precision", self.block.precision, _PRECISIONS[int(saved["computed in"])]),
        ):
            if now != before:
                names = [str(each).removeprefix("torch.") for each in (now, before)]
                raise ValueError(
                    f"{setting} is {names[0]!r}, and {names[1]!r} for what is under way"
                )
        self._ticks = int(saved["ticks"])
        for i, statistic in enumerate(statistics(module)):
            statistic.copy_(saved.get(f"statistic {i}", statistic))
        for flight in load_flights(saved, module):
            flight.lam = None if flight.lam is None else self._leaf(flight.lam)
            self._flights.append(self._rebuild(flight))
        for i in range(self._adjoints_sent()):
            self._inbox.append(tuple(entries(saved, f"inbox {i}.").values()))
        for name, grad in with_parameter_strides(module, entries(saved, "gradient ")).items():
            module.get_parameter(name).grad = grad
        if self.filling is not None:
            self.filling.load_state(state)

    def _adjoints_sent(self) -> int:
        """Adjoints that the next block has sent and this one has not yet received."""
        if self.block.last:
            return 0
        next_ = self.solver.delay(self.block.index + 1, self.block.count)
        return min(self._ticks, self._delay) - min(self._ticks, next_)

    def _fetch(self, part: MicroBatch) -> Tensor:
        """x_{k-1} of a micro-batch."""
        if part.images is not None:
            return part.images
        return self._wire.receive(self.links.from_previous, self.block.formats[0])

    def _leaf(self, lam: Tensor) -> Tensor:
        """lam_k; the first block's gets no gradient."""
        return lam.detach() if self.block.first else lam.detach().requires_grad_()

    @abstractmethod
    def _forward(self, flight: Flight) -> Tensor:
        """x_k; keep in the flight what the backward pass will need."""

    def _compute(self, flight: Flight) -> Tensor:
        """f_k(lam_k; w_k) at the flight's version of the weights, or the newest."""
        out: Tensor = self.block.forward(flight.lam, flight.part.key, flight.weights)
        return out

    def _rebuild(self, flight: Flight) -> Flight:
        """A flight of a checkpoint, made ready for its backward pass."""
        return flight

    @abstractmethod
    def _backward(self, flight: Flight) -> Tensor | None:
        """Receive the adjoint of x_k and add the gradient; p_k, or None on the first block."""

    def _classify(self, flight: Flight, stats: PhaseStats) -> Tensor:
        """The last block's forward pass: a micro-batch's part of the mini-batch's loss."""
        part, out = flight.part, self._compute(flight)
        assert part.labels is not None
        assert flight.lam is not None
        classified = self.block.classify(out, part.labels, part.weight)
        stats.scored(classified)
        if self.block.check is not None:
            self.block.check.take(part, flight.lam, out, classified.loss)
        self._losses.append(classified.loss.detach() * part.own_share)
        return classified.loss * part.share

    def _loss_adjoint(self, flight: Flight) -> Tensor | None:
        """The last block's backward pass, which needs no message."""
        assert flight.out is not None
        self.block.backward(flight.out, key=flight.part.key)
        return self._input_adjoint(flight)

    def _input_adjoint(self, flight: Flight) -> Tensor | None:
        """p_k, as a backward pass has left it at lam_k; None on the first block."""
        assert flight.lam is not None
        return None if self.block.first else self.block.input_adjoint(flight.lam)

    def _receive_message(self) -> tuple[Tensor, ...]:
        """One message of the next block, as it is on the wire."""
        return tuple(self.links.from_next() for _ in range(self._wire.tensors))

    def _oldest_message(self) -> Callable[[], Tensor]:
        """Gives the tensors of the next block's oldest message, one at each call."""
        message = self._inbox.popleft() if self._inbox else self._receive_message()
        return partial(next, iter(message))

    def _receive_adjoint(self, flight: Flight, dtype: torch.dtype) -> Tensor:
        """p_{k+1} of the oldest flight, for an output of `dtype`."""
        wide, size = dtype if self.block.scaler is None else torch.float32, flight.part.size
        p_out = self._wire.receive_adjoint(self._oldest_message(), wide, size)
        flight.p_out = p_out
        return p_out

    def _shrunk(self, p_in: Tensor) -> Tensor:
        """b p_k."""
        return p_in if self.solver.shrink == 1.0 else self.solver.shrink * p_in

    def _send_adjoint(self, p_in: Tensor, flight: Flight) -> None:
        """One message to the previous block."""
        self._wire.send_adjoint(self.links.to_previous, p_in, flight.part.size)

    def _step(self, flight: Flight) -> None:
        """Step with the gradient of the mini-batch that the flight completes."""
        self.block.step("local", flight.part.learning_rate, self.solver.clip_norm)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
