"""Batches of a user's data set, read in this process or ahead by the workers of a DataLoader."""

import fcntl
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hybrid.data.sampling import restored_generators, seed_generators
from hybrid.errors import format_error, one_line, refused

Collate = Callable[[list[Any]], Any]
Key = tuple[int, ...]
"""What a batch is a function of: the seed, the epoch, and the numbers of its samples."""
AHEAD = 2
"""How many batches each worker reads ahead."""
KEPT = 8
"""How many batches stay cached: another block of this process, or a local step, may want one."""


@dataclass(frozen=True)
class Workers:
    """Processes that read ahead, with the names of a DataLoader's settings."""

    num_workers: int = 0
    worker_init_fn: Callable[[int], Any] | None = None
    timeout: float = 0
    """How many seconds a batch may take; 0: any time."""
    start_method: str = "forkserver"
    """See `multiprocessing`."""


def make_batch(dataset: Any, collate: Collate, key: Key) -> Any:
    """Read a batch; number n is item n mod N of the data set's N.

    What a transform draws is a function of (seed, epoch, n) alone. ValueError names a sample that
    cannot be read.
    """
    seed, epoch, *numbers = key
    items, count = [], len(dataset)
    for n in numbers:
        i = n % count
        seed_generators(seed, epoch, n)
        with refused(f"sample {i} of the data set"):
            items.append(dataset[i])
    return collate_items(collate, items, numbers[0] % count)


def collate_items(collate: Collate, items: Sequence[Any], first: int) -> Any:
    """Collate items to a batch; ValueError names the first one's number."""
    try:
        return to_tensors(collate(list(items)))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"samples {first}, ... do not make a batch: {type(error).__name__}: "
            f"{one_line(error)[:200]}; give tensors of one shape, or collate="
        ) from None


