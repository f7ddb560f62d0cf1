"""Several tensors that enter a network or cross a cut: packed into one, or apart."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

Shapes = tuple[tuple[int, ...], ...]
Crossing = Tensor | tuple[Tensor, ...]
"""What crosses a cut: one tensor or, where several cross apart, these (see `Bundle.divide`)."""

SMALL = 256
"""Numbers of a sample up to which a tensor is packed with others instead of crossing apart."""
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

    At a cut tensors cross apart where nobody needs them as columns: each in its memory as it is,
    and those that are small or no numbers of a gradient packed into one.

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

    def divide(self, value: Any) -> tuple[Tensor, ...]:
        """The tensors of a value apart: the large ones as they are, then the others packed.

        Their memory is in the order that `unpack` gives, in which most are anyway. ValueError as in
        `pack`.
        """
        leaves: list[Tensor] = [*map(_real, tree_leaves(value))]
        self._fit(_shapes(leaves))
        large, few = self._places
        apart = [leaves[i].contiguous(memory_format=_layout(leaves[i])) for i in large]
        packed = [self._few.pack([leaves[i] for i in few])] if few else []
        return (*apart, *packed)

    def join(self, parts: tuple[Tensor, ...]) -> Any:
        """The value of which `divide` has made these parts."""
        large, few = self._places
        leaves: list[Any] = [None] * len(self.shapes)
        for i, x in zip(large, parts, strict=False):
            leaves[i] = _restored(x, self.dtypes[i])
        for i, x in zip(few, self._few.unpack(parts[-1]) if few else [], strict=True):
            leaves[i] = x
        return tree_unflatten(leaves, self.structure)

    def pack_parts(self, parts: tuple[Tensor, ...]) -> Tensor:
        """What `pack` makes of the value, or an adjoint of it, that has been divided."""
        large, few = self._places
        columns = {i: x.reshape(len(x), -1) for i, x in zip(large, parts, strict=False)}
        if few:
            small = self._few
            widths = [prod(shape) for shape in small.shapes_of(parts[-1].shape[1])]
            columns |= dict(zip(few, parts[-1].split(widths, 1), strict=True))
        return torch.cat([columns[i] for i in range(len(columns))], 1)

    @property
    def large_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors that cross apart, each as it is."""
        return [self.shapes[i] for i in self._places[0]]

    @property
    def num_large(self) -> int:
        """Tensors that cross apart, each as it is."""
        return len(self._places[0])

    @property
    def num_parts(self) -> int:
        """Tensors into which `divide` divides a value."""
        return self.num_large + bool(self._places[1])

    @cached_property
    def _places(self) -> tuple[list[int], list[int]]:
        """The places of the tensors that cross apart, and of the others."""
        places = range(len(self.shapes))
        some = SMALL if len(places) > 1 else 0
        few = [i for i in places if prod(self.shapes[i]) <= some or _is_exact(self.dtypes[i])]
        return [i for i in places if i not in few], few

    @cached_property
    def _few(self) -> "Bundle":
        """The bundle of the tensors that do not cross apart, as a list."""
        _, few = self._places

        def of(each: Any) -> Any:
            return tuple(each[i] for i in few)

        growth = of(self.growth) if self.growth else ()
        varies = any(map(any, growth))
        structure = tree_flatten([0] * len(few))[1]
        parts = of(self.shapes), of(self.dtypes), growth if varies else None
        return Bundle(structure, *parts, self.where)

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

    def shapes_of(self, width: int) -> Shapes:
        """The shapes of a sample that has so many numbers; ValueError if no length gives that."""
        if shapes := _of_width(self.shapes, self.growth, width):
            return shapes
        raise ValueError(
            f"{self.where} has {width} numbers in a sample, and {self.size} in the first ones: "
            f"{_PAD}"
        )

    def pack(self, value: Any) -> Tensor:
        """Pack the tensors of a value.

        ValueError for an integer beyond 2^24, and for shapes that do not fit the bundle.
        """
        leaves: list[Tensor] = [*map(_real, tree_leaves(value))]
        self._fit(_shapes(leaves))
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

    def _fit(self, shapes: Shapes) -> None:
        """ValueError for shapes that do not fit the bundle."""
        width = sum(map(prod, shapes))
        if shapes != self.shapes and shapes != _of_width(self.shapes, self.growth, width):
            raise ValueError(_unlike(self.where, shapes, self.shapes))

    def unpack(self, packed: Tensor) -> Any:
        """Unpack a value from `pack`.

        Tensors that autocast has narrowed keep the packed format. ValueError for a width that no
        length gives.
        """
        shapes = self.shapes_of(packed.shape[1])
        parts = packed.split([prod(shape) for shape in shapes], 1)
        leaves = []
        for part, shape, dtype in zip(parts, shapes, self.dtypes, strict=True):
            x = part.reshape(len(packed), *shape)
            dense = dtype.is_complex or _is_exact(dtype)
            x = x.contiguous(memory_format=torch.contiguous_format if dense else _layout(x))
            leaves.append(_restored(x, dtype))
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


def each(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """Apply a function to a tensor, or to each of several; with `others`, to their tensors, too."""
    if isinstance(x, tuple):
        return tuple(map(function, x, *others))
    return function(x, *others)


def packed(x: Any, bundle: Bundle | None) -> Any:
    """What crosses a cut with this bundle, packed as one tensor; anything else as it is."""
    with torch.no_grad():
        return bundle.pack_parts(x) if bundle is not None and isinstance(x, tuple) else x


def _restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of this type that has been packed, or crossed as real numbers."""
    if _is_exact(dtype):
        return x.detach().to(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(x.clone() if x.storage_offset() % 2 else x.contiguous())
    return x.to(dtype) if torch.promote_types(dtype, x.dtype) == x.dtype else x


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
