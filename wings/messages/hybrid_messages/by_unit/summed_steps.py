"""Steps of single units whose gradients replicas are summing."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid.solvers.block import Block
from hybrid.solvers.numerics.weights import with_parameter_strides
from hybrid.solvers.state import Tensors, entries


@dataclass
class SummedStep:
    """A unit's step, and the sum that it waits for."""

    item: int
    """The micro-batch that completed its mini-batch."""
    rate: float
    terms: dict[str, Tensor]
    """This replica's gradients, by name."""
    finish: Callable[[], None]
    """Waits for the sum, which the unit's gradients then are."""


class SummedSteps:
    """The steps of each unit, in their order; all replicas begin and complete them alike."""

    def __init__(
        self,
        step: Callable[[int, float], None],
        block: Block,
        parameters: Sequence[dict[str, nn.Parameter]],
    ) -> None:
        self._step, self._block, self._parameters = step, block, parameters
        """The step of a unit at a rate; the parameters of each unit, by name."""
        self.waiting: list[deque[SummedStep]] = [deque() for _ in parameters]

    def begin(self, unit: int, item: int, rate: float) -> None:
        """Begin the sum of the gradients at hand."""
        sync, trained = self._block.sync, self._trained(unit)
        held = self._parameters[unit].items()
        terms = {name: p.grad for name, p in held if p.grad is not None}
        finish = sync.begin_sum(trained) if sync is not None and trained else lambda: None
        self.waiting[unit].append(SummedStep(item, rate, terms, finish))

    def complete(self, unit: int, item: int | None = None) -> None:
        """Take the unit's oldest step, if it is that of `item`.

        The gradients at hand belong to a later step, and stay as they are.
        """
        waiting, trained = self.waiting[unit], self._trained(unit)
        if not waiting or item not in (None, waiting[0].item):
            return
        summed = waiting.popleft()
        later = [p.grad for p in trained]
        summed.finish()
        self._step(unit, summed.rate)
        for p, g in zip(trained, later, strict=True):
            p.grad = g

    def complete_all(self) -> None:
        for unit, waiting in enumerate(self.waiting):
            while waiting:
                self.complete(unit)

    def _trained(self, unit: int) -> list[nn.Parameter]:
        return [p for p in self._parameters[unit].values() if p.requires_grad]

    def state(self) -> Tensors:
        """What a checkpoint holds of them."""
        saved: Tensors = {}
        for unit, waiting in enumerate(self.waiting):
            for i, summed in enumerate(waiting):
                name = f"summed {unit:05}.{i:05}"
                saved[name] = torch.tensor([summed.item, summed.rate], dtype=torch.float64)
                saved |= {f"{name} {key}": g for key, g in summed.terms.items()}
        return saved

    def load_state(self, saved: Tensors) -> None:
        """Begin the sums again that were under way."""
        for name in sorted(name for name in saved if re.fullmatch(r"summed \d+\.\d+", name)):
            unit, (item, rate) = int(name.split()[1].partition(".")[0]), saved[name].tolist()
            module, terms = self._block.module, entries(saved, f"{name} ")
            for key, g in with_parameter_strides(module, terms).items():
                module.get_parameter(key).grad = g
            self.begin(unit, int(item), rate)
