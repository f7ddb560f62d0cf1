"""Links between K threads of one process."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from time import time
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybrid.errors import PeerError
from hybrid.links.base import Program, RankLinks, Start
from hybrid.links.communicator import RankGroup
from hybrid.links.grid import Grid, GridPlace
from hybrid.solvers.peers import Sum

T = TypeVar("T")
LAST_SECONDS = 10.0
"""How long an interrupt waits for the threads to close files."""


class ValueBarrier(threading.Barrier):
    """A barrier with a slot for each thread's value."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.values: list[Any] = [None] * size


class ThreadGroup(RankGroup):
    """A thread and the others of a barrier; values are not copied."""

    def __init__(self, rank: int, barrier: ValueBarrier) -> None:
        self.rank, self.size, self._barrier = rank, barrier.parties, barrier

    def exchange(self, value: T) -> list[T]:
        """Return the values of all threads, in order; PeerError if one of them has ended."""
        if self.size == 1:
            return [value]
        self._barrier.values[self.rank] = value
        try:
            self._barrier.wait()
            values: list[T] = list(self._barrier.values)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerError("another rank has ended") from None
        return values

    def gather(self, value: T, root: int = 0) -> list[T] | None:
        values = self.exchange(value)
        return values if self.rank == root else None

    def bcast(self, value: T, root: int = 0) -> T:
        return self.exchange(value)[root]


class Handed:
    """A tensor that one thread hands to others, which may run on other streams and GPUs."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._made = tensor, None
        if tensor.is_cuda:
            self._made = torch.cuda.Event()
            self._made.record(torch.cuda.current_stream(tensor.device))

    def take(self) -> Tensor:
        """Return it on this thread's GPU, once the stream that makes it has; the host goes on."""
        if self._made is None:
            return self._tensor
        torch.cuda.current_stream().wait_event(self._made)
        # a copy to another GPU runs on this thread's stream of the tensor's GPU
        self._tensor.record_stream(torch.cuda.current_stream(self._tensor.device))
        return self._tensor.to(torch.cuda.current_device(), non_blocking=True)


class SharedSum:
    """The sum of one vector from each of R threads, computed once, by pairs as in a tree."""

    def __init__(self, replicas: int) -> None:
        self._vectors: list[Handed | None] = [None] * replicas
        self._times = [0.0] * replicas
        self._lock = threading.Lock()
        self._missing = replicas
        self.complete = threading.Event()
        """Set once all vectors are there."""
        self._total: Handed | None = None

    def put(self, replica: int, vector: Tensor, now: float) -> None:
        """Add a thread's vector, at a time by its clock."""
        self._vectors[replica], self._times[replica] = Handed(vector), now
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self.complete.set()

    def total(self) -> tuple[Tensor, float]:
        """Return the sum, and the time by the clocks when the last vector arrived."""
        with self._lock:
            if self._total is None:
                vectors = [vector.take() for vector in self._vectors if vector is not None]
                self._total = Handed(sum_of_pairs(vectors))
                self._vectors.clear()
        return self._total.take(), max(self._times)


class ThreadTeam:
    """The queues, barriers and sums that the threads of one run share."""

    def __init__(self, grid: Grid, device: torch.device | None = None) -> None:
        self.places = [grid.place(number) for number in range(grid.ranks)]
        self.gpus = deal_gpus(grid.ranks, device)
        """By place number, the GPU of a thread; None on the CPU."""
        self.queues: dict[tuple[int, int, int], SimpleQueue[Any]] = {}
        """By lane, sender and receiver; each lane is ordered separately."""
        self.grid = ValueBarrier(grid.ranks)
        self.chains = [ValueBarrier(grid.blocks) for _ in range(grid.replicas)]
        self.failed = threading.Event()
        self.start_time = time()
        self._sums: dict[tuple[int, int], tuple[int, SharedSum]] = {}
        """By block and number, with the number of replicas that have taken it."""
        self._lock = threading.Lock()

    def sum(self, place: GridPlace, number: int) -> SharedSum:
        """Return a block's sum of that number, from 0; each of its replicas takes it once."""
        with self._lock:
            key = place.block, number
            count, shared = self._sums.pop(key, (0, SharedSum(place.replicas)))
            if count + 1 < place.replicas:
                self._sums[key] = count + 1, shared
            return shared

    def fail(self) -> None:
        """Raise PeerError in all threads that wait now or later."""
        self.failed.set()
        for barrier in (self.grid, *self.chains):
            barrier.abort()


