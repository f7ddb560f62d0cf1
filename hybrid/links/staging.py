"""How a tensor gets into the host memory that a library sends, and out of where it receives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


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
    """For blocks on the CPU, whose memory the library reads and writes itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def outgoing(self, tensor: Tensor) -> Outgoing:
        """Begin to hand over a dense tensor; its strides are kept."""
        return Outgoing(tensor)

    def buffer(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        """Memory to receive into."""
        return torch.empty_strided(shape, strides, dtype=dtype)

    def arrived(self, buffer: Tensor) -> Tensor:
        """The tensor on the block's device, whose current stream may use it."""
        return buffer


class PinnedStaging(Staging):
    """Through pinned host memory, copied on a stream of its own while the block computes.

    torch's host allocator gives a pinned buffer out again only when the copies from it are over.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copying = torch.cuda.Stream(device)

    def outgoing(self, tensor: Tensor) -> Outgoing:
        memory = self.buffer(list(tensor.shape), list(tensor.stride()), tensor.dtype)
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            memory.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._copying)
        tensor.record_stream(self._copying)
        return Outgoing(memory, event)

    def buffer(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=True)

    def arrived(self, buffer: Tensor) -> Tensor:
        return buffer.to(self._device, non_blocking=True)


def staging(device: torch.device) -> Staging:
    """The staging that a block on this device needs."""
    return PinnedStaging(device) if device.type == "cuda" else Staging(device)


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
