"""Groups of numbers, each with its range, in 3 to 6 bits a number."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hybrid.solvers.codecs.base import Codec, largest
from hybrid.solvers.kernels.operations import wide
from hybrid.solvers.numerics.draws import Key

GROUP = 64
"""Numbers of a group where none is given."""


class Int4(Codec):
    r"""Numbers of b bits q over the range of their group of g:

        q = floor((x - l) / s + u),   x' = l + s (q - u + 1/2)
        l <= min x,   s >= (max x - l) / (2^b - 1)

    l and s are bfloat16, rounded so that no q needs to be cut off, and x is computed with in
    float32: b + 32 / g bits a number. x is a matrix of N H W (or N T, or N) rows and C columns.

    Activations: a group is g rows of one channel, as channels differ in mean and range (of fewer
                 than g rows, g numbers in the order of memory);
                 u = 1/2. Zeros behind a ReLU stay zeros.
    Adjoints:    a group is g numbers in the order of memory, as samples differ in range;
                 u is uniform on (0, 1), the same on both sides. So E x' = x, and the
                 error has half the variance that it would have for x' = l + s q.

    Either error is at most s / 2. The second is dither that is subtracted (Gray and Stockham, IEEE
    Transactions on Information Theory 39, 1993).
    """

    name = "int4"
    coarse = True
    bits: ClassVar[int] = 4

    def __init__(self, group: int = GROUP, adjoint: bool = False) -> None:
        super().__init__(adjoint)
        if not (8 <= group <= 4096 and group & (group - 1) == 0):
            raise ValueError(f"a group of {group} numbers: choose a power of 2 from 8 to 4096")
        self.group = group
        self._planes = [(w, self.bits & w - 1) for w in (1, 2, 4) if self.bits & w]
        """Bits of q that travel together: how many, and those below them."""
        self.tensors = len(self._planes) + 1

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ...]:
        y = wide(x).detach()
        y = y.movedim(1, -1).contiguous() if y.dim() > 3 else y.contiguous()
        groups = self._groups(y)
        low, high = self._range(groups)
        low = (low - low.abs() / 256).bfloat16()
        scale = ((high - low) * ((1 + 1 / 128) / (2**self.bits - 1))).bfloat16()
        q = (groups - low.to(y.dtype)).div_(scale.to(y.dtype).clamp_min(_TINY))
        q = q.add_(self._u(q, key))
        numbers = q.to(torch.int8).view(-1)[: y.numel()].view(y.shape)
        padding = -y.shape[-1] % (8 // self._planes[0][0])
        numbers = torch.nn.functional.pad(numbers, (0, padding))
        # the receiver learns how many columns are padding from the dimensions of this tensor
        ranges = torch.stack((low, scale)).view(2, *groups.shape[::2], *[1] * padding)
        planes = (_pack(numbers >> below & 2**width - 1, width) for width, below in self._planes)
        return (*planes, ranges)

    def decode(self, message: Sequence[Tensor], dtype: torch.dtype, key: Key) -> Tensor:
        *planes, ranges = message
        pairs = zip(planes, self._planes, strict=True)
        numbers = reduce(or_, (_unpack(plane, w) << below for plane, (w, below) in pairs))
        padding = ranges.dim() - 3
        numbers = numbers[..., : numbers.shape[-1] - padding].contiguous()
        kind = torch.promote_types(dtype, torch.float32)
        low, scale = ranges.view(2, -1, 1, ranges.shape[2]).to(kind)
        q = self._groups(numbers).to(kind)
        q = q.sub_(self._u(q, key)).add_(0.5) if self.adjoint else q
        x = q.mul_(scale).add_(low).view(-1)[: numbers.numel()].view(numbers.shape).to(dtype)
        return x.movedim(-1, 1) if x.dim() > 3 else x

    def _range(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """What the levels of each group cover."""
        return -largest(-groups), largest(groups)

    def _u(self, like: Tensor, key: Key) -> Tensor | float:
        return _noise(like, key) if self.adjoint else 0.5

    def _groups(self, rows: Tensor) -> Tensor:
        """(..., C) as groups (count, g, C) or, in the order of memory, (count, g, 1).

        The last row fills up the last groups.
        """
        by_channel = not self.adjoint and rows.numel() >= self.group * rows.shape[-1]
        rows = rows.reshape(-1, rows.shape[-1] if by_channel else 1)
        missing = -len(rows) % self.group
        if missing:
            rows = torch.cat((rows, rows[-1:].expand(missing, -1)))
        return rows.view(-1, self.group, rows.shape[1])


class Int6(Int4):
    """The same in 6 bits."""

    name = "int6"
    bits = 6


class Int3(Int4):
    """The same in 3 bits."""

    name = "int3"
    bits = 3


_TINY = torch.finfo(torch.float32).tiny
"""A scale that is not 0: of a group of equal numbers any would do."""


def _noise(like: Tensor, key: Key) -> Tensor:
    """Numbers that are uniform on (0, 1), of 8 bits, a function of `key`."""
    (seed,) = np.random.SeedSequence(key).generate_state(1, np.uint64).tolist()
    generator = torch.Generator(like.device).manual_seed(seed)
    words = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)
    flat = words.view(torch.uint8)[: like.numel()].to(like.dtype)
    return flat.mul_(2**-8).add_(2**-9).view(like.shape)


_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""By bits of a number: words of as many bytes as numbers go into one."""


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """(..., n) bytes of b bits in (..., n b / 8) bytes."""
    words = packed = numbers.view(_WORDS[bits])
    for place in range(1, 8 // bits):
        packed = packed | words >> place * (8 - bits)
    return packed.to(torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack`."""
    words = packed = packed.to(_WORDS[bits])
    for place in range(1, 8 // bits):
        words = words | packed << place * (8 - bits)
    numbers: Tensor = words.view(torch.int8) & 2**bits - 1
    return numbers
