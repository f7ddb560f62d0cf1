"""Local work in ticks of a delayed pipeline in which a rank would wait."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from hybrid.solvers import registry
from hybrid.solvers.acting import Settings
from hybrid.solvers.base import Links, Setup, Solver, SubProblems
from hybrid.solvers.block import Block
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.micro_batches import MicroBatch, record_of
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.numerics.clipping import clip_each
from hybrid.solvers.numerics.weights import with_parameter_strides
from hybrid.solvers.state import State, Tensors, entries
from hybrid.solvers.windows import Batch, PhaseStats, Stopwatch

STORED_BATCHES = 2
"""Mini-batches in the store: the one whose records are complete, and the one being recorded."""
_RECORDS, _SUMS = "record ", "local "
"""Prefixes of the records' and of the local gradients' names in a checkpoint."""
_WHOLE, _COMING = "recorded parts", "parts coming back"
"""Names there of the micro-batches that have records."""


@dataclass(frozen=True)
class NoLocalWork(Settings):
    """Ranks that would wait do so."""

    name: ClassVar[str] = "none"


def check_local_method(solver: Solver, fill: Settings) -> None:
    """ValueError for local work beside a method whose ranks have no idle time for it."""
    if isinstance(fill, Solver) and not solver.takes_local_work:
        others = [name for name in registry.OWN if registry.solver_class(name).takes_local_work]
        raise ValueError(
            f"fill.name is {fill.name!r}, but {solver.name} has no pipeline whose ranks could step "
            f"where they would wait: choose the solver {' or '.join(others)}, or fill.name=none"
        )


def start(
    fill: Solver, block: Block, links: Links, setup: Setup, budget: LocalBudget
) -> "LocalWork | None":
    """The local work of a block by the method `fill`; None where its budget is empty."""
    if not any(budget):
        return None
    program = fill.start(block, links, setup)
    assert isinstance(program, SubProblems)
    return LocalWork(program, budget)


class LocalWork:
    r"""Trains a block on its records in ticks in which its rank would wait for a neighbor.

    In the tick in which micro-batch i of mini-batch t comes back, block k has time for n_k samples
    (`budget.Pipeline`): the first n_k of micro-batch i of mini-batch t-1, whose inputs, outputs and
    adjoints the block recorded as they came back. With N samples in a mini-batch,

        g    the gradient of mini-batch t, as late as the method makes it
        l    mean over all local samples since the last step of the local loss's gradient, at w_k
        c    local_lr min(1, local samples / N), since few samples are a noisy mean
        w_k  <- optimizer step with g + c l

    A micro-batch of fewer samples has fewer to work on, and none where one would be left. A block
    whose n_k is 0 trains by the method alone. Nothing is sent for the local work, and no
    weight moves in it. The n_k are fixed before training, so the result does not depend on timing.
    Records end when the pipeline is drained. Either a whole mini-batch is recorded or nothing of
    it: without its first micro-batches, which a resume may leave out, the later ones are useless.
    """

    def __init__(self, program: SubProblems, budget: LocalBudget) -> None:
        self.program, self.budget = program, budget
        self.block: Block = program.block
        self.stats = PhaseStats()
        self.watch = Stopwatch()
        """The time of the local steps, which is part of the pass's time."""
        self._earlier: Sequence[Batch] = ()
        self._compatible = True
        self.forget()

    def expect(self, earlier: Sequence[Batch], compatible: bool) -> None:
        """Prepare to load a checkpoint, whose records are of `earlier` mini-batches of the epoch.

        Records that are not `compatible`, of another method or with another filter, are left out.
        """
        self._earlier, self._compatible = earlier, compatible

    def forget(self) -> None:
        self._batches: dict[int, Batch] = {}
        """By their step: the mini-batches under way, and the recorded one."""
        self._recorded: int | None = None
        """The step of the mini-batch whose records are complete."""
        self._whole = list[tuple[int, int]]()
        """(start, stop) of its micro-batches; empty without one."""
        self._coming = list[tuple[int, int]]()
        """Those with records of the mini-batch that is coming back."""
        self._slot = 0
        """Where in the store the mini-batch that is coming back is recorded."""
        self._sums: dict[Parameter, Tensor] = {}
        self._samples = 0

    def begin_batch(self, batch: Batch) -> None:
        """Note a mini-batch that begins its forward pass."""
        self._batches[batch.step] = batch

    def record(
        self, part: MicroBatch, lam: Tensor, out: Tensor, p_in: Tensor | None, p_out: Tensor | None
    ) -> None:
        """Record a micro-batch whose backward pass is complete."""
        count = min(sum(self.budget), part.stop - part.start)  # those that local steps will take
        passed = lam[:count], out if self.block.last else out[:count]
        adjoints = (None if p is None else p[:count] for p in (p_in, p_out))
        rows = self._rows(part.start, part.start + count, self._slot)
        self.program.record(record_of(self.block, rows, part.size, *passed, *adjoints))
        self._coming.append((part.start, part.stop))
        if part.weight is not None:
            weight = part.weight / (part.stop - part.start)
            self._batches[part.step] = replace(self._batches[part.step], weight=weight)

    def add_gradient(self, part: MicroBatch, first: int, count: int) -> None:
        """Add up the local gradient of `count` samples from the `first` of those of this tick.

        They are of the recorded mini-batch's micro-batch with the places of `part`, if it has
        one: a mini-batch that was under way before a resume may be cut otherwise.
        """
        start = part.start + first
        stop = min(start + count, part.stop)
        rest = stop - start == 1 < count  # of a smaller micro-batch; BatchNorm may refuse it
        if (part.start, part.stop) not in self._whole or stop <= start or rest:
            return
        assert self._recorded is not None
        batch = self._batches[self._recorded].part(slice(start, stop))
        exact = [(p, p.grad) for p in self.block.module.parameters()]
        self.block.module.zero_grad(set_to_none=True)
        with self.watch.timing(self.program.links), frozen_statistics(self.block.module):
            rows = self._rows(start, stop, 1 - self._slot)
            self.program.gradient(batch, rows, False, self.stats, start)
        for p, before in exact:
            if p.grad is not None:
                gradient = p.grad.mul_(len(batch))
                self._sums[p] = self._sums[p].add_(gradient) if p in self._sums else gradient
            p.grad = before
        self._samples += len(batch)

    def mix_in(self, step: int) -> None:
        """Add c l to the gradient of a mini-batch whose records are complete."""
        batch = self._batches[step]
        share = self.program.local_lr * min(1.0, self._samples / len(batch)) * batch.share
        present = [self._sums[p] for p in self.block.module.parameters() if p in self._sums]
        if present:  # l, their mean
            torch._foreach_mul_(present, 1 / self._samples)
        if present and self.program.clip_norm:
            clip_each([present], self.program.clip_norm, self.block.device)
        for p, gradient in self._sums.items():
            if p.grad is not None:
                p.grad.add_(gradient, alpha=share)
        self._sums, self._samples = {}, 0
        whole = sum(stop - start for start, stop in self._coming) == len(batch)
        self._recorded, self._whole = (step, self._coming) if whole else (None, [])
        self._coming, self._slot = [], 1 - self._slot
        self._batches = {s: b for s, b in self._batches.items() if s >= step}

    def _rows(self, start: int, stop: int, slot: int) -> slice:
        """The store's rows of a mini-batch's samples."""
        first = slot * self.program.setup.batch_size
        return slice(first + start, first + stop)

    def state(self) -> Tensors:
        """The records and the local gradient so far."""
        recorded = -1 if self._recorded is None else self._recorded
        numbers = torch.tensor([recorded, self._slot, self._samples, sum(self.budget)])
        state = {"local_work": numbers}
        for name, parts in ((_WHOLE, self._whole), (_COMING, self._coming)):
            state |= {name: torch.tensor(parts)} if parts else {}
        batch = self._batches.get(recorded)
        if batch is not None and batch.weight is not None:
            state["weight"] = batch.weight
        state |= {_RECORDS + name: tensor for name, tensor in self.program.records().items()}
        names = {p: name for name, p in self.block.module.named_parameters()}
        return state | {_SUMS + names[p]: gradient for p, gradient in self._sums.items()}

    def load_state(self, state: State) -> None:
        saved = state.flight
        self._batches = {batch.step: batch for batch in self._earlier}
        if "local_work" not in saved or not self._compatible:
            return
        recorded, slot, samples, count = saved["local_work"].tolist()
        if count < sum(self.budget):  # fewer of each micro-batch than this rank will take
            return
        self._slot, self._samples = slot, samples
        self._recorded = None if recorded < 0 else recorded
        nothing = torch.empty(0, 2)
        self._whole, self._coming = (
            [(int(start), int(stop)) for start, stop in saved.get(name, nothing)]
            for name in (_WHOLE, _COMING)
        )
        if "weight" in saved and recorded in self._batches:
            self._batches[recorded] = replace(self._batches[recorded], weight=saved["weight"])
        if records := entries(saved, _RECORDS):
            self.program.load_records(records)
        sums = with_parameter_strides(self.block.module, entries(saved, _SUMS))
        self._sums = {self.block.module.get_parameter(name): g for name, g in sums.items()}
