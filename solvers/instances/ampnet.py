"""AMPNet: instances as messages, each on a path of its own (Gaunt et al., arXiv 1705.09786)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from solvers.acting import Acts, CountOrZero, Needs, NotNegative, Probability
from solvers.base import GraphBytes, Setup, Side, program_of
from solvers.blocks import heads
from solvers.blocks.buffers import frozen_statistics
from solvers.blocks.heads import Head, HeadKind
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
from solvers.delayed.units import laid_out
from solvers.exact.micro_batches import MicroBatch
from solvers.instances.leaving import Exit, Scores
from solvers.instances.nodes import (
    Instance,
    Nodes,
    RecomputedNodes,
    StashedNodes,
    Tally,
    divided,
)
from solvers.instances.order import InstancePass, Order, limit
from solvers.instances.paths import Paths
from solvers.instances.roll import Mail, Roll, table
from solvers.layers.depth import decided
from solvers.state import State, Tensors
from solvers.windows import PhaseStats, Window

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

    An instance i, a micro-batch, is a message that goes up through its own units u and comes home:

        cache[i] <- x_{u-1},   x_u = f_u(x_{u-1}; w_u)                         forward
        p_{u-1} = (d f_u / d x_{u-1})^T p_u                                    backward
        acc_u <- acc_u + n_i (d f_u / d w_u)^T p_u,   c_u <- c_u + 1,   n_u <- n_u + n_i
        c_u >= min_update_frequency:  w_u <- optimizer step with acc_u / n_u;  acc_u, c_u, n_u <- 0

    with n_i its samples: the mean over those that contributed. The derivatives are at the weights
    that x_u met (stashed), or at the newest w_u and the cached x_{u-1} (current). At most
    `max_active_keys` instances are under way; a unit that an instance's path leaves out
    (`layers.depth`) costs it nothing, and gets nothing of it. With probability `exits` it leaves
    at a cut, any of them alike, by a head of the block before it: one more unit, which is no part
    of the network that is tested.

    A path is a pure function of (seed, step, the instance's first sample), so what a rank takes up
    and home next follows from a simulation that all ranks make (`instances.order`): a Kahn network,
    whose bits depend neither on links nor on time. No pipeline is flushed within an epoch; at its
    end, and before a serial round, all come home, and units step by what is left over.

    Staleness, a unit's updates from an instance's forward to its backward pass: block k has at most
    `instances.order.limit` under way, so with equal paths, which come home in order, at most
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
    """Largest norm of one unit's gradient; 0: no clipping."""
    max_active_keys: Annotated[CountOrZero, SEVERAL_BLOCKS] = 0
    """Instances under way at most, of all blocks together; 0: twice as many as blocks."""
    min_update_frequency: CountOrZero = 0
    """Instances that contribute to a unit's step; 0: as many as a mini-batch has."""
    weights: Annotated[Literal["stashed", "current"], SEVERAL_BLOCKS, SEVERAL_UNDER_WAY] = "stashed"
    """Those of a backward pass: that its forward pass met, or the newest, on the same inputs."""
    exits: Annotated[Probability, SEVERAL_BLOCKS, ONE_OUTPUT] = 0.0
    """Probability that an instance leaves at a cut, by a head of the block before it."""
    head: Annotated[HeadKind, LEAVES] = "linear"
    """Of exits, behind a mean over pixels: linear, or mlp:WIDTH with a hidden layer."""
    any_order: Annotated[bool, SEVERAL_BLOCKS] = False
    """What arrives first is taken first, by the clock. No run can be repeated."""

    def check(self, setup: Setup) -> None:
        if self.exits:
            heads.check_cuts(setup, range(1, setup.blocks), "leave solver.exits out")

    @property
    def repeatable(self) -> bool:
        return not self.any_order

    @property
    def reports_losses(self) -> bool:
        return False  # what a drain brings home, or leaves before the last block, tells nobody

    def most(self, count: int) -> int:
        """max_active_keys of K = `count`."""
        return self.max_active_keys or 2 * count

    def delay(self, index: int, count: int) -> int:
        return limit(index, count, self.most(count)) - 1 if count > 1 else 0

    def frequency(self, size: int) -> int:
        """min_update_frequency of mini-batches of `size`."""
        return self.min_update_frequency or self.parts(size)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, flying = self.first_part(lam), self.delay(index, count) + 1
        if self.weights == "stashed":
            older = ceil((flying - 1) / self.frequency(len(lam)))
            return flying * graph(module, x) + older * tensor_bytes(module.parameters())
        parts, inputs, largest = [*module._modules.values()], 0, 0
        with torch.no_grad(), frozen_statistics(module), decided():
            for some in divided(module):
                unit = nn.Sequential(*(part for part in parts[some] if part is not None))
                inputs, largest = inputs + tensor_bytes([x]), max(largest, graph(unit, x))
                x = unit(x).detach().requires_grad_()
        return flying * inputs + largest


