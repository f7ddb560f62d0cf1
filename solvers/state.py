"""What a checkpoint keeps of a program, a block, the rounds: tensors, by what they follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass
class State:
    """What a checkpoint keeps of one thing on one rank, by what it follows."""

    shared: dict[str, Any] = field(default_factory=dict)
    """JSON-able, the same on every rank; taken back on any split."""
    cut: Tensors = field(default_factory=dict)
    """Of the cut before this block; taken back by the block behind the same cut."""
    block: Tensors = field(default_factory=dict)
    """Of this block's output; taken back by the block that ends at the same unit."""
    flight: Tensors = field(default_factory=dict)
    """Under way between blocks; taken back where all cuts are the same."""
    after: Tensors = field(default_factory=dict)
    """When taken back: what the next block has kept as `cut`."""
    same_split: bool = True
    """When taken back: whether all cuts are the same."""
    complete: bool = True
    """When taken back: whether every cut has been kept."""


def entries(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin so, in order, without the beginning."""
    return {k.removeprefix(prefix): tensors[k] for k in sorted(tensors) if k.startswith(prefix)}


class Stateful(Protocol):
    """What a checkpoint keeps; all ranks call both."""

    def state(self) -> State:
        """For a checkpoint."""
        ...

    def load_state(self, state: State) -> None:
        """Take back what `state` gave; what is empty begins anew."""
