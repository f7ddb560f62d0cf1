"""The state of a program, a block or the rounds for a checkpoint."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Tensors = dict[str, Tensor]


@dataclass
class State:
    """The state of one object on one rank, by the part of the network it belongs to."""

    shared: dict[str, Any] = field(default_factory=dict)
    """JSON values, the same on every rank; loaded with any cuts."""
    cut: Tensors = field(default_factory=dict)
    """Of the cut before this block; loaded by the block behind the same cut."""
    block: Tensors = field(default_factory=dict)
    """Of this block's output; loaded by the block that ends at the same unit."""
    flight: Tensors = field(default_factory=dict)
    """Under way between blocks; loaded if all cuts are the same."""
    after: Tensors = field(default_factory=dict)
    """When loaded: the next block's `cut`."""
    same_split: bool = True
    """When loaded: whether all cuts are the same as when it was saved."""
    complete: bool = True
    """When loaded: whether the checkpoint has every cut."""


def entries(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin with `prefix`, in order, by the rest of their names."""
    return {k.removeprefix(prefix): tensors[k] for k in sorted(tensors) if k.startswith(prefix)}


def sha256(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes in the order of its indices, or of those that it wraps."""
    if is_traceable_wrapper_subclass(tensor):  # such as a quantized weight: numbers and scales
        names, _ = tensor.__tensor_flatten__()
        return hashlib.sha256(
            "".join(sha256(getattr(tensor, n)) for n in names).encode()
        ).hexdigest()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Their SHA-256 as a message, (n, 32) bytes."""
    rows = [[*bytes.fromhex(sha256(tensor))] for tensor in tensors]
    return torch.tensor(rows, dtype=torch.uint8).reshape(-1, 32)


class Stateful(Protocol):
    """An object with a state for checkpoints; all ranks call both methods."""

    def state(self) -> State:
        """The state for a checkpoint."""
        ...

    def load_state(self, state: State) -> None:
        """Restore a state; an empty one begins anew."""
