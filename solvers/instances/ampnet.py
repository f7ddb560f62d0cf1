"""AMPNet: instances as messages, each on a path of its own (Gaunt et al., arXiv 1705.09786)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Acts, CountOrZero, Needs, NotNegative, Probability
from hybrid.solvers.base import GraphBytes, Setup, Side, program_of
from hybrid.solvers.blocks import heads
from hybrid.solvers.blocks.heads import Head, HeadKind
from hybrid.solvers.delayed.base import (
    NOT_COMPILED,
    NOT_FLOAT16,
    ONE_REPLICA,
    SEVERAL_BLOCKS,
    Delayed,
    tensor_bytes,
)
from hybrid.solvers.delayed.flights import Flight
from hybrid.solvers.delayed.unit_program import UnitProgram
from hybrid.solvers.delayed.units import UnitFlight, unit_memories
from hybrid.solvers.instances.exits import Exit, Scores
from hybrid.solvers.instances.nodes import (
    Instance,
    Nodes,
    RecomputedNodes,
    StashedNodes,
    Tally,
    node_slices,
)
from hybrid.solvers.instances.paths import Paths
from hybrid.solvers.instances.roster import Mailbox, Roster, float64_rows
from hybrid.solvers.instances.schedule import InstancePass, Schedule, limit
from hybrid.solvers.state import State
from hybrid.solvers.windows import PhaseStats, Window

SEVERAL_UNDER_WAY = Acts(
    "units step while an instance is under way (solver.max_active_keys is not 1)",
    lambda run: run.solver.max_active_keys != 1,
)
LEAVES = Acts("instances leave at cuts (solver.exits is above 0)", lambda run: run.solver.exits)
ONE_OUTPUT = Needs(
    "the network gives one tensor of a known shape, which a head can make",
    lambda run: not run.setup.several_outputs and run.setup.output is not None,
)


@dataclass(frozen=True)
class AMPNet(Delayed):
    r"""Following AMPNet (arXiv 1705.09786) on a chain whose depth depends on the instance.

    An instance i, a micro-batch, is a message that goes up through its own units u and back down:

        cache[i] <- x_{u-1},   x_u = f_u(x_{u-1}; w_u)                         forward
        p_{u-1} = (d f_u / d x_{u-1})^T p_u                                    backward
        acc_u <- acc_u + n_i (d f_u / d w_u)^T p_u,   c_u <- c_u + 1,   n_u <- n_u + n_i
        c_u >= min_update_frequency:  w_u <- optimizer step with acc_u / n_u;  acc_u, c_u, n_u <- 0

    where n_i is its number of samples, so a step is by the mean over the samples that contributed.
    The derivatives are at the weights that x_u was computed with (stashed), or at the newest w_u
    and the cached x_{u-1} (current). At most `max_active_keys` instances are under way. A unit that
    an instance's path leaves out (`Skippable`) costs it no time and gets no gradient of it. With
    probability `exits` an instance leaves the network at a cut (all are equally likely) by a head
    of the block before it. Such a head is one more unit, but no part of the network that is tested.

    A path is a pure function of (seed, step, the instance's first sample). So which pass a rank
    does next follows from a simulation that all ranks make (`instances.schedule`): a Kahn network,
    whose bits depend neither on links nor on time. The pipeline is not flushed within an epoch. At
    its end, and before a serial round, all backward passes are completed, and units step by what
    has been added up since their last step.

    Staleness is the number of a unit's updates between an instance's forward and its backward pass.
    Block k has at most `instances.schedule.limit` instances under way, so with equal paths, whose
    backward passes are completed in order, the staleness is at most
    ceil((limit - 1) / min_update_frequency), which for max_active_keys = K is
    ceil((K-1-k) / min_update_frequency). max_active_keys = 1 is SGD with accumulated gradients.
    """

    name: ClassVar[str] = "ampnet"
    has_auxiliary_weights: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"labels"})

    needs: ClassVar = (NOT_COMPILED, ONE_REPLICA, NOT_FLOAT16)
    acts: ClassVar = {"solver.messages": SEVERAL_BLOCKS}

    micro_batches: CountOrZero = 0
    """m, instances of a mini-batch, each with its path; 0: 8, but at least 16 samples each."""
    clip_norm: NotNegative = 0.0
    """Largest norm of one unit's gradient, 0: any; serial rounds have correction.clip_norm."""
    max_active_keys: Annotated[CountOrZero, SEVERAL_BLOCKS] = 0
    """Most instances under way in all blocks together; 0: twice as many as blocks."""
    min_update_frequency: CountOrZero = 0
    """Instances that contribute to a unit's step; 0: as many as a mini-batch has."""
    weights: Annotated[Literal["stashed", "current"], SEVERAL_BLOCKS, SEVERAL_UNDER_WAY] = "stashed"
    """Those of a backward pass: that its forward pass used, or the newest, on the same inputs."""
    exits: Annotated[Probability, SEVERAL_BLOCKS, ONE_OUTPUT] = 0.0
    """Probability that an instance leaves at a cut, by a head of the block before it."""
    head: Annotated[HeadKind, LEAVES] = "linear"
    """Of exits, behind a mean over pixels: linear, or mlp:WIDTH with a hidden layer."""
    any_order: Annotated[bool, SEVERAL_BLOCKS] = False
    """A rank works first on what arrives first, by the clock. No run can be repeated."""

    def check(self, setup: Setup) -> None:
        if self.exits:
            heads.check_cuts(setup, range(1, setup.blocks), "leave solver.exits out")

    @property
    def repeatable(self) -> bool:
        return not self.any_order

    @property
    def reports_losses(self) -> bool:
        return False  # of what a drain completes, or what leaves by an exit, no loss is reported

    def active_keys(self, count: int) -> int:
        """max_active_keys of K = `count`."""
        return self.max_active_keys or 2 * count

    def delay(self, index: int, count: int) -> int:
        return limit(index, count, self.active_keys(count)) - 1 if count > 1 else 0

    def steps_late(self, index: int, count: int, size: int) -> float:
        return self.delay(index, count) / self.frequency(size)

    def frequency(self, size: int) -> int:
        """min_update_frequency of mini-batches of `size`."""
        return self.min_update_frequency or self.num_micro_batches(size)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, most = self.first_part(lam), self.delay(index, count) + 1
        if self.weights == "stashed":
            older = ceil((most - 1) / self.frequency(len(lam)))
            return most * graph(module, x) + older * tensor_bytes(module.parameters())
        units = [*unit_memories(module, node_slices(module), x, graph)]
        return most * sum(unit.input for unit in units) + max(unit.graph for unit in units)


@program_of(AMPNet)
class AMPNetProgram(UnitProgram):
    """One rank's instances, and the messages that came before they were needed."""

    solver: AMPNet
    _units: Nodes

    def begin(self) -> None:
        super().begin()
        solver, block, size = self.solver, self.block, self.setup.batch_size
        self._check()
        kind = StashedNodes if solver.weights == "stashed" else RecomputedNodes
        frequency = solver.frequency(size)
        self._units = kind(block, solver.clip_norm, frequency, size)
        self._exit: Exit | None = None
        if solver.exits and not block.last:
            assert self.setup.output is not None
            head = Head(solver.head, block, self.setup.shapes[block.index], self.setup.output)
            self._exit = Exit(block, head, frequency, size, solver.clip_norm)
        self._paths: Paths | None = None
        self._reset()

    def _check(self) -> None:
        if self.solver.any_order and self.links.clocked:
            raise ValueError(
                "solver.any_order is true, but links.kind is 'virtual', which runs ranks in turn: "
                "leave one of the two out"
            )

    def _reset(self) -> None:
        """No instance is under way, as after a drain."""
        count, self._ticks = self.block.count, 0
        self._schedule = Schedule(count, self.solver.active_keys(count))
        self._roster = Roster(self.block, self.block.last or self._exit is not None)
        self._under_way: dict[int, Instance] = {}
        """Instances whose forward pass over this block is done and whose backward pass is not."""
        tensors = self._wire.tensors
        self._from_below, self._from_above = (
            Mailbox(self.links, above, tensors) for above in (False, True)
        )

    def train(self, window: Window) -> PhaseStats:
        """The forward passes of the window's instances, and the backward passes due meanwhile."""
        stats = PhaseStats()
        with stats.timed(self.links):
            paths, first = self._drawn_paths(), self._ticks
            for batch in window.batches:
                self._roster.add_batch(batch, self.num_micro_batches(batch), paths)
            self._ticks = len(self._roster.paths)
            images, scores = self._images(window), Scores()
            if self.solver.any_order:
                self._run_in_any_order(images, scores)
            else:
                lengths = self._roster.path_lengths(first)
                self._run_schedule(self._schedule.extend(lengths, first), images, scores)
            stats.samples += sum(map(len, window.batches))
            stats.steps += len(window.batches)
            scores.report(stats)
            self._units.report_staleness(stats)
        return stats

    def drain(self) -> PhaseStats:
        stats = PhaseStats()
        if self._ticks:
            self._drawn_paths()
            if self.solver.any_order:
                self._run_in_any_order(iter(()), Scores())
            else:
                self._run_schedule(self._schedule.drain(), iter(()), Scores())
            for unit in range(self._units.count):
                self._units.step(unit)
            if self._exit is not None:
                self._exit.step()
            self._units.report_staleness(stats)
        self._reset()
        self.links.flush()
        return stats

    def _drawn_paths(self) -> Paths:
        """How paths are drawn; all ranks learn of all units, and of a checkpoint's instances."""
        if self._paths is None:
            survivals = self.links.all_gather(self._units.survivals)
            self._paths = Paths(self.setup.seed, survivals, self.solver.exits)
        if len(self._roster.paths) < len(self._roster.drawn):
            self._roster.redraw(self._paths)
            self._schedule.extend(self._roster.path_lengths(), 0)
        return self._paths

    def _images(self, window: Window) -> Iterator[Tensor]:
        for batch in window.batches:
            yield from batch.images().tensor_split(self.num_micro_batches(batch))

    def _run_schedule(
        self, ranks: Sequence[Sequence[InstancePass]], images: Iterator[Tensor], scores: Scores
    ) -> None:
        """Do the passes of this rank; the neighbors' say in which order messages come."""
        k, roster = self.block.index, self._roster
        if k:
            sent = (item for forward, item in ranks[k - 1] if forward)
            self._from_below.expect(item for item in sent if roster.paths[item].last >= k)
        if not self.block.last:
            self._from_above.expect(item for forward, item in ranks[k + 1] if not forward)
        for op in ranks[k]:
            if op.forward:
                self._forward_pass(op.item, images, scores)
            else:
                self._backward(self._under_way.pop(op.item))

    def _run_in_any_order(self, images: Iterator[Tensor], scores: Scores) -> None:
        """Do what can be done, until all forward passes are done; without any, all backward passes.

        Instances come up in order; a message from above begins with its instance's number.
        """
        block, roster = self.block, self._roster
        most = self.solver.delay(block.index, block.count) + 1
        waiting = sorted(roster.waiting, reverse=True)
        drains = not waiting
        while waiting or (drains and self._under_way):
            room = bool(waiting) and len(self._under_way) < most
            if not block.last and not (room and block.first and not self.links.has_message("next")):
                below: list[Side] = ["previous"] if room and not block.first else []
                if self.links.wait_any("next", *below) == "next":
                    item = int(self.links.from_next())
                    self._from_above.expect([item])
                    self._backward(self._under_way.pop(item))
                    continue
            item = waiting.pop()
            if not block.first:
                self._from_below.expect([item])
            self._forward_pass(item, images, scores)
            if roster.ends_here(item):
                self._backward(self._under_way.pop(item))

    def _forward_pass(self, item: int, images: Iterator[Tensor], scores: Scores) -> None:
        """An instance's forward pass over the block, and its loss if it goes no further."""
        (part, rate), block, roster = self._roster.waiting.pop(item), self.block, self._roster
        if block.first:
            lam = next(images)
        else:
            lam = self._wire.receive(self._from_below.message(item), block.dtype)
        labels = part.labels
        flight = self._units.new_flight(part._replace(labels=None), self._leaf(lam))
        flight.item, flight.rate = item, rate
        flight.active = roster.paths[item].units[block.index]
        self._forward_units(flight)
        self._under_way[item] = flight
        if not roster.ends_here(item):
            self._send_output(flight.value.detach())
            flight.value = None
            return
        assert labels is not None
        if self._exit is not None:
            self._exit.classify(flight, labels)
        else:
            scores.add(part, self._units.classify(flight, labels))

    def _backward(self, flight: Flight) -> None:
        assert isinstance(flight, Instance)
        if not self._roster.ends_here(flight.item):
            message, size = self._from_above.message(flight.item), flight.part.size
            flight.adjoint = [self._wire.receive_adjoint(message, self.block.dtype, size)]
        self._rate = flight.rate
        super()._backward(flight)

    def _send_input_adjoint(self, flight: UnitFlight) -> None:
        if self.solver.any_order:
            assert isinstance(flight, Instance)
            self.links.to_previous(torch.tensor([flight.item]))
        super()._send_input_adjoint(flight)

    def state(self) -> State:
        if self.solver.any_order:
            self.drain()
        head = {} if self._exit is None else self._exit.head.state()
        if not self._ticks:
            return State(block=head)
        early = self._from_below.state() | self._from_above.state()
        self._flights = deque(self._under_way.values())
        found = super().state().flight | early | self._roster.state()
        found["asked"] = self._fixed_settings()
        found["tallies"] = float64_rows(tally.numbers() for tally in self._units.tallies)
        if self._exit is not None:
            found |= self._exit.state()
        return State(flight=found, block=head)

    def _fixed_settings(self) -> Tensor:
        """Settings that cannot change while instances are under way."""
        solver = self.solver
        return float64_rows([[self._schedule.most, solver.exits, solver.weights == "current"]])

    def load_state(self, state: State) -> None:
        if state.block and self._exit is None:
            raise ValueError(
                f"the checkpoint has heads of exits, but solver.exits is {self.solver.exits:g}: "
                "resume with the exits it was made with"
            )
        if state.block and self._exit is not None:
            self._exit.set_head(Head.of_state(self.solver.head, self.block, state.block))
        found = state.flight
        if not found:
            return
        if not torch.equal(found["asked"], self._fixed_settings()):
            most, exits, current = found["asked"][0].tolist()
            raise ValueError(
                f"what is under way was kept with solver.max_active_keys={most:g}, "
                f"solver.exits={exits:g} and solver.weights={'current' if current else 'stashed'}: "
                "leave them as they were"
            )
        self._units.tallies = [Tally.of(numbers) for numbers in found["tallies"].tolist()]
        super().load_state(state)
        self._under_way = {f.item: f for f in self._flights if isinstance(f, Instance)}
        self._flights.clear()
        for each in (self._roster, self._from_below, self._from_above):
            each.load_state(found)
        if self._exit is not None:
            self._exit.load_state(found)

    def _adjoints_sent(self) -> int:
        return 0  # the mailboxes hold them
