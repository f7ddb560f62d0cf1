"""Where instances end: at the loss, behind the network's head or behind that of an exit."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.blocks.block import Block
from solvers.blocks.heads import Head
from solvers.exact.micro_batches import MicroBatch
from solvers.instances.nodes import Instance, Tally
from solvers.state import Tensors
from solvers.windows import Classified, PhaseStats, Seen


class Exit:
    """A head behind a block, where instances may leave; it steps as a unit does."""

    def __init__(self, block: Block, head: Head, frequency: int, size: int, clip: float) -> None:
        self.block, self.frequency = block, frequency
        self.size, self.clip = size, clip
        self.tally = Tally()
        self.take(head)

    def take(self, head: Head) -> None:
        """Have this head."""
        self.head, self.weights = head, [*head.module.parameters()]

    def leave(self, flight: Instance, labels: Tensor) -> Classified:
        """Loss and metric; the adjoint of what the block has made is the flight's."""
        x = flight.value.detach().requires_grad_()
        found = self.block.classify(self.head(self.block, x), labels)
        loss = found.loss * flight.part.share
        p, *gradients = torch.autograd.grad(loss, [x, *self.weights])
        for w, g in zip(self.weights, gradients, strict=True):
            w.grad = g if w.grad is None else w.grad + g
        flight.adjoint, flight.value = [p], None
        self.tally.add(flight.part, flight.rate)
        if self.tally.contributions >= self.frequency:
            self.settle()
        return found._replace(loss=loss.detach())

    def settle(self) -> None:
        """Step by what there is, if there is anything."""
        self.tally.settle(self.weights, self.size, self._step)

    def kept(self) -> Tensors:
        """Beside the head, for a checkpoint."""
        found = {"exit": torch.tensor(self.tally.kept(), dtype=torch.float64)}
        grads = ((j, w.grad) for j, w in enumerate(self.weights))
        return found | {f"exit {j}": g for j, g in grads if g is not None}

    def take_back(self, found: Tensors) -> None:
        """What gave `kept`."""
        self.tally = Tally.of(found["exit"].tolist())
        for j, w in enumerate(self.weights):
            w.grad = found.get(f"exit {j}")

    def _step(self, rate: float) -> None:
        self.block.step("local", rate, self.clip, only=self.weights)


class Scores:
    """Losses and right answers of instances that have reached the network's head."""

    def __init__(self) -> None:
        self._losses: dict[int, list[Tensor]] = {}
        self._shares: dict[int, float] = {}
        self._correct: list[Tensor] = []
        self._each: list[Tensor] = []
        self._seen: list[Seen] = []
        self._samples = 0

    def add(self, part: MicroBatch, found: Classified) -> None:
        """Count one; its loss is its share of the mini-batch's mean."""
        self._losses.setdefault(part.step, []).append(found.loss)
        self._shares[part.step] = self._shares.get(part.step, 0.0) + part.share
        self._samples += part.stop - part.start
        if found.correct is not None:
            self._correct.append(found.correct)
        if found.each is not None:
            self._each.append(found.each)
        if found.seen is not None:
            self._seen.append(found.seen)

    def tell(self, stats: PhaseStats) -> None:
        """Means over those that are counted; `stats` has its samples."""
        for step, losses in self._losses.items():
            stats.losses.append(torch.stack(losses).sum() / self._shares[step])
        if self._correct:
            sums = torch.stack([torch.as_tensor(c) for c in self._correct]).sum()
            stats.correct.append(sums * (stats.samples / self._samples))
        stats.each += self._each
        stats.seen += self._seen
