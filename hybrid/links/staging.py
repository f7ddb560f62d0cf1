"""The memory of messages: tensors staged for sending, and room to receive into."""

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
"""Everything a receiver needs to allocate a tensor: dtype, shape, strides."""


@dataclass
class Outgoing:
    """A tensor that is being staged for a message."""

    memory: Tensor
    """The memory to send once the event has happened."""
    event: Any = None

    def ready(self) -> bool:
        """Whether it may be sent."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait until it may be sent."""
        if self.event is not None:
            self.event.synchronize()


class Staging:
    """Memory of messages: on the blocks' device or, for a GPU, pinned memory of the host.

    Copies to pinned memory run on a separate stream while the block computes. torch's allocator
    reuses a pinned buffer only after the copies from it have finished.
    """

    def __init__(self, device: torch.device, on_device: bool = False) -> None:
        self._device = device
        self._copying = None
        if device.type == "cuda" and not on_device:
            self._copying = torch.cuda.Stream(device)

    def outgoing(self, tensor: Tensor) -> Outgoing:
        """Begin to stage a dense tensor with its strides; one of the host may be sent at once."""
        if self._copying is None:
            return Outgoing(tensor.to(self._device))
        if not tensor.is_cuda:
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
        """Allocate memory to receive a tensor of a format."""
        if self._copying is not None:
            return room_for(layout, pin_memory=True)
        return room_for(layout, device=self._device)

    def arrived(self, memory: Tensor) -> Tensor:
        """Return received memory on the block's device, usable by its current stream."""
        return memory.to(self._device, non_blocking=True)


class GpuMemory(Staging):
    """Messages in a GPU's memory, for a library that reads and writes it outside of streams.

    A message may be sent once the stream has made it. Memory to receive into belongs to a separate
    stream without work, so nothing else still uses it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, on_device=True)
        self._receiving = torch.cuda.Stream(device)

    def outgoing(self, tensor: Tensor) -> Outgoing:
        tensor, event = tensor.to(self._device), torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return Outgoing(tensor, event)

    def room(self, layout: Format) -> Tensor:
        with torch.cuda.stream(self._receiving):
            memory = super().room(layout)
        self._receiving.synchronize()  # torch may fill new memory, see torch.utils.deterministic
        return memory

    def arrived(self, memory: Tensor) -> Tensor:
        memory.record_stream(torch.cuda.current_stream(self._device))
        return memory


def as_dense(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, contiguous in memory in any order of dimensions."""
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
    """View the memory of a dense tensor as bytes (n,)."""
    return tensor.as_strided((prod(tensor.shape),), (1,)).view(torch.uint8)


def format_of(tensor: Tensor) -> Format:
    """Return a tensor's format."""
    return DTYPES.index(tensor.dtype), *tensor.shape, *tensor.stride()


def room_for(layout: Format, **where: Any) -> Tensor:
    """Allocate a tensor of a format; `where` goes to torch.empty_strided."""
    dtype, *numbers = layout
    dims = len(numbers) // 2
    return torch.empty_strided(numbers[:dims], numbers[dims:], dtype=DTYPES[dtype], **where)


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of several tensors."""
    return torch.cat([memory_of(as_dense(tensor)) for tensor in tensors])


def split_bytes(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split bytes into tensors of the formats of `like`: the inverse of `joined_bytes`."""
    tensors = [torch.empty_like(tensor) for tensor in like]
    parts = joined.split([tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        memory_of(tensor).copy_(part)
    return tensors
