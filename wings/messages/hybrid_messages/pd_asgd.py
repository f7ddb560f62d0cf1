"""PD-ASGD: decoupled forward and backward passes, stepping layer by layer (arXiv 2410.05985)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import SEVERAL_BLOCKS, Acts, CountOrZero, Needs, NotNegative
from hybrid.solvers.base import GraphBytes, program_of
from hybrid.solvers.delayed.base import Delayed
from hybrid.solvers.engine.policies import Stash
from hybrid.solvers.engine.schedule import Action, Kind, Span
from hybrid.solvers.layers.branches import nothing_left_out
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.micro_batches import MicroBatch, split_into_micro_batches
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.numerics.weights import trained_bytes
from hybrid.solvers.peers import Sync
from hybrid.solvers.state import State
from hybrid.solvers.windows import PhaseStats, Window
from hybrid_messages.by_unit.timetable import MOST_SLOTS, Timetable, UnitPass
from hybrid_messages.by_unit.unit_passes import (
    BY_UNITS,
    CopyingStash,
    UnitFlight,
    UnitProgram,
    Units,
    unit_slices,
)

ONE_BLOCK = Acts(
    "there is one block, since several alternate between their passes",
    lambda run: run.setup.blocks == 1,
)
ACCUMULATES = Acts(
    "gradients accumulate, since with solver.any_order a step follows every backward pass",
    lambda run: run.setup.blocks > 1 or not run.solver.any_order,
)
WAITS = Acts(
    "solver.backward_slots is 0 or 1, or solver.any_order is true",
    lambda run: run.solver.any_order or run.solver.backward_slots != MOST_SLOTS,
)
ORDERED_REPLICAS = Needs(
    "there is one replica, since replicas sum gradients in the order of a table",
    lambda run: run.setup.replicas == 1,
)
SUMMED = Acts(
    "there are replicas, each of one block",
    lambda run: run.setup.replicas > 1 and run.setup.blocks == 1,
)
THREAD_FOR_EVERY_SLOT = Needs(
    "solver.backward_slots is 1 or 2, since with 0 one thread does both passes",
    lambda run: run.solver.backward_slots or run.setup.blocks > 1,
)


@dataclass(frozen=True)
class PDASGD(Delayed):
    r"""Following partial decoupled ASGD with layer-wise updates (arXiv 2410.05985).

    A block is a chain of units u = 0 .. M-1. Forward passes never wait for a backward pass. A
    backward pass goes from the head down, and steps a unit as soon as its gradient is there:

        x_u = f_u(x_{u-1}; w_u)                                          forward slot
        g_u = (d f_u / d w_u)^T p_u,   p_{u-1} = (d f_u / d x_{u-1})^T p_u
        w_u <- optimizer step with g_u, before the unit below goes on     backward slot

    The derivatives are at the weights that x_u was computed with. With one block, `Timetable` says
    when which slot takes what: steps are ordered by (tick, unit, mini-batch), and every forward
    part that begins later uses the new weights. In the paper's ratio, 1 forward and 2 backward
    slots, the unit at relative depth u / M steps 3 (1 - u / M) ticks (forward passes) after its
    weights were read: its gradient is ceil(3 (1 - u / M)) - 1 steps late, and that of the head 0
    (M >= 3). With one slot and no queue the method is SGD; with a queue q all units are q steps
    late. The table does not depend on a clock, so the load of the machine does not change the
    result.

    R replicas of one block each follow the table on their shares of every mini-batch, and sum a
    unit's gradients while the backward pass goes on below it. The step comes at its place in the
    table, or `lag` ticks later: the sum has that time to arrive, and a replica may be that far
    behind before the others wait. Weights are equal on all replicas after every step, and with
    lag = 0 they are those of one rank that accumulates the R shares. Running statistics are
    averaged when nothing is under way: a moving average of means is the mean of moving averages.
    In the paper a replica sends its updates to one other at random, and never waits.

    Over K > 1 blocks each takes a forward and a backward pass by turns, in FDG's order
    d_k = 2 (K-1-k): one slot whose queue is d_k. No forward pass reads a unit's weights between its
    step and the end of the backward pass, so nothing is gained by stepping early. It is FDG bit for
    bit, except that clipping is by units.
    """

    name: ClassVar[str] = "pd-asgd"
    cuts_inside: ClassVar[bool] = False
    steps_alike: ClassVar[bool] = False

    needs: ClassVar = (
        *BY_UNITS,
        Needs(
            "replicas sum every gradient in float32 (sync.name=all-reduce, sync.messages=float32)",
            lambda run: (
                run.sync.program.begin_sum is not Sync.begin_sum
                and getattr(run.sync, "messages", "float32") == "float32"
            ),
            "leave [sync] out, or choose another solver",
        ),
    )
    acts: ClassVar = {"solver.messages": SEVERAL_BLOCKS, "solver.adjoints": SEVERAL_BLOCKS}

    micro_batches: Annotated[CountOrZero, ACCUMULATES] = 1
    """m, micro-batches per mini-batch: more make delays shorter; 0: as `ddg` chooses it."""
    clip_norm: NotNegative = 0.0
    """Clip the norm of each unit's gradient (not in serial rounds); 0: no clipping."""
    backward_slots: Annotated[CountOrZero, ONE_BLOCK] = 2
    """Backward slots beside the forward slot: 1 or 2; 0: one slot alternates."""
    queue: Annotated[CountOrZero, ONE_BLOCK, WAITS] = 0
    """Graphs that may wait for a backward slot before the forward slot stalls."""
    any_order: Annotated[bool, ONE_BLOCK, THREAD_FOR_EVERY_SLOT, ORDERED_REPLICAS] = False
    """Unordered threads on shared weights, as in the paper; not reproducible."""
    lag: Annotated[CountOrZero, SUMMED] = 0
    """Ticks (forward passes) from a unit's gradient to its step, while replicas sum it."""

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
        """Of the first unit, by the table; `any_order` comes close to it."""
        return 2 * (count - 1 - index) if count > 1 else self.table(3, index, count).delay(0)

    def schedule(
        self, index: int, count: int, span: Span, budget: LocalBudget | None = None
    ) -> list[Action]:
        """Empty: passes go unit by unit, as `Timetable` says."""
        return []

    def steps_late(self, index: int, count: int, size: int) -> float:
        # units of a single block have different delays
        return super().steps_late(index, count, size) if count > 1 else 0.0

    def table(self, units: int, index: int, count: int) -> Timetable:
        """The table of block `index` of `count` with this number of units."""
        if count > 1:
            return Timetable(units, 0, self.delay(index, count))
        return Timetable(units, min(self.backward_slots, MOST_SLOTS), self.queue, self.lag)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, slices = self.first_part(lam, count), unit_slices(module)
        table = self.table(len(slices), index, count)
        parts = [*module._modules.values()]  # children() leaves out the second use of a module
        parts_of_batch, whole = self.num_micro_batches(len(lam), count), graph(module, x)
        graphs, one_each, older = 0, 0, 0
        with torch.no_grad(), frozen_statistics(module), nothing_left_out():
            for number, some in enumerate(slices):
                unit = nn.Sequential(*(part for part in parts[some] if part is not None))
                late, kept = table.delay(number), graph(unit, x)
                graphs, one_each = graphs + (late + 1) * kept, one_each + kept
                older += -(-late // parts_of_batch) * trained_bytes(unit)
                x = unit(x).detach().requires_grad_()
        # neighbors share what lies between them
        return round(whole / (one_each or 1) * graphs) + older


@program_of(PDASGD)
class PDASGDProgram(UnitProgram):
    """One rank's table, and its flights, whose backward passes go unit by unit."""

    solver: PDASGD

    def begin(self) -> None:
        super().begin()
        solver, block = self.solver, self.block
        self._any_order = solver.any_order and block.count == 1
        if self._any_order and self.links.clocked:
            raise ValueError(
                "solver.any_order is true, but links.kind is 'virtual', whose clock counts the "
                "work of one thread for each rank: leave one of the two out"
            )
        stash = CopyingStash if self._any_order else Stash
        self.units = Units(block, solver.clip_norm, stash=stash, lag=solver.lag)
        self._table = solver.table(self.units.count, block.index, block.count)

    def train(self, window: Window) -> PhaseStats:
        """One tick for each micro-batch; steps that come later stay under way."""
        stats = PhaseStats()
        with stats.timed(self.links):
            if self._any_order:
                self._train_in_any_order(window, stats)
            else:
                self._train_by_table(window, stats)
            stats.samples += sum(map(len, window.batches))
            stats.steps += len(window.batches)
        return stats

    def _train_by_table(self, window: Window, stats: PhaseStats) -> None:
        last, flights = self.units.count - 1, self.unit_flights
        passes: list[UnitPass] = []
        for batch in window.batches:
            for _ in range(self.num_micro_batches(batch)):
                passes += self._table.passes_of_tick(self._ticks)
                self._ticks += 1
        parts = self._micro_batches(window)
        for op in passes:
            if op.kind is Kind.STEP:
                self.units.summed.complete(op.unit, op.item)
                continue
            if op.kind is Kind.BACKWARD:
                flights[op.item].item = op.item
                self.backward_unit(flights[op.item], op.unit)
                if op.unit == 0:
                    del flights[op.item]
                continue
            if op.unit == 0:
                part = next(parts)
                flights[op.item] = self.units.new_flight(part, self._leaf(self._fetch(part)))
            self.units.forward(flights[op.item], op.unit)
            if op.unit == last:
                self._send_or_compute_loss(flights[op.item], stats)
        self._flights = {**flights}

    def _train_in_any_order(self, window: Window, stats: PhaseStats) -> None:
        """All forward passes of the window, and the backward passes that threads have time for."""

        def forward_passes() -> Iterator[UnitFlight]:
            for part in self._micro_batches(window):
                self._ticks += 1
                flight = self.units.new_flight(part, self._leaf(self._fetch(part)))
                self.forward_units(flight)
                self._send_or_compute_loss(flight, stats)
                yield flight

        def backward_pass(flight: UnitFlight, stop: Callable[[], bool]) -> None:
            while flight.units_left and not stop():
                self.backward_unit(flight, flight.units_left - 1)

        threads = AnyOrder(self.unit_flights.values(), self.solver.queue)
        left = threads.run(forward_passes(), backward_pass, self.solver.backward_slots)
        self._flights = dict(enumerate(left, self._ticks - len(left)))

    def _micro_batches(self, window: Window) -> Iterator[MicroBatch]:
        for batch in window.batches:
            yield from split_into_micro_batches(batch, self.num_micro_batches(batch), self.block)

    def _send_or_compute_loss(self, flight: UnitFlight, stats: PhaseStats) -> None:
        """Send the last unit's output up; in the last block it goes into the loss."""
        part = flight.part
        if part.labels is None:
            self._wire.send(self.links.to_next, flight.value.detach())
            flight.value = None
            return
        result = self.units.compute_loss(flight, part.labels)
        flight.part = part._replace(images=None, labels=None, weight=None)
        stats.count_metric(result)
        self._losses.append(result.loss)
        if part.is_last:
            stats.losses.append(torch.stack(self._losses).sum())
            self._losses.clear()

    def backward_unit(self, flight: UnitFlight, unit: int) -> None:
        if unit == self.units.count - 1 and not self.block.last:
            flight.adjoint = [self._receive_adjoint(flight, self.block.formats[-1])]
        super().backward_unit(flight, unit)

    def load_state(self, state: State) -> None:
        super().load_state(state)
        left = [flight.units_left for flight in self.unit_flights.values()]
        placed = left == self._table.under_way(self._ticks) and all(
            self._table.step_waits(self._ticks, step.item, unit)
            for unit, waiting in enumerate(self.units.summed.waiting)
            for step in waiting
        )
        if not self._any_order and not placed:
            # it was saved under other settings: what is under way has no place in this table
            self.drain()


class _OtherFailedError(Exception):
    """Another thread has failed, and its error says why."""


class AnyOrder:
    """This thread for forward passes, and others for backward passes."""

    def __init__(self, waiting: Iterable[UnitFlight], queue: int) -> None:
        self._waiting = deque(waiting)
        self._queue = queue
        """Flights that may wait before the next forward pass begins."""
        self._broken_off: list[UnitFlight] = []
        self._stopping = False
        self._condition = Condition()
        self._failures: list[BaseException] = []

    def run(
        self,
        forward_passes: Iterator[UnitFlight],
        backward_pass: Callable[[UnitFlight, Callable[[], bool]], None],
        threads: int,
    ) -> list[UnitFlight]:
        """Run all forward passes; gives the flights whose backward pass is not complete, in order.

        `backward_pass` goes through a flight's units until the function that it is given is true.
        The first failure is raised here, after all threads have ended.
        """
        count = torch.get_num_threads()

        def backward() -> None:
            torch.set_num_threads(count)  # of each thread, or sums would differ
            while flight := self._next_waiting():
                backward_pass(flight, lambda: self._stopping)
                if flight.units_left:
                    self._broken_off.append(flight)

        others = [
            Thread(target=self._guarded, args=(backward,), daemon=True) for _ in range(threads)
        ]
        for thread in others:
            thread.start()
        self._guarded(lambda: self._forward(forward_passes))
        for thread in others:
            thread.join()
        if self._failures:
            raise self._failures[0]
        return sorted([*self._broken_off, *self._waiting], key=lambda flight: flight.part.step)

    def _forward(self, forward_passes: Iterator[UnitFlight]) -> None:
        try:
            for flight in forward_passes:
                with self._condition:
                    self._waiting.append(flight)
                    self._condition.notify_all()
                    self._wait_for(lambda: len(self._waiting) <= self._queue)
        finally:
            with self._condition:
                self._stopping = True
                self._condition.notify_all()

    def _next_waiting(self) -> UnitFlight | None:
        with self._condition:
            self._wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            flight = self._waiting.popleft()
            self._condition.notify_all()
            return flight

    def _wait_for(self, ready: Callable[[], object]) -> None:
        """Wait within the condition; _OtherFailedError if another thread fails meanwhile."""
        self._condition.wait_for(lambda: ready() or self._failures)
        if self._failures:
            raise _OtherFailedError

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _OtherFailedError:
            pass
        except BaseException as error:
            with self._condition:
                self._failures.append(error)
                self._condition.notify_all()
