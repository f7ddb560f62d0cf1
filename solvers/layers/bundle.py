"""Several tensors packed into one, to enter a network or cross a cut."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

Shapes = tuple[tuple[int, ...], ...]

EXACT = 1 << 24
"""Integers up to this size are exact in float32."""

MOST_LENGTHS = 1 << 20
"""The most values of a varying length to try."""


@dataclass(frozen=True)
class Bundle:
    """The layout of a tuple, list or dict of tensors as columns of one tensor (N, D).

    Each tensor has one row for each sample. Packing and unpacking copy numbers unchanged. The
    adjoint of the packed tensor is the packed adjoints. Integers and booleans are packed as
    float32, exact up to 2^24, and get no gradient. Complex numbers are packed as real and imaginary
    parts.

    One length may vary, such as that of the longest text of a mini-batch. A dimension n is then
    n + g t, where g is its growth and t is common to all. t follows from D, so no message needs it.
    """

    structure: TreeSpec
    shapes: Shapes
    """The shape of one sample, for each tensor; of the first samples (t = 0) if a length varies."""
    dtypes: tuple[torch.dtype, ...]
    """The number format of each tensor."""
    growth: Shapes | None = None
    """The growth of each tensor's dimensions; None: no length varies."""
    where: str = "a tensor"
    """The name of the value's place, for errors."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bundle":
        return self  # immutable

    @classmethod
    def of(cls, value: Any, samples: int, where: str) -> "Bundle | None":
        """Make the bundle of a value of `samples` rows; None for one floating-point tensor.

        ValueError if the value has a leaf that is not a tensor with one row for each sample;
        `where` names the value's place in the error.
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
        dtypes = tuple(leaf.dtype for leaf in leaves)
        return cls(structure, _shapes(map(_real, leaves)), dtypes, None, where)

    def varying(self, others: Iterable[Any]) -> "Bundle":
        """Extend the bundle to other values, in which one length may differ.

        ValueError if several lengths differ, or dimensions that are not whole multiples of one.
        """
        growth: tuple[int, ...] | None = None
        first = _flat(self.shapes)
        for other in others:
            shapes = _shapes(map(_real, tree_leaves(other)))
            if [*map(len, shapes)] != [*map(len, self.shapes)]:
                raise ValueError(_unlike(self.where, shapes, self.shapes))
            by = [n - m for n, m in zip(_flat(shapes), first, strict=True)]
            if not any(by):
                continue
            step = gcd(*by) * (-1 if sum(by) < 0 else 1)
            ratio = tuple(n // step for n in by)
            if growth not in (None, ratio) or min(ratio) < 0:
                raise ValueError(
                    f"{self.where} has shapes {_said(self.shapes)} and {_said(shapes)}, in which "
                    "more than one length varies, or one as no whole multiple of another: pad all "
                    "but one to a fixed length (padding='max_length'; max_length of the collator)"
                )
            growth = ratio
        if growth is None:
            return self
        each = iter(growth)
        return replace(self, growth=tuple(tuple(next(each) for _ in s) for s in self.shapes))

    def survives(self, number_format: str) -> bool:
        """Whether integers and booleans are unchanged by a message in a number format.

        Booleans survive 16 bits, but not fewer, which are scaled by the largest number.
        """
        if number_format == "float32":
            return True
        exact = {dtype for dtype in self.dtypes if _is_exact(dtype)}
        return not exact or (exact == {torch.bool} and not number_format.startswith("int"))

    @property
    def size(self) -> int:
        return sum(map(prod, self.shapes))

    def pack(self, value: Any) -> Tensor:
        """Pack the tensors of a value.

        ValueError for an integer beyond 2^24, and for shapes that do not fit the bundle.
        """
        leaves: list[Tensor] = [*map(_real, tree_leaves(value))]
        shapes = _shapes(leaves)
        width = sum(map(prod, shapes))
        if shapes != self.shapes and shapes != _of_width(self.shapes, self.growth, width):
            raise ValueError(_unlike(self.where, shapes, self.shapes))
        kind: torch.dtype | None = None
        for x, dtype in zip(leaves, self.dtypes, strict=True):
            format_ = torch.float32 if _is_exact(dtype) else x.dtype
            kind = format_ if kind is None else torch.promote_types(kind, format_)
            if dtype in (torch.int64, torch.int32) and x.numel() and int(x.abs().max()) > EXACT:
                raise ValueError(
                    f"an integer of size {int(x.abs().max())} is beyond 2^24, to which integers "
                    "travel exactly: number them from 0"
                )
        dense = [_Dense.apply(x) for x in leaves]  # type: ignore[no-untyped-call]
        return torch.cat([x.reshape(len(x), -1).to(kind) for x in dense], 1)

    def unpack(self, packed: Tensor) -> Any:
        """Unpack a value from `pack`.

        Tensors that autocast has narrowed keep the packed format. ValueError for a width that no
        length gives.
        """
        shapes = _of_width(self.shapes, self.growth, packed.shape[1])
        if shapes is None:
            raise ValueError(
                f"{self.where} has {packed.shape[1]} numbers in a sample, and {self.size} in the "
                f"first ones: {_PAD}"
            )
        parts = packed.split([prod(shape) for shape in shapes], 1)
        leaves = []
        for part, shape, dtype in zip(parts, shapes, self.dtypes, strict=True):
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


@lru_cache(maxsize=1 << 12)
def _of_width(shapes: Shapes, growth: Shapes | None, width: int) -> Shapes | None:
    """Find the shapes of the length for which a sample has `width` numbers, if there is one."""

    def at(t: int) -> Shapes:
        return tuple(
            tuple(n + g * t for n, g in zip(shape, by, strict=True))
            for shape, by in zip(shapes, growth or shapes, strict=True)
        )

    if sum(map(prod, shapes)) == width:
        return shapes
    if growth is None:
        return None
    # no dimension is negative, so the width grows with t
    least = -min(n // g for n, g in zip(_flat(shapes), _flat(growth), strict=True) if g)
    for t in range(least, least + MOST_LENGTHS):
        if (size := sum(map(prod, at(t)))) >= width:
            return at(t) if size == width else None
    return None


def _shapes(leaves: Iterable[Tensor]) -> Shapes:
    return tuple(tuple(leaf.shape[1:]) for leaf in leaves)


def _flat(shapes: Shapes) -> tuple[int, ...]:
    return tuple(n for shape in shapes for n in shape)


def _said(shapes: Shapes) -> str:
    return ", ".join(map(str, shapes))


_PAD = "pad all to a fixed length (padding='max_length'; max_length of the collator)"


def _unlike(where: str, shapes: Shapes, first: Shapes) -> str:
    return (
        f"{where} has shape {_said(shapes)} in a sample, and {_said(first)} in the first "
        f"ones: {_PAD}"
    )


class _Dense(torch.autograd.Function):
    """Identity with a contiguous adjoint: kernels round differently with other strides."""

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