class ThreadLinks(RankLinks):
    """Links that pass tensors by reference: nothing is copied between threads of one device.

    On GPUs each block has its own stream, and the receiver's stream waits for the sender's.
    """

    name = "threads"

    def __init__(self, number: int, team: ThreadTeam) -> None:
        place = team.places[number]
        chain = self._group(place.block, team.chains[place.replica])
        super().__init__(place, self._group(number, team.grid), chain)
        self._team = team
        self._num_sums = 0
        self.gpus = len({*team.gpus})
        shared = team.gpus[0] is not None and self.gpus < len(team.gpus)
        self.peers_share_gpu = shared and place.replicas > 1

    def _group(self, rank: int, barrier: ValueBarrier) -> ThreadGroup:
        return ThreadGroup(rank, barrier)

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        threads, (blocks, replicas) = torch.get_num_threads(), start.grid
        return run_threads(blocks, program, threads, cls, replicas, start.device)[0]

    def flush(self) -> None:
        """Return at once: a reference is in the queue immediately."""

    def _send(self, number: int, tensor: Tensor) -> None:
        self._put(number, Handed(tensor))

    def _receive(self, number: int) -> Tensor:
        received: Handed = self._take(number)
        return received.take()

    def _put(self, number: int, message: Any) -> None:
        lane, receiver = divmod(number, self.place.count)
        self._queue(lane, self.place.number, receiver).put(message)

    def _take(self, number: int) -> Any:
        lane, sender = divmod(number, self.place.count)
        queue = self._queue(lane, sender, self.place.number)
        while True:
            try:
                return queue.get(timeout=0.5)
            except Empty:
                self._check_others()

    def _queue(self, lane: int, sender: int, receiver: int) -> SimpleQueue[Any]:
        return self._team.queues.setdefault((lane, sender, receiver), SimpleQueue())

    def _check_others(self) -> None:
        if self._team.failed.is_set():
            raise PeerError("another rank has ended")

    def sum_of_peers(self, vector: Tensor) -> Sum:
        number, self._num_sums = self._num_sums, self._num_sums + 1
        shared = self._team.sum(self.place, number)
        shared.put(self.place.replica, vector, self.now())
        ready = None if self.clocked else shared.complete.is_set  # virtual ranks run in turn
        return Sum(lambda: self._total(shared)[0].clone(), ready)  # this replica may write to it

    def _total(self, shared: SharedSum) -> tuple[Tensor, float]:
        """Wait for the sum; return it and the time when the last vector arrived."""
        while not shared.complete.wait(0.5):
            self._check_others()
        return shared.total()


def run_threads(
    blocks: int,
    program: Program[T],
    intra_op_threads: int = 1,
    make: Callable[[int, ThreadTeam], ThreadLinks] = ThreadLinks,
    replicas: int = 1,
    device: torch.device | None = None,
) -> list[T]:
    """Run `program` on a grid of ranks, each a thread; return their results by place.

    If `device` is a GPU, the threads are dealt to all GPUs that torch sees. The first failure is
    raised after every thread has ended.
    """
    team, size = ThreadTeam(Grid(blocks, replicas), device), blocks * replicas
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def rank_main(number: int) -> None:
        torch.set_num_threads(intra_op_threads)
        try:
            with separate_streams(team.gpus, number):
                results[number] = make(number, team).run(program)
        except PeerError:
            pass
        except BaseException as error:
            failures.append(error)
            team.fail()

    if size == 1:
        rank_main(0)
    else:
        threads = [
            threading.Thread(target=rank_main, args=(n,), name=str(place), daemon=True)
            for n, place in enumerate(team.places)
        ]
        try:
            for gpu in {*team.gpus} - {None}:  # what the threads find there has been written
                torch.cuda.current_stream(gpu).synchronize()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            team.fail()
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join(LAST_SECONDS / size)  # it ends at its next wait
            raise
    if failures:
        raise failures[0]
    return results


def deal_gpus(ranks: int, device: torch.device | None) -> list[torch.device | None]:
    """Return each thread's GPU: neighbors share one if there are fewer GPUs than threads."""
    if device is None or device.type != "cuda":
        return [None] * ranks
    if ranks == 1:
        return [device]
    count = min(ranks, torch.cuda.device_count())
    return [torch.device("cuda", number * count // ranks) for number in range(ranks)]


@contextmanager
def separate_streams(gpus: Sequence[torch.device | None], number: int) -> Iterator[None]:
    """Give one of several threads its GPU, and streams of its own on all of their GPUs.

    So blocks run concurrently, and copies to other GPUs beside the work of theirs.
    """
    gpu = gpus[number]
    if len(gpus) == 1 or gpu is None:
        yield
        return
    for each in {*gpus}:
        torch.cuda.set_stream(torch.cuda.Stream(each))
    torch.cuda.set_device(gpu)  # the last stream has set its own
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            torch.cuda.current_stream().synchronize()
        raise
    torch.cuda.current_stream().synchronize()


def sum_of_pairs(vectors: list[Tensor]) -> Tensor:
    """((x_0 + x_1) + (x_2 + x_3)) + ..."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        left_over = vectors[len(vectors) // 2 * 2 :]
        vectors = [a + b for a, b in pairs] + left_over
    return vectors[0]
