"""Several tensors as one: what goes into a network or over a cut is a single tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

EXACT = 1 << 24
"""Integers up to here are float32 numbers."""


@dataclass(frozen=True)
class Bundle:
    """How the tensors of a tuple, list or dict lie side by side in one, (N, D).

    Each has a row a sample. Packing and unpacking copy numbers and change none; an adjoint of the
    whole is the adjoints of its tensors side by side. Integers and truth values become float32, in
    which they are exact up to 2^24, get no gradient, and are what they were behind the cut.
    """

    structure: TreeSpec
    shapes: tuple[tuple[int, ...], ...]
    """Of a sample of each tensor."""
    exact: tuple[torch.dtype | None, ...]
    """The type of each tensor that is not floating-point."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Bundle:
        return self  # nothing of it changes

    @classmethod
    def of(cls, value: Any, samples: int, where: str) -> Bundle | None:
        """Of a value of so many samples; None for a floating-point tensor, which needs none.

        ValueError if it holds what is no tensor or has not a row a sample; `where` says where.
        """
        leaves, structure = tree_flatten(value)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ValueError(
                    f"{where} is a {type(leaf).__name__}, {str(leaf)[:40]!r}: only tensors can be "
                    "there; make it a buffer of the module, or cut elsewhere"
                )
            if leaf.dim() == 0 or len(leaf) != samples:
                raise ValueError(
                    f"{where} has shape {tuple(leaf.shape)} for {samples} samples: a tensor there "
                    "needs a row a sample; make it a buffer of the module, or cut elsewhere"
                )
        exact = tuple(None if leaf.is_floating_point() else leaf.dtype for leaf in leaves)
        if isinstance(value, Tensor) and not any(exact):
            return None
        return cls(structure, tuple(tuple(leaf.shape[1:]) for leaf in leaves), exact)

    def survives(self, number_format: str) -> bool:
        """Whether integers and truth values are the same after a message in a number format.

        Of truth values 16 bits leave 0 and 1; int8 is scaled by the largest number beside them.
        """
        if number_format == "float32":
            return True
        exact = {dtype for dtype in self.exact if dtype is not None}
        return not exact or (exact == {torch.bool} and number_format != "int8")

    @property
    def size(self) -> int:
        """D."""
        return sum(map(prod, self.shapes))

    def pack(self, value: Any) -> Tensor:
        """The tensors side by side; ValueError for an integer beyond 2^24."""
        leaves: list[Tensor] = tree_leaves(value)
        kind: torch.dtype | None = None
        for x, dtype in zip(leaves, self.exact, strict=True):
            own = x.dtype if dtype is None else torch.float32
            kind = own if kind is None else torch.promote_types(kind, own)
            wide = dtype in (torch.int64, torch.int32)
            if wide and x.numel() and int(x.abs().max()) > EXACT:
                raise ValueError(
                    f"an integer of size {int(x.abs().max())} is beyond 2^24, to which integers "
                    "travel exactly: number them from 0"
                )
        dense = [_Dense.apply(x) for x in leaves]  # type: ignore[no-untyped-call]
        return torch.cat([x.reshape(len(x), -1).to(kind) for x in dense], 1)

    def unpack(self, packed: Tensor) -> Any:
        """What `pack` was given; floating-point tensors in the format of the whole."""
        parts = packed.split([prod(shape) for shape in self.shapes], 1)
        leaves = []
        for part, shape, dtype in zip(parts, self.shapes, self.exact, strict=True):
            x = part.reshape(len(packed), *shape)
            if dtype is not None:
                x = x.detach().to(dtype)
            else:
                x = x.contiguous(memory_format=_layout(x))
            leaves.append(x)
        return tree_unflatten(leaves, self.structure)


class _Dense(torch.autograd.Function):
    """x, with an adjoint that does not lie within a wider one: kernels round by how memory lies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *p: Tensor) -> Tensor:
        return p[0].contiguous(memory_format=_layout(p[0]))


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def call(network: nn.Module, value: Any) -> Any:
    """A network on its inputs: a tuple or list by position, a dict by name, else as it is."""
    if isinstance(value, tuple | list):
        return network(*value)
    return network(**value) if isinstance(value, dict) else network(value)
