"""Several tensors packed into one, in which they go into a network or over a cut."""

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
    """How the tensors of a tuple, list or dict lie side by side in one tensor (N, D).

    Each tensor has one row for each sample. Packing and unpacking copy numbers and change none. An
    adjoint of the whole is the adjoints of its tensors side by side. Integers and truth values
    travel as float32, in which they are exact up to 2^24, and get no gradient. Of complex numbers
    real and imaginary parts lie side by side.
    """

    structure: TreeSpec
    shapes: tuple[tuple[int, ...], ...]
    """The shape of one sample, for each tensor."""
    dtypes: tuple[torch.dtype, ...]
    """Of each tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Bundle:
        return self  # it is immutable

    @classmethod
    def of(cls, value: Any, samples: int, where: str) -> Bundle | None:
        """The bundle of a value with so many samples; None for one floating-point tensor.

        ValueError if the value holds anything but tensors with one row for each sample; `where`
        names its place in the error.
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
                    "needs one row for each; make it a buffer of the module, or cut elsewhere"
                )
        if isinstance(value, Tensor) and value.is_floating_point():
            return None
        shapes = tuple(tuple(_real(leaf).shape[1:]) for leaf in leaves)
        return cls(structure, shapes, tuple(leaf.dtype for leaf in leaves))

    def survives(self, number_format: str) -> bool:
        """Whether integers and truth values are the same after a message in a number format.

        Truth values survive 16 bits, but not int8, which is scaled by the largest number.
        """
        if number_format == "float32":
            return True
        exact = {dtype for dtype in self.dtypes if _is_exact(dtype)}
        return not exact or (exact == {torch.bool} and number_format != "int8")

    @property
    def size(self) -> int:
        """D."""
        return sum(map(prod, self.shapes))

    def pack(self, value: Any) -> Tensor:
        """The tensors side by side; ValueError for an integer beyond 2^24."""
        leaves: list[Tensor] = [*map(_real, tree_leaves(value))]
        kind: torch.dtype | None = None
        for x, dtype in zip(leaves, self.dtypes, strict=True):
            own = torch.float32 if _is_exact(dtype) else x.dtype
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
        """The value that `pack` was given.

        Tensors whose format autocast has made narrower have the packed one.
        """
        parts = packed.split([prod(shape) for shape in self.shapes], 1)
        leaves = []
        for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True):
            x = part.reshape(len(packed), *shape)
            if _is_exact(dtype):
                x = x.detach().to(dtype)
            elif dtype.is_complex:
                x = torch.view_as_complex(x.contiguous())
            else:
                x = x.contiguous(memory_format=_layout(x))
                x = x.to(dtype) if torch.promote_types(dtype, x.dtype) == x.dtype else x
            leaves.append(x)
        return tree_unflatten(leaves, self.structure)


class _Dense(torch.autograd.Function):
    """x, with an adjoint in contiguous memory: kernels round differently with other strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *p: Tensor) -> Tensor:
        return p[0].contiguous(memory_format=_layout(p[0]))


def _is_exact(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def call_network(network: nn.Module, value: Any) -> Any:
    """Call a network: with a tuple or list by position, a dict by name, else one argument."""
    if isinstance(value, tuple | list):
        return network(*value)
    return network(**value) if isinstance(value, dict) else network(value)
