"""How a tensor gets into the memory that MPI reads, and out of the memory that it writes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Outgoing:
    """A tensor on its way into a message."""

    memory: Tensor
    """What MPI reads, once the event has happened."""
    event: Any = None

    def ready(self) -> bool:
        """Whether MPI may read."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait until MPI may read."""
        if self.event is not None:
            self.event.synchronize()


class Staging:
    """Between a block's device and MPI, which reads and writes the memory of blocks on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def outgoing(self, tensor: Tensor) -> Outgoing:
        """Begin to hand over a dense tensor; its strides are kept."""
        return Outgoing(tensor)

    def buffer(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        """Memory that MPI may write to at once."""
        return torch.empty_strided(shape, strides, dtype=dtype)

    def room(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        """Memory that MPI may write to once what is handed over afterwards is ready."""
        return self.buffer(shape, strides, dtype)

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


class DirectStaging(Staging):
    """For a GPU-aware MPI, which reads and writes GPU memory, but does not order streams."""

    def outgoing(self, tensor: Tensor) -> Outgoing:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return Outgoing(tensor, event)

    def buffer(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        made = self.room(shape, strides, dtype)
        # torch may give out memory that work in the queue has yet to read
        torch.cuda.current_stream(self._device).synchronize()
        return made

    def room(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)


def staging(device: torch.device, gpu_aware: bool) -> Staging:
    """The staging that a block on this device needs."""
    if device.type != "cuda":
        return Staging(device)
    return DirectStaging(device) if gpu_aware else PinnedStaging(device)