def to_tensors(batch: Any) -> Any:
    """Turn mappings, such as a tokenizer's, into dicts, and arrays into tensors."""
    if isinstance(batch, Mapping):
        return {key: to_tensors(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(map(to_tensors, batch))
    return tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, batch)


class Reader:
    """Reads batches by their keys, and caches the most recent ones.

        announce(keys)  ->  sampler of a DataLoader  ->  workers  ->  cache  ->  read(key)

    A batch that was not announced goes to the workers next. Without workers the calling thread
    reads it.
    """

    def __init__(self, dataset: Any, collate: Collate, workers: Workers | int) -> None:
        self.workers = workers if isinstance(workers, Workers) else Workers(workers)
        if self.workers.num_workers < 0:
            raise ValueError(f"workers is {self.workers.num_workers}: give 0 or more")
        self.dataset, self.collate = dataset, collate
        self._lock = threading.Lock()
        self._cache: dict[Key, Any] = {}
        """Batches, or the errors of those that cannot be read."""
        self._announced: dict[Key, int] = {}
        """Batches that no worker has been given yet, by their place in the epoch."""
        self._assigned = deque[Key]()
        """Batches that workers read, in the order in which they come back."""
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None
        self._started: Any = None
        """A semaphore that counts the workers that have started."""

    def announce(self, keys: Sequence[Key]) -> None:
        """Let workers read these batches of an epoch, in turn with other replicas' shares of it."""
        with self._lock:
            on_their_way = {*self._cache, *self._assigned}
            same = {k: i for k, i in self._announced.items() if keys and k[:2] == keys[0][:2]}
            places = same | {key: i for i, key in enumerate(keys) if key not in on_their_way}
            self._announced = dict(sorted(places.items(), key=lambda pair: pair[1]))

    def read(self, key: Key) -> Any:
        """Give a batch, as tensors; ValueError if it cannot be read."""
        with self._lock:
            if key not in self._cache:
                if self.workers.num_workers:
                    self._read_by_workers(key)
                else:
                    with restored_generators():
                        self._cache[key] = make_batch(self.dataset, self.collate, key)
            batch = self._cache[key]
            while len(self._cache) > KEPT + AHEAD * self.workers.num_workers:
                del self._cache[next(iter(self._cache))]
        if isinstance(batch, ValueError):
            raise batch
        return batch

    def close(self) -> None:
        """End the workers. Those that hang are killed after some seconds."""
        iterator, self._iterator, self._loader = self._iterator, None, None
        if iterator is not None:
            iterator._shutdown_workers()
        self._assigned.clear()
        self._cache.clear()

    def __iter__(self) -> Iterator[Key]:
        """Assign the batches that are announced to workers."""
        while self._announced:
            key = next(iter(self._announced))
            del self._announced[key]
            self._assigned.append(key)
            yield key

    def _read_by_workers(self, key: Key) -> None:
        """Cache a batch, and those that workers were given before it."""
        if key not in self._assigned:
            place = self._announced.pop(key, -1)
            later = {k: i for k, i in self._announced.items() if i >= place}
            self._announced = {key: place, **later}
        try:
            while key not in self._cache:
                batch = self._next_batch()
                self._cache[self._assigned.popleft()] = batch
        except ValueError:
            self.close()
            raise

    def _next_batch(self) -> Any:
        """Wait for the next batch of the workers; ValueError if one has ended, or is late."""
        loader = self._start() if self._loader is None else self._loader
        while True:
            try:
                if not self._assigned:
                    self._iterator = iter(loader)  # the workers go on
                return next(self._iterator)
            except (RuntimeError, OSError, EOFError) as error:
                late = "timed out" in str(error)
                if late and self._started.get_value() < self.workers.num_workers:
                    continue  # a worker that starts imports what it needs
                if late:
                    raise ValueError(
                        "a worker process of the data set took more than "
                        f"{self.workers.timeout:g} s for a batch: give the DataLoader a larger "
                        "timeout, or 0 for any time"
                    ) from None
                raise ValueError(
                    "a worker process of the data set ended: a script that starts workers needs "
                    'if __name__ == "__main__"; else see its output, or set data.workers=0 '
                    "(num_workers=0)"
                ) from None

    def _start(self) -> DataLoader[Any]:
        """Start the workers of a DataLoader with this reader as its sampler."""
        workers, context = self.workers, get_context(self.workers.start_method)
        self._started = context.Semaphore(0)
        self._loader = loader = DataLoader(
            _Batches(self.dataset, self.collate, workers.worker_init_fn, self._started),
            batch_size=None,
            sampler=self,
            num_workers=workers.num_workers,
            collate_fn=_same,
            timeout=workers.timeout,
            worker_init_fn=_start_worker,
            multiprocessing_context=context,
            generator=torch.Generator(),  # that of the process is the user's
            prefetch_factor=AHEAD,
            persistent_workers=True,
        )
        try:
            with catch_warnings():
                simplefilter("ignore")  # torch's advice on pickling precedes the error
                self._iterator = iter(loader)
        except Exception as error:  # whatever pickle finds
            raise ValueError(
                f"the data set cannot be sent to a worker process: {one_line(error)}; define its "
                "class and collate in a module, or set data.workers=0 (num_workers=0)"
            ) from None
        return loader


class _Batches(Dataset[Any]):
    """The batches of a data set by their keys, in a worker."""

    def __init__(
        self, dataset: Any, collate: Collate, init: Callable[[int], Any] | None, started: Any
    ) -> None:
        self.dataset, self.collate, self.init, self.started = dataset, collate, init, started
        self.fault = ""
        """Why `init` has failed."""

    def __getitem__(self, key: Key) -> Any:
        try:
            if self.fault:
                raise ValueError(self.fault)
            return make_batch(self.dataset, self.collate, key)
        except ValueError as error:
            return error  # torch would raise it with its traceback as its text


def _same(batch: Any) -> Any:
    return batch


def _start_worker(number: int) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    info = get_worker_info()
    assert info is not None
    batches: Any = info.dataset
    object.__setattr__(info, "dataset", batches.dataset)  # as worker_init_fn expects it
    try:
        if batches.init is not None:
            batches.init(number)
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        batches.fault = f"worker_init_fn fails in worker {number}: {format_error(error)}"
    batches.started.release()


def end_with_parent() -> None:
    """End this process when the one that has it started, by multiprocessing, is gone.

        its end of a pipe is closed     the kernel sends SIGKILL, whatever this process is doing
        its descriptor is readable      a thread ends this process: another process may have that
                                        end of the pipe, too, as one that it forked

    Its direct parent is no sign, since a fork server lives as long as its workers. Neither is the
    kernel's signal of a parent's death, which comes when the thread that started the worker ends.
    """
    parent = parent_process()
    assert parent is not None, "no process has started this one"
    pipe = int(parent.sentinel)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    watched = [pipe]
    with suppress(OSError, AttributeError):  # Linux before 5.3 has none
        watched.append(os.pidfd_open(parent.pid or 0))
    if wait(watched[:1], 0):  # it had gone before; its number may be another's by now
        os._exit(1)

    def end_after() -> None:
        wait(watched)
        os._exit(1)

    threading.Thread(target=end_after, name="parent", daemon=True).start()
