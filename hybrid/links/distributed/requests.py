"""Messages of torch.distributed on their way: whether they have arrived, and what ends them."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from hybrid.errors import PeerError
from hybrid.links.communicator import lost_ranks


class TorchRequest:
    """A work of torch.distributed that can tell when it is over: one of NCCL's."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """The host waits for a work of gloo, the current stream for one of NCCL."""
        with lost_ranks():
            self._work.wait()

    def done(self) -> bool:
        return bool(self._work.is_completed())


class GlooRequest(TorchRequest):
    """A message of gloo, which cannot be asked: a thread has to wait in place of the rank."""

    def __init__(self, work: Any) -> None:
        super().__init__(work)
        self._over: Event | None = None
        self._error: PeerError | None = None

    def watched_by(self, waiter: Waiter) -> GlooRequest:
        """Let a thread wait for it, so that it can be asked."""
        if self._over is None:
            self._over = Event()
            waiter.queue.put(self)
        return self

    def wait(self) -> None:
        if self._over is None:
            super().wait()
            return
        self._over.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._over is not None and self._over.is_set()

    def finish(self) -> None:
        """Wait, on the thread."""
        assert self._over is not None
        try:
            super().wait()
        except PeerError as error:
            self._error = error
        self._over.set()


class Waiter:
    """A thread that waits for requests in their order, until `end`.

    A process that ends while a thread is inside gloo is aborted: links end theirs when they close.
    """

    def __init__(self, name: str) -> None:
        self.queue: SimpleQueue[GlooRequest | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Return when the thread has ended, after all that it waits for."""
        self.queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self.queue.get()) is not None:
            request.finish()
