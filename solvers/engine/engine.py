"""The engine: executes a schedule's actions on one block, and knows what is under way."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybrid.solvers.acting import Settings
from hybrid.solvers.base import Program
from hybrid.solvers.block import Block
from hybrid.solvers.engine.flights import Flight, load_flights, save_flights
from hybrid.solvers.engine.graphs import recorded
from hybrid.solvers.engine.policies import BackwardPolicy, KeepGraph
from hybrid.solvers.engine.schedule import Action, Kind, Span
from hybrid.solvers.layers.bundle import Crossing, each, packed
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.local_work.work import LocalWork
from hybrid.solvers.micro_batches import MicroBatch, split_into_micro_batches
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.numerics.weights import with_parameter_strides
from hybrid.solvers.peers import statistics
from hybrid.solvers.state import State, entries
from hybrid.solvers.windows import Batch, PhaseStats, Window
from hybrid.solvers.wire import Wire

_PRECISIONS = torch.float32, torch.bfloat16, torch.float16

Columns = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
Keep = Callable[[Flight, Crossing | None], None]
"""Records a micro-batch and its p_k when its backward pass is complete."""


class Scheduled(Settings, ABC):
    """Settings of a method that the engine runs: its schedule, its policy, its messages."""

    returns_inputs: ClassVar[bool] = False
    """Whether a message down holds the input that the backward pass ran on, too."""

    @abstractmethod
    def schedule(
        self, index: int, count: int, span: Span, budget: LocalBudget | None = None
    ) -> list[Action]:
        """What block `index` of `count` does for a span of micro-batches."""

    @abstractmethod
    def num_micro_batches(self, size: int, count: int) -> int:
        """m, for mini-batches of `size` samples on `count` blocks."""

    @abstractmethod
    def wire(self) -> Wire:
        """What packs messages."""

    def policy(self, block: Block) -> BackwardPolicy:
        """What backward passes of a block that is not the last run on."""
        return KeepGraph(block)

    def delay(self, index: int, count: int) -> int:
        """d_k in ticks of block k = `index` of K = `count`."""
        return 0

    @property
    def shrink(self) -> float:
        """b, by which an adjoint shrinks at every hop."""
        return 1.0


class Engine(Program):
    """Executes the actions of a method's schedule on one block.

    A forward pass fetches lam_k, computes x_k and sends it up; on the last block it computes the
    loss. A backward pass receives p_{k+1}, adds the gradient as the method's `BackwardPolicy` says
    and sends b p_k down. Between the two a micro-batch is a flight. A subclass says what a step is.
    """

    solver: Scheduled
    local_work: LocalWork | None = None
    """Local work where this rank would wait; None: it waits."""
    apart: ClassVar[bool] = True
    """Whether several tensors cross a cut apart, instead of packed as one."""

    def begin(self) -> None:
        block = self.block
        self._wire = self.solver.wire()
        replica = self.block.sync.peers.replica if self.block.sync is not None else 0
        self._seeds = self.setup.seed, replica
        self._below, self._above = block.bundles if self.apart else (None, None)
        """The bundles of what crosses the cuts before and behind this block."""
        policy = KeepGraph(block) if block.last else self.solver.policy(block)
        self.policy = recorded(policy) if block.records else policy
        self._flights: dict[int, Flight] = {}
        """By number of their micro-batch, oldest first."""
        self._inbox: deque[tuple[Tensor, ...]] = deque()
        """Messages of the next block that a checkpoint held."""
        self._losses: list[Tensor] = []
        """Of the micro-batches of a mini-batch."""
        self._ticks = 0
        """Micro-batches since the pipeline was empty."""

    @abstractmethod
    def step(self, part: MicroBatch) -> None:
        """Step with the gradient of the mini-batch that a micro-batch completes."""

    def num_micro_batches(self, batch: Batch) -> int:
        """Micro-batches of a mini-batch, the same on every replica.

        Replicas' shares differ by a sample, and what is late by a number of micro-batches must be
        late by the same on all of them: the smallest share counts.
        """
        share = max(1, batch.size // self.setup.replicas)
        return int(self.solver.num_micro_batches(share, self.block.count))

    def train(self, window: Window) -> PhaseStats:
        """Go through the schedule of each mini-batch."""
        stats = PhaseStats()
        with stats.timed(self.links):
            for _, batch in window.recorded():
                self.pass_over(batch, stats)
        return stats

    def pass_over(
        self, batch: Batch, stats: PhaseStats, keep: Keep | None = None, steps: bool = True
    ) -> None:
        """Execute the schedule of a mini-batch, without its steps if they are not wanted."""
        if self.local_work is not None:
            self.local_work.begin_batch(batch)
        parts = split_into_micro_batches(batch, self.num_micro_batches(batch), self.block)
        actions = self._scheduled(len(parts))
        if not steps:
            actions = [action for action in actions if action.kind is not Kind.STEP]
        self._execute(actions, iter(parts), stats, keep)
        if self._losses:
            stats.losses.append(torch.stack(self._losses).sum())
            self._losses.clear()
        stats.samples += len(batch)
        stats.steps += 1

    def drain(self) -> PhaseStats:
        stats = PhaseStats()
        self._execute(self._scheduled(0, drains=True), iter(()), stats)
        self._ticks = 0
        if self.local_work is not None:
            self.local_work.forget()
        self.links.flush()
        return stats

    def _scheduled(self, count: int, drains: bool = False) -> list[Action]:
        """The actions that `count` new micro-batches add to those under way."""
        first, self._ticks = self._ticks, self._ticks + count
        ends = {n for n, flight in self._flights.items() if flight.part.is_last}
        ends |= {self._ticks - 1} if count else set()
        span = Span(first, self._ticks, frozenset(ends), drains)
        budget = None if self.local_work is None else self.local_work.budget
        return self.solver.schedule(self.block.index, self.block.count, span, budget)

    def _execute(
        self,
        actions: Sequence[Action],
        parts: Iterator[MicroBatch],
        stats: PhaseStats,
        keep: Keep | None = None,
    ) -> None:
        part: MicroBatch | None = None
        for action, following in zip_longest(actions, actions[1:]):
            kind, n = action.kind, action.micro_batch
            if kind is Kind.FORWARD:
                self._flights[n] = self._forward(next(parts), stats)
                continue
            part = self._flights[n].part if n in self._flights else part
            assert part is not None
            if kind is Kind.BACKWARD:
                steps = following is not None and following.kind is Kind.STEP
                with self.last_pass() if steps else nullcontext():
                    self._backward(self._flights.pop(n), keep)
            elif kind is Kind.LOCAL and self.local_work is not None:
                self.local_work.add_gradient(part, action.start, action.samples)
            elif kind is Kind.STEP:
                if self.local_work is not None:
                    self.local_work.mix_in(part.step)
                self.policy.before_step()
                self.step(part)

    def last_pass(self) -> AbstractContextManager[None]:
        """A context around a backward pass that a step follows."""
        return nullcontext()

    def _forward(self, part: MicroBatch, stats: PhaseStats) -> Flight:
        flight = Flight(part, self._leaf(self._fetch(part)))
        x = self.policy.forward(flight)
        if self.block.last:
            flight.out = self._loss(flight, x, stats)
        else:
            self._wire.send(self.links.to_next, each(Tensor.detach, x), self._above)
        if self.local_work is not None and self.policy.outputs_are_lost:
            flight.x = each(Tensor.detach, x)
        return flight

    def _loss(self, flight: Flight, x: Any, stats: PhaseStats) -> Tensor:
        """A micro-batch's part of the mini-batch's loss."""
        part, block = flight.part, self.block
        assert part.labels is not None
        assert flight.lam is not None
        result = block.compute_loss(x, part.labels, part.weight)
        stats.count_metric(result)
        if block.check is not None:
            block.check.take(part, flight.lam, x, result.loss)
        self._losses.append(result.loss.detach() * part.replica_share)
        return result.loss * part.share

    def _backward(self, flight: Flight, keep: Keep | None) -> None:
        p_in = self.policy.backward(flight, partial(self._receive_adjoint, flight))
        if not self.block.first:
            self._send_adjoint(p_in, flight)
        if keep is not None:
            keep(flight, p_in)
        if self.local_work is not None:
            x = flight.out if flight.x is None else flight.x
            assert flight.lam is not None
            assert x is not None
            self.local_work.record(flight.part, *self._columns(flight, x, p_in))

    def _columns(self, flight: Flight, x: Any, p_in: Any) -> Columns:
        """lam_k, x_k, p_k and p_{k+1} of a flight, each packed as one tensor."""
        below, above = self._below, self._above
        crossing = (flight.lam, below), (x, above), (p_in, below), (flight.p_out, above)
        lam, x, p_in, p_out = (packed(each, bundle) for each, bundle in crossing)
        return lam, x, p_in, p_out

    def _fetch(self, part: MicroBatch) -> Any:
        """x_{k-1} of a micro-batch."""
        if part.images is not None:
            return part.images
        receive = self.links.from_previous
        return self._wire.receive(receive, self.block.formats[0], self._below)

    def _leaf(self, lam: Any) -> Any:
        """lam_k; it gets a gradient if the block before needs that."""
        wanted = self.block.sends_adjoint
        return each(lambda x: x.detach().requires_grad_(wanted), lam)

    def _receive_adjoint(self, flight: Flight, dtype: Any) -> Any:
        """p_{k+1} of the oldest flight, for an output of `dtype`, of each of several tensors; None
        if there is none.
        """
        block = self.block
        if block.last:
            return None
        message = self._inbox.popleft() if self._inbox else self._receive_message()
        if not self._gets_adjoint:
            return None
        take = partial(next, iter(message))
        if self.solver.returns_inputs:
            flight.returned = self._wire.receive(take, block.formats[-1], self._above)
        wide = dtype if block.scaler is None else torch.float32
        key = self._key(flight.part, self.block.index + 1)
        flight.p_out = self._wire.receive_adjoint(take, wide, flight.part.size, key, self._above)
        return flight.p_out

    def _receive_message(self) -> tuple[Tensor, ...]:
        """One message of the next block, as it is on the wire."""
        wire, above = self._wire, self._above
        count = wire.num_tensors(wire.down, above)
        count += wire.num_tensors(wire.up, above) * self.solver.returns_inputs
        count = count if self._gets_adjoint else 1
        return tuple(self.links.from_next() for _ in range(count))

    @property
    def _gets_adjoint(self) -> bool:
        """Whether messages of the next block have numbers."""
        return self.block.index >= self.block.first_trained

    def _send_adjoint(self, p_in: Crossing | None, flight: Flight) -> None:
        """One message to the previous block, with b p_k if it needs that.

        It comes without numbers, too: a block must not run ahead of those behind it.
        """
        if p_in is None:
            self.links.to_previous(torch.empty(0, device=self.block.device))
            return
        b, down = self.solver.shrink, self.links.to_previous
        p_in = p_in if b == 1.0 else each(lambda p: b * p, p_in)
        if self.solver.returns_inputs:
            assert flight.lam is not None
            self._wire.send(down, each(Tensor.detach, flight.lam), self._below)
        key = self._key(flight.part, self.block.index)
        self._wire.send_adjoint(down, p_in, flight.part.size, key, self._below)

    def _key(self, part: MicroBatch, cut: int) -> Key:
        """The key of a message's random numbers, the same on both sides of the cut."""
        return (*self._seeds, cut, part.step, part.number)

    def state(self) -> State:
        """What is under way: flights, messages that have not been received, gradients, records."""
        if self._ticks == 0:
            return State()
        while len(self._inbox) < self._adjoints_sent():
            self._inbox.append(self._receive_message())
        state = {
            "ticks": torch.tensor(self._ticks),
            "sent as": torch.tensor([*self._wire.text.encode()]),
            "computed in": torch.tensor(_PRECISIONS.index(self.block.precision)),
        }
        for name, parameter in self.block.module.named_parameters():
            if parameter.grad is not None:
                state[f"gradient {name}"] = parameter.grad
        if self.setup.replicas > 1:  # equal after a step, not while one is prepared
            running = statistics(self.block.module)
            state |= {f"statistic {i}": x for i, x in enumerate(running)}
        state |= save_flights(self._flights.values())
        if self.local_work is not None:
            state |= self.local_work.state()
        for i, message in enumerate(self._inbox):
            state |= {f"inbox {i}.{j}": tensor for j, tensor in enumerate(message)}
        return State(flight=state)

    def load_state(self, state: State) -> None:
        saved, module = state.flight, self.block.module
        if not saved:
            return
        for setting, now, before in (
            ("solver.messages", self._wire.text, bytes(saved["sent as"].tolist()).decode()),
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
        flights = [*load_flights(saved, module)]
        for n, flight in enumerate(flights, self._ticks - len(flights)):
            flight.lam = None if flight.lam is None else self._leaf(flight.lam)
            self._flights[n] = self._restored(flight)
        for i in range(self._adjoints_sent()):
            self._inbox.append(tuple(entries(saved, f"inbox {i}.").values()))
        for name, grad in with_parameter_strides(module, entries(saved, "gradient ")).items():
            module.get_parameter(name).grad = grad
        if self.local_work is not None:
            self.local_work.load_state(state)

    def _restored(self, flight: Flight) -> Flight:
        """A flight of a checkpoint, ready for its backward pass."""
        self.policy.restore(flight)
        return flight

    def _adjoints_sent(self) -> int:
        """Adjoints that the next block has sent and this one has not yet received."""
        if self.block.last:
            return 0
        index, count = self.block.index, self.block.count
        delays = (self.solver.delay(k, count) for k in (index, index + 1))
        started, returned = (min(self._ticks, delay) for delay in delays)
        return started - returned
