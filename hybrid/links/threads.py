"""Links between K threads of one process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybrid.links.base import PeerError, Program, RankLinks

T = TypeVar("T")


class Room:
    """What the threads of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: dict[tuple[int, int], SimpleQueue[Any]] = {
            pair: SimpleQueue() for a in range(size) for pair in ((a, a - 1), (a, a + 1))
        }
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.failed = threading.Event()

    def fail(self) -> None:
        self.failed.set()
        self.barrier.abort()


class ThreadLinks(RankLinks):
    """Hands tensors over by reference: nothing is copied.

    On a GPU each block has a stream of its own, and a receiver's waits for the sender's work so
    far.
    """

    def __init__(self, rank: int, room: Room) -> None:
        super().__init__(rank, room.size)
        self._room = room

    def flush(self) -> None:
        """Nothing to wait for: a reference has left when it is put."""

    def _send(self, peer: int, tensor: Tensor) -> None:
        event = None
        if tensor.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
        self._room.queues[self.rank, peer].put((tensor, event))

    def _receive(self, peer: int) -> Tensor:
        received: Tensor
        received, event = self._take(peer)
        if event is not None:
            stream = torch.cuda.current_stream(received.device)
            stream.wait_event(event)
            received.record_stream(stream)
        return received

    def _take(self, peer: int) -> Any:
        queue = self._room.queues[peer, self.rank]
        while True:
            try:
                return queue.get(timeout=0.5)
            except Empty:
                if self._room.failed.is_set():
                    raise PeerError from None

    def _all_gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        self._room.values[self.rank] = value
        try:
            self._room.barrier.wait()
            everyone: list[T] = list(self._room.values)
            self._room.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerError from None
        return everyone


def run_threads(
    size: int,
    program: Program[T],
    intra_op_threads: int = 1,
    make: Callable[[int, Room], ThreadLinks] = ThreadLinks,
) -> list[T]:
    """Run `program` on `size` ranks, each a thread; give their results in rank order.

    The first failure is raised here, after every thread has ended.
    """
    room = Room(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        torch.set_num_threads(intra_op_threads)
        try:
            with _own_stream(size):
                results[rank] = make(rank, room).run(program)
        except PeerError:
            pass
        except BaseException as error:
            failures.append(error)
            room.fail()

    if size == 1:
        rank_main(0)
    else:
        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"block-{rank}", daemon=True)
            for rank in range(size)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            room.fail()
            raise
    if failures:
        raise failures[0]
    return results


@contextmanager
def _own_stream(size: int) -> Iterator[None]:
    """A stream for each of several blocks on a GPU, so that they share it at the same time."""
    if size == 1 or not torch.cuda.is_initialized():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
