"""Number formats: floats of 32 and 16 bits, and bytes with a scale."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hybrid.solvers.codecs.base import Codec, largest
from hybrid.solvers.kernels.operations import wide
from hybrid.solvers.numerics.draws import Key


class Float32(Codec):
    """A tensor as it is, whatever its precision."""

    name = "float32"

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ...]:
        return (x,)

    def decode(self, message: Sequence[Tensor], dtype: torch.dtype, key: Key) -> Tensor:
        return message[0]


class BFloat16(Codec):
    """Rounded to 8 bits of precision, in the range of float32."""

    name = "bfloat16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ...]:
        return (x.to(self.dtype),)

    def decode(self, message: Sequence[Tensor], dtype: torch.dtype, key: Key) -> Tensor:
        return message[0].to(dtype)


class Float16(BFloat16):
    """Rounded to 11 bits of precision, from 6e-8 to 65,504."""

    name = "float16"
    dtype = torch.float16
    by_sample = True


class Int8(Codec):
    """round(x / s), s = max |x| / 127 over each sample and channel, in the format of x.

    Without pixels, (N, C), s is that of each sample.
    """

    name = "int8"
    tensors = 2

    def encode(self, x: Tensor, key: Key) -> tuple[Tensor, ...]:
        y = wide(x)
        pixels = range(min(2, y.dim() - 1), y.dim())
        scale = (_largest_over(y.abs(), pixels) / 127).to(x.dtype)
        divisor = wide(scale).clamp_min(torch.finfo(y.dtype).tiny)
        return (y / divisor).round_().clamp_(-127, 127).to(torch.int8), scale

    def decode(self, message: Sequence[Tensor], dtype: torch.dtype, key: Key) -> Tensor:
        numbers, scale = message
        return numbers.to(dtype) * scale.to(dtype)


def _largest_over(x: Tensor, dims: range) -> Tensor:
    """max over the last dimensions, which stay with size 1."""
    if x.dim() < 4 or not x.is_contiguous(memory_format=torch.channels_last):
        return x.amax(tuple(dims), keepdim=True)
    rows = x.permute(0, 2, 3, 1).flatten(1, 2)
    return largest(rows).transpose(1, 2).unsqueeze(3)