@program_of(AMPNet)
class AMPNetProgram(DelayedProgram):
    """One rank's instances, and the messages that have come before their turn."""

    solver: AMPNet

    def begin(self) -> None:
        super().begin()
        solver, block, size = self.solver, self.block, self.setup.batch_size
        self._check()
        kind = StashedNodes if solver.weights == "stashed" else RecomputedNodes
        frequency = solver.frequency(size)
        self._nodes: Nodes = kind(block, solver.clip_norm, frequency, size)
        self._exit: Exit | None = None
        if solver.exits and not block.last:
            assert self.setup.output is not None
            head = Head(solver.head, block, self.setup.shapes[block.index], self.setup.output)
            self._exit = Exit(block, head, frequency, size, solver.clip_norm)
        self._paths: Paths | None = None
        self._anew()

    def _check(self) -> None:
        if self.solver.any_order and self.links.virtual:
            raise ValueError(
                "solver.any_order is true, but links.kind is 'virtual', which runs ranks in turn: "
                "leave one of the two out"
            )

    def _anew(self) -> None:
        """As after a drain."""
        count, self._ticks = self.block.count, 0
        self._order = Order(count, self.solver.most(count))
        self._roll = Roll(self.block.index, self.block.last or self._exit is not None)
        self._flying: dict[int, Instance] = {}
        """Those that have come up here and not gone home."""
        tensors = self._wire.tensors
        self._below, self._above = (Mail(self.links, above, tensors) for above in (False, True))

    def train(self, window: Window) -> PhaseStats:
        """Take up the window's instances, and home what comes home meanwhile."""
        stats = PhaseStats()
        with stats.timed(self.links.now):
            paths, first = self._prepared(), self._ticks
            for batch in window.batches:
                self._roll.admit(batch, self.solver.parts(len(batch)), paths)
            self._ticks = len(self._roll.paths)
            images, scores = self._images(window), Scores()
            if self.solver.any_order:
                self._race(images, scores)
            else:
                self._follow(self._order.take(self._roll.lengths(first), first), images, scores)
            stats.samples += sum(map(len, window.batches))
            stats.steps += len(window.batches)
            scores.tell(stats)
            self._nodes.tell(stats)
        return stats

    def drain(self) -> PhaseStats:
        stats = PhaseStats()
        if self._ticks:
            self._prepared()
            if self.solver.any_order:
                self._race(iter(()), Scores())
            else:
                self._follow(self._order.drain(), iter(()), Scores())
            for unit in range(self._nodes.count):
                self._nodes.settle(unit)
            if self._exit is not None:
                self._exit.settle()
            self._nodes.tell(stats)
        self._anew()
        self.links.flush()
        return stats

    def _prepared(self) -> Paths:
        """Let all ranks know all units, and what a checkpoint says has come in."""
        if self._paths is None:
            survivals = self.links.all_gather(self._nodes.survivals)
            self._paths = Paths(self.setup.seed, survivals, self.solver.exits)
        if len(self._roll.paths) < len(self._roll.drawn):
            self._roll.redraw(self._paths)
            self._order.take(self._roll.lengths(), 0)
        return self._paths

    def _images(self, window: Window) -> Iterator[Tensor]:
        for batch in window.batches:
            yield from batch.images().tensor_split(self.solver.parts(len(batch)))

    def _follow(
        self, everyone: Sequence[Sequence[InstancePass]], images: Iterator[Tensor], scores: Scores
    ) -> None:
        """Do what the simulation says."""
        k, roll = self.block.index, self._roll
        if k:
            ups = (item for forward, item in everyone[k - 1] if forward)
            self._below.expect(item for item in ups if roll.paths[item].last >= k)
        if not self.block.last:
            self._above.expect(item for forward, item in everyone[k + 1] if not forward)
        for op in everyone[k]:
            if op.forward:
                self._take_up(op.item, images, scores)
            else:
                self._take_home(op.item)

    def _race(self, images: Iterator[Tensor], scores: Scores) -> None:
        """Take what is there, until all have come up, or without any until all are home.

        Instances come up in order; what comes home says who it is.
        """
        block, roll = self.block, self._roll
        most = self.solver.delay(block.index, block.count) + 1
        waiting = sorted(roll.waiting, reverse=True)
        drains = not waiting
        while waiting or (drains and self._flying):
            room = bool(waiting) and len(self._flying) < most
            if not block.last and not (room and block.first and not self.links.has_message("next")):
                below: list[Side] = ["previous"] if room and not block.first else []
                if self.links.wait_any("next", *below) == "next":
                    item = int(self.links.from_next())
                    self._above.expect([item])
                    self._take_home(item)
                    continue
            item = waiting.pop()
            if not block.first:
                self._below.expect([item])
            self._take_up(item, images, scores)
            if roll.ends(item):
                self._take_home(item)

    def _take_up(self, item: int, images: Iterator[Tensor], scores: Scores) -> None:
        """An instance's forward pass over the block."""
        (part, rate), block, nodes = self._roll.waiting.pop(item), self.block, self._nodes
        here = block.first
        lam = next(images) if here else self._wire.receive(self._below.of(item), block.dtype)
        path, labels = self._roll.paths[item], part.labels
        flight = nodes.begin(part._replace(labels=None), self._leaf(lam))
        flight.item, flight.rate, flight.active = item, rate, path.units[block.index]
        for unit in range(nodes.count):
            nodes.up(flight, unit, nullcontext())
        self._flying[item] = flight
        if not self._roll.ends(item):
            self._up(flight.value.detach())
            flight.value = None
        elif self._exit is not None and labels is not None:
            self._exit.leave(flight, labels)
        else:
            assert labels is not None
            scores.add(part, nodes.classify(flight, labels))

    def _take_home(self, item: int) -> None:
        """Its backward pass."""
        flight, block = self._flying.pop(item), self.block
        if not self._roll.ends(item):
            get = self._above.of(item)
            flight.adjoint = [self._wire.receive_adjoint(get, block.dtype, flight.part.size)]
        for unit in reversed(range(self._nodes.count)):
            self._nodes.down(flight, unit, flight.rate, nullcontext())
        if not block.first:
            lam, (p_in,) = flight.lam, flight.adjoint
            assert lam is not None
            if self.solver.any_order:
                self.links.to_previous(torch.tensor([item]))
            p_in = torch.zeros_like(lam) if p_in is None else laid_out(p_in, lam)
            self._down(lam, p_in, flight.part)

    def state(self) -> State:
        if self.solver.any_order:
            self.drain()
        kept = {} if self._exit is None else self._exit.head.state()
        if not self._ticks:
            return State(block=kept)
        mail = self._below.kept() | self._above.kept()
        versions: dict[tuple[int, ...], Tensors] = {}
        for flight in self._flying.values():
            self._nodes.keep(flight, versions)
        self._flights = deque(self._flying.values())
        found = super().state().flight | mail | self._roll.kept()
        found["asked"] = self._asked()
        found["tallies"] = table(tally.kept() for tally in self._nodes.tallies)
        if self._exit is not None:
            found |= self._exit.kept()
        return State(flight=found, block=kept)

    def _asked(self) -> Tensor:
        """Settings that what is under way depends on."""
        solver = self.solver
        return table([[self._order.most, solver.exits, solver.weights == "current"]])

    def load_state(self, state: State) -> None:
        if state.block and self._exit is None:
            raise ValueError(
                f"the checkpoint has heads of exits, but solver.exits is {self.solver.exits:g}: "
                "resume with the exits it was made with"
            )
        if state.block and self._exit is not None:
            self._exit.take(Head.of_state(self.solver.head, self.block, state.block))
        found = state.flight
        if not found:
            return
        if not torch.equal(found["asked"], self._asked()):
            most, exits, current = found["asked"][0].tolist()
            raise ValueError(
                f"what is under way was kept with solver.max_active_keys={most:g}, "
                f"solver.exits={exits:g} and solver.weights={'current' if current else 'stashed'}: "
                "leave them as they were"
            )
        self._nodes.tallies = [Tally.of(kept) for kept in found["tallies"].tolist()]
        super().load_state(state)
        self._flying = {f.item: f for f in self._flights if isinstance(f, Instance)}
        self._flights.clear()
        for each in (self._roll, self._below, self._above):
            each.take_back(found)
        if self._exit is not None:
            self._exit.take_back(found)

    def _on_the_way(self) -> int:
        return 0

    def _again(self, flight: Flight) -> Instance:
        flight.lam = self._leaf(flight.lam)
        found = self._nodes.again(flight)
        assert isinstance(found, Instance)
        return found

    def _forward(self, lam: Tensor, part: MicroBatch) -> Flight:
        raise AssertionError("never called: `train` takes instances up by their table")

    def _backward(self, flight: Flight) -> None:
        raise AssertionError("never called: `train` takes instances home by their table")
