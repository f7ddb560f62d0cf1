"""PD-ASGD: forward and backward passes decoupled, layers step by themselves (arXiv 2410.05985)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from solvers.acting import Acts, CountOrZero, Needs, NotNegative
from solvers.base import GraphBytes, program_of
from solvers.blocks.buffers import frozen_statistics
from solvers.delayed.base import (
    NOT_COMPILED,
    NOT_FLOAT16,
    ONE_REPLICA,
    SEVERAL_BLOCKS,
    Delayed,
    DelayedProgram,
    Flight,
    tensor_bytes,
)
from solvers.delayed.timetable import MOST_SLOTS, Timetable, UnitPass
from solvers.delayed.units import (
    Copied,
    Recomputed,
    Stashed,
    Turn,
    UnitFlight,
    Units,
    laid_out,
    runs,
)
from solvers.delayed.worker_threads import Race, WorkerThreads
from solvers.exact.micro_batches import MicroBatch, micro_batches
from solvers.state import State, Tensors
from solvers.windows import PhaseStats, Window

ONE_BLOCK = Acts(
    "there is one block, since each of several takes both passes by turns",
    lambda run: run.setup.blocks == 1,
)
IN_ORDER = Acts(
    "solver.any_order is false, with which every slot has a thread anyway",
    lambda run: not run.solver.any_order,
)
ACCUMULATES = Acts(
    "gradients are added up, since with solver.any_order a step follows every backward pass",
    lambda run: run.setup.blocks > 1 or not run.solver.any_order,
)
WAITS = Acts(
    "a graph may wait for a backward slot (solver.backward_slots is 0 or 1, or solver.any_order)",
    lambda run: run.solver.any_order or run.solver.backward_slots != MOST_SLOTS,
)
STEPS_BETWEEN = Acts(
    "steps come between a forward pass and its backward pass, which one slot without a queue "
    "(solver.backward_slots 0, solver.queue 0) does not allow",
    lambda run: (
        run.setup.blocks > 1
        or run.solver.any_order
        or run.solver.backward_slots
        or run.solver.queue
    ),
)
REPEATS_DRAWS = Needs(
    "no layer draws random numbers, which it draws for a whole pass and not for one unit again",
    lambda run: run.solver.weights == "stashed" or not run.draws,
    "choose stashed",
)
THREAD_FOR_EVERY_SLOT = Needs(
    "solver.backward_slots is 1 or 2, since with 0 one slot and its thread take both passes",
    lambda run: run.solver.backward_slots or run.setup.blocks > 1,
)


@dataclass(frozen=True)
class PDASGD(Delayed):
    r"""Following partial decoupled ASGD with layer-wise updates (arXiv 2410.05985).

    A block is a chain of units u = 0 .. M-1. Forward passes never wait for a backward pass; a
    backward pass goes from the head down, and steps a unit as soon as its gradient is there:

        x_u = f_u(x_{u-1}; w_u)                                          forward slot
        g_u = (d f_u / d w_u)^T p_u,   p_{u-1} = (d f_u / d x_{u-1})^T p_u
        w_u <- optimizer step with g_u, before the unit below goes on     backward slot

    The derivatives are at the weights that x_u met (stashed), or at the newest w_u and the same
    x_{u-1} (current: f_u is run again). With one block, `Table` says when which slot takes what:
    steps are ordered by (tick, unit, mini-batch), and seen by every forward part that begins
    later. In the paper's ratio, 1 forward and 2 backward slots, the gradient of the unit at
    relative depth u / M lands 3 (1 - u / M) ticks (forward passes) after its weights were read:
    it is ceil(3 (1 - u / M)) - 1 steps late, of the head 0 (M >= 3). With one slot and no queue it
    is SGD, with a queue q all units are q steps late. As the table has no clock but its own,
    neither threads nor what they meet on the machine change the result.

    Over K > 1 blocks each takes a forward and a backward pass by turns, in FDG's order
    d_k = 2 (K-1-k): one slot whose queue is d_k. There nobody reads a unit's weights between its
    step and the end of the pass, so nothing is gained by stepping early: with stashed weights, and
    but for clipping a unit at a time, it is FDG bit for bit.
    """

    name: ClassVar[str] = "pd-asgd"

    needs: ClassVar = (NOT_COMPILED, ONE_REPLICA, NOT_FLOAT16)
    acts: ClassVar = {"solver.messages": SEVERAL_BLOCKS}

    micro_batches: Annotated[CountOrZero, ACCUMULATES] = 1
    """m, parts of a mini-batch, which shorten delays; 0: 8, but at least 16 samples each."""
    clip_norm: NotNegative = 0.0
    """Largest norm of one unit's gradient; 0: no clipping."""
    backward_slots: Annotated[CountOrZero, ONE_BLOCK] = 2
    """Beside the forward slot of the only block: 1, 2, or 0: one slot takes both by turns."""
    queue: Annotated[CountOrZero, ONE_BLOCK, WAITS] = 0
    """Graphs that may wait for a backward slot before the forward slot waits."""
    weights: Annotated[Literal["stashed", "current"], STEPS_BETWEEN, REPEATS_DRAWS] = "stashed"
    """Those of a backward pass: that its forward pass met, or the newest, on the same inputs."""
    threads: Annotated[bool, ONE_BLOCK, IN_ORDER, THREAD_FOR_EVERY_SLOT] = False
    """A thread for every slot of the only block, with the same result: for idle cores."""
    any_order: Annotated[bool, ONE_BLOCK, THREAD_FOR_EVERY_SLOT] = False
    """As in the paper: threads without a table on shared weights. No run can be repeated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backward_slots > MOST_SLOTS and not self.any_order:
            raise ValueError(
                f"backward_slots is {self.backward_slots}; it must be at most {MOST_SLOTS}, which "
                "are all that one forward slot can feed, unless any_order is true"
            )

    @property
    def repeatable(self) -> bool:
        return not self.any_order

    def delay(self, index: int, count: int) -> int:
        """Of the first unit, by the table; with `any_order` that is where it is about."""
        return 2 * (count - 1 - index) if count > 1 else self.table(3, index, count).delay(0)

    def table(self, units: int, index: int, count: int) -> Timetable:
        """That of a block of so many units."""
        if count > 1:
            return Timetable(units, 0, self.delay(index, count))
        return Timetable(units, min(self.backward_slots, MOST_SLOTS), self.queue)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, units = self.first_part(lam), runs(module)
        table, parts = self.table(len(units), index, count), [*module._modules.values()]
        graphs, inputs, versions, largest = [], 0, 0, 0
        with torch.no_grad(), frozen_statistics(module):
            for u, some in enumerate(units):
                # children() leaves out the second use of a module
                unit = nn.Sequential(*(part for part in parts[some] if part is not None))
                flying = table.delay(u) + 1
                graphs.append((graph(unit, x), flying))
                older = -(-table.delay(u) // self.parts(len(lam)))
                versions += older * tensor_bytes(unit.parameters())
                largest = max(largest, graphs[-1][0])
                inputs += flying * tensor_bytes([x])
                x = unit(x).detach().requires_grad_()
        if self.weights == "current":
            return inputs + largest
        # neighbors share what lies between them
        alone = sum(size for size, _ in graphs) or 1
        whole = graph(module, self.first_part(lam)) / alone
        return round(whole * sum(size * flying for size, flying in graphs)) + versions


@program_of(PDASGD)
class PDASGDProgram(DelayedProgram):
    """One rank's table, and its flights, which come home unit by unit."""

    solver: PDASGD

    def begin(self) -> None:
        super().begin()
        solver, block = self.solver, self.block
        self._threaded = block.count == 1 and (solver.threads or solver.any_order)
        self._check()
        kind: type[Units] = Stashed
        if solver.weights == "current":
            kind = Recomputed
        elif solver.any_order:
            kind = Copied
        self._units = kind(block, solver.clip_norm)
        self._table = solver.table(self._units.count, block.index, block.count)
        self._locks = [Lock() for _ in self._units.slices]
        self._losses: list[Tensor] = []

    def _check(self) -> None:
        asked = "any_order" if self.solver.any_order else "threads"
        if self._threaded and self.links.virtual:
            raise ValueError(
                f"solver.{asked} is true, but links.kind is 'virtual', whose clock counts the "
                "work of one thread a rank: leave one of the two out"
            )

    def train(self, window: Window) -> PhaseStats:
        """A tick a micro-batch; what lands later stays under way."""
        stats = PhaseStats()
        with stats.timed(self.links.now):
            if self.solver.any_order and self.block.count == 1:
                self._race(window, stats)
            else:
                self._follow(window, stats)
            stats.samples += sum(map(len, window.batches))
            stats.steps += len(window.batches)
        return stats

    def _follow(self, window: Window, stats: PhaseStats) -> None:
        """Do what the table says, up to the end of the window."""
        oldest, last = self._ticks - len(self._flights), self._units.count - 1
        flights = {oldest + i: flight for i, flight in enumerate(self._open)}
        rates: dict[UnitPass, float] = {}
        for batch in window.batches:
            for _ in range(min(self.solver.parts(len(batch)), len(batch))):
                rates |= dict.fromkeys(self._table.tick(self._ticks), batch.learning_rate)
                self._ticks += 1
        parts = self._parts(window)

        def do(op: UnitPass, turn: Turn) -> None:
            if op.forward and op.unit == 0:
                part = next(parts)
                flights[op.item] = self._units.begin(part, self._leaf(self._arrived(part)))
            flight = flights[op.item]
            if not op.forward:
                self._lower(flight, op.unit, rates[op], turn)
                if op.unit == 0:
                    del flights[op.item]
                return
            self._units.up(flight, op.unit, turn)
            if op.unit == last:
                self._top(flight, stats)

        if self._threaded:
            WorkerThreads([*rates]).take(do, self._table.backward_slots, last + 1)
        else:
            for op in rates:
                do(op, nullcontext())
        self._flights = deque(flights.values())

    def _race(self, window: Window, stats: PhaseStats) -> None:
        """Take up the window, and home what comes home meanwhile."""

        def rising() -> Iterator[UnitFlight]:
            for part in self._parts(window):
                self._ticks += 1
                flight = self._forward(self._arrived(part), part)
                self._top(flight, stats)
                yield flight

        def home(flight: UnitFlight, stop: Callable[[], bool]) -> None:
            while flight.left and not stop():
                unit = flight.left - 1
                self._lower(flight, unit, self._rate, self._locks[unit])

        race = Race(self._open, self.solver.queue)
        self._flights = deque(race.take(rising(), home, self.solver.backward_slots))

    @property
    def _open(self) -> list[UnitFlight]:
        return [flight for flight in self._flights if isinstance(flight, UnitFlight)]

    def _parts(self, window: Window) -> Iterator[MicroBatch]:
        for batch in window.batches:
            self._rate = batch.learning_rate
            yield from micro_batches(batch, self.solver.parts(len(batch)), self.block)

    def _forward(self, lam: Tensor, part: MicroBatch) -> UnitFlight:
        flight = self._units.begin(part, self._leaf(lam))
        for unit, lock in enumerate(self._locks):
            # a module that runs again elsewhere may not run here; weights alone are open to all
            alone = isinstance(self._units, Recomputed)
            self._units.up(flight, unit, lock if alone else nullcontext())
        return flight

    def _top(self, flight: UnitFlight, stats: PhaseStats) -> None:
        """Hand what has come out of the last unit up, or to the loss."""
        part = flight.part
        if part.labels is None:
            self._up(flight.value.detach())
            flight.value = None
            return
        found = self._units.classify(flight, part.labels)
        flight.part = part._replace(images=None, labels=None)
        stats.scored(found)
        self._losses.append(found.loss)
        if part.ends:
            stats.losses.append(torch.stack(self._losses).sum())
            self._losses = []

    def _lower(self, flight: UnitFlight, unit: int, rate: float, turn: Turn) -> None:
        """Take a flight through a unit, down."""
        block = self.block
        if unit == self._units.count - 1 and not block.last:
            flight.adjoint = [self._adjoint(flight.part, block.dtype)]
        self._units.down(flight, unit, rate, turn)
        if unit == 0 and not block.first:
            lam, (p_in,) = flight.lam, flight.adjoint
            assert lam is not None
            p_in = torch.zeros_like(lam) if p_in is None else laid_out(p_in, lam)
            self._down(lam, p_in, flight.part)

    def _backward(self, flight: Flight) -> None:
        assert isinstance(flight, UnitFlight)
        for unit in reversed(range(flight.left)):
            self._lower(flight, unit, self._rate, nullcontext())

    def state(self) -> State:
        known: dict[tuple[int, ...], Tensors] = {}
        for flight in self._open:
            self._units.keep(flight, known)
        return super().state()

    def load_state(self, state: State) -> None:
        super().load_state(state)
        table = None if self.solver.any_order else self._table
        if table and [flight.left for flight in self._open] != table.under_way(self._ticks):
            # it was kept under other settings: what is under way has no place in this table
            self.drain()

    def _again(self, flight: Flight) -> UnitFlight:
        kept = "current" if flight.weights is None else "stashed"
        if kept != self.solver.weights:
            raise ValueError(
                f"solver.weights is {self.solver.weights!r}, but what is under way was kept for "
                f"{kept!r}: leave it as it was"
            )
        flight.lam = self._leaf(flight.lam)
        return self._units.again(flight)
