"""AMPNet on a chain: instances travel as messages, each on its own path (arXiv 1705.09786)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import SEVERAL_BLOCKS, CountOrZero, Needs, NotNegative
from hybrid.solvers.base import GraphBytes, program_of
from hybrid.solvers.delayed.base import Delayed
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.engine.schedule import Action, Span
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.micro_batches import MicroBatch, split_into_micro_batches
from hybrid.solvers.state import State
from hybrid.solvers.windows import Batch, LossAndMetric, PhaseStats, Window
from hybrid_messages.by_unit.unit_passes import BY_UNITS, UnitFlight, UnitProgram
from hybrid_messages.chain import Chain, Mailbox, draw_path, limit
from hybrid_messages.units import Instance, Nodes


@dataclass(frozen=True)
class AMPNet(Delayed):
    r"""Following AMPNet (arXiv 1705.09786) on a chain whose depth depends on the instance.

    An instance i, a micro-batch, is a message that goes up through its own units u and back down:

        cache[i] <- x_{u-1},   x_u = f_u(x_{u-1}; w_u)                         forward
        p_{u-1} = (d f_u / d x_{u-1})^T p_u                                    backward
        acc_u <- acc_u + n_i (d f_u / d w_u)^T p_u,   c_u <- c_u + 1,   n_u <- n_u + n_i
        c_u >= min_update_frequency:  w_u <- optimizer step with acc_u / n_u;  acc_u, c_u, n_u <- 0

    where n_i is its number of samples, so a step is by the mean over the samples that contributed.
    The derivatives are at the weights that x_u was computed with. At most `max_active_keys`
    instances are under way. A unit that an instance's path leaves out (`layers.depth`) costs it no
    time and gets no gradient of it.

    A path is a pure function of (seed, step, the instance's first sample). So which pass a rank
    does next follows from a simulation that all ranks make (`Chain`): a Kahn network, whose bits
    depend neither on links nor on time. The pipeline is not flushed within an epoch. At its end,
    and before a serial round, all backward passes are completed, and units step by what has been
    added up since their last step.

    Staleness is the number of a unit's updates between an instance's forward and its backward pass.
    Block k has at most `chain.limit` instances under way, so with equal paths, whose backward
    passes are completed in order, the staleness is at most
    ceil((limit - 1) / min_update_frequency), which for max_active_keys = K is
    ceil((K-1-k) / min_update_frequency). max_active_keys = 1 is SGD with accumulated gradients.
    """

    name: ClassVar[str] = "ampnet"
    cuts_inside: ClassVar[bool] = False
    sums_mini_batches: ClassVar[bool] = False
    steps_alike: ClassVar[bool] = False

    needs: ClassVar = (
        *BY_UNITS,
        Needs(
            "there is one replica, since replicas cannot agree on steps of single units",
            lambda run: run.setup.replicas == 1,
            "take one replica, or another solver",
        ),
    )
    acts: ClassVar = {"solver.messages": SEVERAL_BLOCKS, "solver.adjoints": SEVERAL_BLOCKS}

    micro_batches: CountOrZero = 0
    """m, instances per mini-batch, each with its own path; 0: as `ddg` chooses it."""
    clip_norm: NotNegative = 0.0
    """Clip the norm of each unit's gradient (not in serial rounds); 0: no clipping."""
    max_active_keys: Annotated[CountOrZero, SEVERAL_BLOCKS] = 0
    """Most instances in flight over all blocks; 0: twice the number of blocks."""
    min_update_frequency: CountOrZero = 0
    """Instances per step of a unit; 0: those of a mini-batch."""

    @property
    def reports_losses(self) -> bool:
        return False  # of what a drain completes no loss is reported

    def active_keys(self, count: int) -> int:
        """max_active_keys of K = `count`."""
        return self.max_active_keys or 2 * count

    def delay(self, index: int, count: int) -> int:
        return limit(index, count, self.active_keys(count)) - 1 if count > 1 else 0

    def schedule(
        self, index: int, count: int, span: Span, budget: LocalBudget | None = None
    ) -> list[Action]:
        """Empty: passes go unit by unit, as `Chain` says."""
        return []

    def steps_late(self, index: int, count: int, size: int) -> float:
        return self.delay(index, count) / self.frequency(size, count)

    def frequency(self, size: int, count: int) -> int:
        """min_update_frequency with mini-batches of `size` on `count` blocks."""
        return self.min_update_frequency or self.num_micro_batches(size, count)

    def held_bytes(
        self, module: nn.Module, lam: Tensor, index: int, count: int, graph: GraphBytes
    ) -> int:
        x, late = self.first_part(lam, count), self.delay(index, count)
        older = ceil(late / self.frequency(len(lam), count))
        version = sum(p.nbytes for p in module.parameters())
        return (late + 1) * graph(module, x) + older * version


@program_of(AMPNet)
class AMPNetProgram(UnitProgram):
    """One rank's instances, and the messages that came before they were needed."""

    solver: AMPNet
    units: Nodes

    def begin(self) -> None:
        super().begin()
        solver, size = self.solver, self.setup.batch_size
        self.units = Nodes(
            self.block, solver.clip_norm, solver.frequency(size, self.block.count), size
        )
        self._survivals: Sequence[Sequence[float]] | None = None
        self._scores: list[tuple[MicroBatch, LossAndMetric]] = []
        """Of the instances that have reached the loss."""
        self._reset()

    def _reset(self) -> None:
        """No instance is under way, as after a drain."""
        count = self.block.count
        self._chain = Chain(count, self.solver.active_keys(count), self._work)
        self._waiting: dict[int, Instance] = {}
        """Instances whose forward pass over this block is yet to come."""
        self._under_way: dict[int, Instance] = {}
        """Instances whose forward pass over this block is done and whose backward pass is not."""
        self._from_below, self._from_above = (
            Mailbox(self.links, codec is self._wire.down, codec.tensors)
            for codec in (self._wire.up, self._wire.down)
        )

    def train(self, window: Window) -> PhaseStats:
        """The forward passes of the window's instances, and the backward passes due meanwhile."""
        stats = PhaseStats()
        with stats.timed(self.links):
            for batch in window.batches:
                self._chain.extend(self._enter(batch))
                stats.samples += len(batch)
                stats.steps += 1
            self._report_scores(stats)
            stats.staleness = self.units.staleness()
        return stats

    def drain(self) -> PhaseStats:
        stats = PhaseStats()
        if self._ticks:
            self._chain.drain()
            for unit in range(self.units.count):
                self.units.step_by_contributions(unit)
            self._scores.clear()
            stats.staleness = self.units.staleness()
        self._ticks = 0
        self._reset()
        self.links.flush()
        return stats

    def _enter(self, batch: Batch) -> list[list[int]]:
        """Draw the paths of a mini-batch's instances; their numbers of units in each block."""
        if self._survivals is None:
            self._survivals = self.links.all_gather(self.units.survivals)
        lengths = []
        for part in split_into_micro_batches(batch, self.num_micro_batches(batch), self.block):
            first = int(batch.ids[part.start])
            path = draw_path(self.setup.seed, batch.step, first, self._survivals)
            lengths.append([len(units) for units in path])
            self._waiting[self._ticks] = Instance(
                part,
                item=self._ticks,
                active=frozenset(path[self.block.index]),
            )
            self._ticks += 1
        return lengths

    def _work(self, index: int, forward: bool, item: int) -> None:
        """Do a pass of this rank; the neighbors' say in which order messages come."""
        if index == self.block.index - 1 and forward:
            self._from_below.expect(item)
        elif index == self.block.index + 1 and not forward:
            self._from_above.expect(item)
        elif index == self.block.index and forward:
            self._forward_pass(item)
        elif index == self.block.index:
            self._backward_pass(self._under_way.pop(item))

    def _forward_pass(self, item: int) -> None:
        """An instance's forward pass over the block, and its loss."""
        waiting = self._waiting.pop(item)
        part = waiting.part
        if part.images is None:
            lam = self._wire.receive(self._from_below.message(item), self.block.formats[0])
        else:
            lam = part.images
        flight = self.units.new_flight(part._replace(images=None, labels=None), self._leaf(lam))
        flight.item, flight.active = item, waiting.active
        self.forward_units(flight)
        self._under_way[item] = flight
        if part.labels is None:
            self._wire.send(self.links.to_next, flight.value.detach())
            flight.value = None
        else:
            self._scores.append((flight.part, self.units.compute_loss(flight, part.labels)))

    def _backward_pass(self, flight: Instance) -> None:
        """An instance's backward pass over the block."""
        if not self.block.last:
            message, size = self._from_above.message(flight.item), flight.part.size
            leaving, key = self.block.formats[-1], self._key(flight.part, self.block.index + 1)
            flight.adjoint = [self._wire.receive_adjoint(message, leaving, size, key)]
        self.backward_units(flight)

    def _report_scores(self, stats: PhaseStats) -> None:
        """The means over the instances that have reached the loss, in each mini-batch."""
        found, samples = PhaseStats(), 0
        losses: dict[int, list[Tensor]] = {}
        shares: dict[int, float] = {}
        for part, result in self._scores:
            losses.setdefault(part.step, []).append(result.loss)
            shares[part.step] = shares.get(part.step, 0.0) + part.share
            samples += part.stop - part.start
            found.count_metric(result)
        self._scores.clear()
        stats.losses = [torch.stack(of).sum() / shares[step] for step, of in losses.items()]
        if found.correct:
            total = torch.stack([torch.as_tensor(each) for each in found.correct]).sum()
            stats.correct = [total * (stats.samples / samples)]
        stats.each = found.each

    def state(self) -> State:
        if not self._ticks:
            return State()
        self._flights = {**self._under_way, **self._waiting}
        saved = super().state().flight
        self._flights.clear()
        saved |= self._from_below.state() | self._from_above.state()
        saved["max active keys"] = torch.tensor(self._chain.max_active_keys)
        saved["lengths"] = torch.tensor(self._chain.lengths)
        numbers = [updates.numbers() for updates in self.units.updates]
        saved["updates"] = torch.tensor(numbers, dtype=torch.float64)
        return State(flight=saved)

    def load_state(self, state: State) -> None:
        saved = state.flight
        if not saved:
            return
        if (most := int(saved["max active keys"])) != self._chain.max_active_keys:
            raise ValueError(
                f"what is under way was kept with solver.max_active_keys={most}: leave it as it was"
            )
        for updates, numbers in zip(self.units.updates, saved["updates"].tolist(), strict=True):
            updates.set_numbers(numbers)
        super().load_state(state)
        self._flights.clear()
        self._chain.work = lambda index, forward, item: None  # all of this is done
        self._chain.extend(saved["lengths"].tolist())
        self._chain.work = self._work
        for mailbox in (self._from_below, self._from_above):
            mailbox.load_state(saved)

    def _restored(self, flight: Flight) -> UnitFlight:
        if flight.lam is not None:
            rebuilt = super()._restored(flight)
            assert isinstance(rebuilt, Instance)
            self._under_way[rebuilt.item] = rebuilt
            return rebuilt
        waiting = Instance(flight.part)
        waiting.load(flight.stash)
        self._waiting[waiting.item] = waiting
        return waiting

    def _adjoints_sent(self) -> int:
        return 0  # the mailboxes hold them
