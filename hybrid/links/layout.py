"""How a dense tensor lies in memory, which is how links carry it: no format needs a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool),
    *(torch.int16, torch.complex64, torch.complex128),
)

Buffer = Callable[[list[int], list[int], torch.dtype], Tensor]
"""(shape, strides, dtype) -> memory that a message may be written to."""


def as_dense(tensor: Tensor) -> Tensor:
    """The tensor without its graph, its elements in one stretch of memory, in any order."""
    tensor = tensor.detach()
    return tensor if is_dense(tensor) else tensor.contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def memory_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as bytes (n,), without a copy."""
    return tensor.as_strided((prod(tensor.shape),), (1,)).view(torch.uint8)


def format_of(tensor: Tensor) -> tuple[int, ...]:
    """What a receiver must know to make room for a tensor: dtype, shape, strides."""
    return DTYPES.index(tensor.dtype), *tensor.shape, *tensor.stride()


def room_for(layout: tuple[int, ...], buffer: Buffer) -> Tensor:
    """Memory for a tensor of a format."""
    dtype, *numbers = layout
    dims = len(numbers) // 2
    return buffer(numbers[:dims], numbers[dims:], DTYPES[dtype])


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of several tensors, one after another."""
    return torch.cat([memory_of(as_dense(tensor)) for tensor in tensors])


def split_bytes(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the formats of others, whose bytes come one after another."""
    made = [torch.empty_like(tensor) for tensor in like]
    parts = joined.split([len(memory_of(tensor)) for tensor in made])
    for tensor, part in zip(made, parts, strict=True):
        memory_of(tensor).copy_(part)
    return made


def sizes_in_bytes(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor's elements."""
    return [tensor.numel() * tensor.element_size() for tensor in tensors]
