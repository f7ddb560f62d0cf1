"""Where instances end: at the loss, behind the network's head or behind the head of an exit."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.solvers.blocks.block import Block
from hybrid.solvers.blocks.heads import Head
from hybrid.solvers.exact.pipeline import MicroBatch
from hybrid.solvers.instances.nodes import Instance, Tally
from hybrid.solvers.state import Tensors
from hybrid.solvers.windows import Classified, PhaseStats


class Exit:
    """A head behind a block, where instances may leave the network; it steps as a unit does."""

    def __init__(self, block: Block, head: Head, frequency: int, size: int, clip: float) -> None:
        self.block, self.frequency = block, frequency
        self.size, self.clip = size, clip
        self.tally = Tally()
        self.set_head(head)

    def set_head(self, head: Head) -> None:
        """Let this be the exit's head."""
        self.head, self.weights = head, [*head.module.parameters()]

    def classify(self, flight: Instance, labels: Tensor) -> Classified:
        """Loss and metric of the block's output, whose adjoint the flight then has."""
        x = flight.value.detach().requires_grad_()
        found = self.block.classify(self.head(self.block, x), labels, flight.part.weight)
        loss = found.loss * flight.part.share
        p, *gradients = torch.autograd.grad(loss, [x, *self.weights])
        for w, g in zip(self.weights, gradients, strict=True):
            w.grad = g if w.grad is None else w.grad + g
        flight.adjoint, flight.value = [p], None
        self.tally.add(flight.part, flight.rate)
        if self.tally.contributions >= self.frequency:
            self.step()
        return found._replace(loss=loss.detach())

    def step(self) -> None:
        """Step by the contributions since the last step, if there are any."""
        self.tally.step(
            self.weights,
            self.size,
            lambda rate: self.block.step("local", rate, self.clip, only=self.weights),
        )

    def state(self) -> Tensors:
        """For a checkpoint, beside the head's own state."""
        found = {"exit": torch.tensor(self.tally.numbers(), dtype=torch.float64)}
        grads = ((j, w.grad) for j, w in enumerate(self.weights))
        return found | {f"exit {j}": g for j, g in grads if g is not None}

    def load_state(self, found: Tensors) -> None:
        """Take back what `state` gave."""
        self.tally = Tally.of(found["exit"].tolist())
        for j, w in enumerate(self.weights):
            w.grad = found.get(f"exit {j}")


class Scores:
    """Losses and metrics of the instances that have reached the network's head."""

    def __init__(self) -> None:
        self._losses: dict[int, list[Tensor]] = {}
        self._shares: dict[int, float] = {}
        self._found = PhaseStats()

    def add(self, part: MicroBatch, found: Classified) -> None:
        """Count one instance; its loss is its share of the mini-batch's mean."""
        self._losses.setdefault(part.step, []).append(found.loss)
        self._shares[part.step] = self._shares.get(part.step, 0.0) + part.share
        self._found.samples += part.stop - part.start
        self._found.scored(found)

    def report(self, stats: PhaseStats) -> None:
        """Add the means over the counted instances to `stats`, which has its samples already."""
        for step, losses in self._losses.items():
            stats.losses.append(torch.stack(losses).sum() / self._shares[step])
        if self._found.correct:
            total = torch.stack([torch.as_tensor(c) for c in self._found.correct]).sum()
            stats.correct.append(total * (stats.samples / self._found.samples))
        stats.each += self._found.each
        stats.seen += self._found.seen
