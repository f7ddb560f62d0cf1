"""How a tensor gets into the memory that a library sends, and out of where it receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool),
    *(torch.int16, torch.complex64, torch.complex128),
)
Format = tuple[int, ...]
"""What a receiver must know to make room for a tensor: dtype, shape, strides."""


@dataclass
class Outgoing:
    """A tensor on its way into a message."""

    memory: Tensor
    """What is sent, once the event has happened."""
    event: Any = None

    def ready(self) -> bool:
        """Whether it may be sent."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait until it may be sent."""
        if self.event is not None:
            self.event.synchronize()


class Staging:
    """The memory of messages: of the blocks' device or, for a GPU's, pinned memory of the host.

    What is pinned is copied on a stream of its own while the block computes. torch's allocator
    gives a pinned buffer out again only when the copies from it are over.
    """

    def __init__(self, device: torch.device, on_device: bool = False) -> None:
        self._device = device
        self._copying = None
        if device.type == "cuda" and not on_device:
            self._copying = torch.cuda.Stream(device)

    def outgoing(self, tensor: Tensor) -> Outgoing:
        """Begin to hand over a dense tensor; its strides are kept."""
        if self._copying is None:
            return Outgoing(tensor)
        memory = self.room(format_of(tensor))
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            memory.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._copying)
        tensor.record_stream(self._copying)
        return Outgoing(memory, event)

    def room(self, layout: Format) -> Tensor:
        """Memory to receive a tensor of a format into."""
        if self._copying is not None:
            return room_for(layout, pin_memory=True)
        return room_for(layout, device=self._device)

    def arrived(self, memory: Tensor) -> Tensor:
        """The tensor on the block's device, whose current stream may use it."""
        return memory.to(self._device, non_blocking=True)


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


def format_of(tensor: Tensor) -> Format:
    """What a receiver must know to make room for a tensor."""
    return DTYPES.index(tensor.dtype), *tensor.shape, *tensor.stride()


def room_for(layout: Format, **where: Any) -> Tensor:
    """Memory for a tensor of a format, as `where` tells torch."""
    dtype, *numbers = layout
    dims = len(numbers) // 2
    return torch.empty_strided(numbers[:dims], numbers[dims:], dtype=DTYPES[dtype], **where)


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of several tensors, one after another."""
    return torch.cat([memory_of(as_dense(tensor)) for tensor in tensors])


def split_bytes(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the formats of others, whose bytes come one after another."""
    tensors = [torch.empty_like(tensor) for tensor in like]
    parts = joined.split([tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        memory_of(tensor).copy_(part)
    return tensors
