"""Messages of one pair of ranks over gloo, sent and received by threads beside the computation."""

from __future__ import annotations

from queue import Queue, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import PeerError
from hybrid.links.layout import Buffer, format_of, memory_of, room_for
from hybrid.links.staging import Outgoing

_HEADER = 20
"""Numbers of a header: how many follow, then the format of a tensor of up to 9 dimensions."""
_END = -1


class Sender:
    """Sends tensors to one rank, in order. A header with its format goes before each."""

    def __init__(self, group: Any, number: int) -> None:
        self._group, self._number = group, number
        self._queue: Queue[Outgoing | None] = Queue()
        self._lost = False
        Thread(target=self._run, name=f"to rank {number}", daemon=True).start()

    def put(self, outgoing: Outgoing | None) -> None:
        """Send a dense tensor in host memory; of one on the meta device, the format alone.

        None ends the messages.
        """
        self._queue.put(outgoing)

    def flush(self) -> None:
        """Wait until all has left; PeerError if the other rank has ended."""
        self._queue.join()
        if self._lost:
            raise PeerError(f"rank {self._number} has ended; go on with --resume")

    def _run(self) -> None:
        ended = False
        while not ended:
            outgoing = self._queue.get()
            ended = outgoing is None
            try:
                if not self._lost:
                    self._send(outgoing)
            except RuntimeError:  # the other side is gone: what is still put here is dropped
                self._lost = True
            finally:
                self._queue.task_done()

    def _send(self, outgoing: Outgoing | None) -> None:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        if outgoing is None:
            header[0] = _END
            self._group.send([header], self._number, 0).wait()
            return
        layout = format_of(outgoing.memory)
        header[: len(layout) + 1] = torch.tensor([len(layout), *layout])
        outgoing.wait()
        work = self._group.send([header], self._number, 0)
        if outgoing.memory.numel() and not outgoing.memory.is_meta:
            self._group.send([memory_of(outgoing.memory)], self._number, 0).wait()
        work.wait()


class Receiver:
    """Receives the tensors of one rank as they come, before anybody asks for them."""

    def __init__(self, group: Any, number: int, buffer: Buffer) -> None:
        self._group, self._number, self._buffer = group, number, buffer
        self._queue: SimpleQueue[Tensor | None] = SimpleQueue()
        Thread(target=self._run, name=f"from rank {number}", daemon=True).start()

    def take(self) -> Tensor:
        """The next tensor, in memory of `buffer`; PeerError if the other rank has ended."""
        tensor = self._queue.get()
        if tensor is None:
            self._queue.put(None)
            raise PeerError(f"rank {self._number} has ended; go on with --resume")
        return tensor

    def has_message(self) -> bool:
        """Whether `take` would not wait."""
        return not self._queue.empty()

    def _run(self) -> None:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        try:
            while True:
                self._group.recv([header], self._number, 0).wait()
                length, *layout = header.tolist()
                if length == _END:
                    return
                tensor = room_for(tuple(layout[:length]), self._buffer)
                if tensor.numel() and not tensor.is_meta:
                    self._group.recv([memory_of(tensor)], self._number, 0).wait()
                self._queue.put(tensor)
        except RuntimeError:  # the connection is closed
            pass
        finally:
            self._queue.put(None)
