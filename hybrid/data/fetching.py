"""Items of a user's data set, read in this process or ahead in worker processes."""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data._utils import worker as torch_worker

from hybrid.errors import format_error, one_line

Collate = Callable[[list[Any]], Any]

_DRAWING = threading.Lock()
"""The generators that transforms draw from belong to the process: one thread at a time."""


def make_batch(dataset: Any, collate: Collate, ids: Sequence[int], seed: int, epoch: int) -> Any:
    """Items as one batch: number n is item n mod N of the data set's N.

    What their transforms draw is a function of (seed, epoch, n) alone. ValueError names the sample
    that cannot be had.
    """
    items, count = [], len(dataset)
    for n in ids:
        i = n % count
        seed_draws(seed, epoch, n)
        try:
            items.append(dataset[i])
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            raise ValueError(f"sample {i} of the data set: {format_error(error)}") from None
    return collate_items(collate, items, ids[0] % count)


def collate_items(collate: Collate, items: list[Any], first: int) -> Any:
    """Items as one batch, whose mappings are dicts; ValueError, with the first's number."""
    try:
        return plain(collate(items))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"samples {first}, ... do not make a batch: {type(error).__name__}: "
            f"{one_line(error)[:200]}; give tensors of one shape, or collate="
        ) from None


def plain(batch: Any) -> Any:
    """A batch whose mappings, as tokenizers give them, are dicts, and whose arrays are tensors."""
    if isinstance(batch, Mapping):
        return {key: plain(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(map(plain, batch))
    return tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, batch)


def seed_draws(*counters: int) -> None:
    """Seed `random`, numpy and torch by counters, for what a user's code draws from them."""
    seed = int(np.random.SeedSequence(counters).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def own_draws() -> Iterator[None]:
    """The body may seed and draw: the generators of this process are restored afterwards."""
    with _DRAWING:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def make_batch_here(
    dataset: Any, collate: Collate, ids: Sequence[int], seed: int, epoch: int
) -> Any:
    """The same as `make_batch`, but the generators of this process are restored afterwards."""
    with own_draws():
        return make_batch(dataset, collate, ids, seed, epoch)


@dataclass(frozen=True)
class Workers:
    """Processes that read ahead, as a DataLoader's settings describe them."""

    count: int = 0
    start: Callable[[int], Any] | None = None
    """Called in each with its number, from 0."""
    timeout: float = 0
    """Seconds that a batch may take; 0: any time."""
    method: str = "forkserver"
    """How they are started, see `multiprocessing`."""


class Pool:
    """Makes batches in worker processes, or without any in the calling thread."""

    def __init__(self, dataset: Any, collate: Collate, workers: Workers | int) -> None:
        processes = workers if isinstance(workers, Workers) else Workers(workers)
        if processes.count < 0:
            raise ValueError(f"workers is {processes.count}: give 0 or more")
        self.dataset, self.collate = dataset, collate
        self.processes, self.workers = processes, processes.count
        self._executor: ProcessPoolExecutor | None = None
        self._pids: Any = None
        """Of the workers that have started, in memory that they share; 0: not yet."""
        self._patience = PATIENCE

    def submit(self, ids: Sequence[int], seed: int, epoch: int) -> Future[Any]:
        """A batch to come."""
        batch: Future[Any] = Future()
        try:
            if not self.workers:
                batch.set_result(make_batch_here(self.dataset, self.collate, ids, seed, epoch))
                return batch
            self._executor = self._executor or self._start()
            return self._executor.submit(_make_batch_in_worker, ids, seed, epoch)
        except (BrokenProcessPool, ValueError) as error:
            batch.set_exception(error)
            return batch
        except Exception as error:  # whatever pickle finds
            raise ValueError(
                f"the data set cannot be sent to a worker process: {one_line(error)}; define its "
                "class and collate in a module, or set data.workers=0 (num_workers=0)"
            ) from None

    def _start(self) -> ProcessPoolExecutor:
        processes, context = self.processes, get_context(self.processes.method)
        self._pids, self._patience = context.Array("q", self.workers), PATIENCE
        given = self.dataset, self.collate, processes.start, self._pids
        return ProcessPoolExecutor(self.workers, context, _initialize_worker, given)

    def result(self, future: Future[Any]) -> Any:
        """What was submitted, as tensors; ValueError if its worker is gone, or late."""
        timeout = self.processes.timeout
        try:
            while timeout and self._pids is not None and not any(self._pids):
                if wait([future], 0.05).done:  # a worker that starts imports what it needs
                    break
            batch = future.result(timeout or None)
        except BrokenProcessPool:
            raise ValueError(
                "a worker process of the data set ended: a script that starts workers needs "
                'if __name__ == "__main__"; else see its output, or set data.workers=0 '
                "(num_workers=0)"
            ) from None
        except FutureTimeoutError:
            self._patience = 0.0
            raise ValueError(
                f"a worker process of the data set took more than {self.processes.timeout:g} s for "
                "a batch: give the DataLoader a larger timeout, or 0 for any time"
            ) from None
        return plain(batch)

    def close(self) -> None:
        """End the worker processes, which have ended when this returns; those that hang are killed.

        A worker may hang in a user's code, or in a read from a disk that is gone.
        """
        if self._executor is None:
            return
        end = threading.Thread(
            target=self._executor.shutdown, kwargs={"cancel_futures": True}, daemon=True
        )
        end.start()
        end.join(self._patience)
        while end.is_alive():  # one may start only now
            for pid in filter(None, self._pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            end.join(0.1)
        self._executor = None


PATIENCE = 5.0
"""Seconds for workers to end what they do when a data set is closed."""
_WORKER: dict[str, Any] = {}
"""The data set and its collate function, in a worker process."""


def _initialize_worker(
    dataset: Any, collate: Collate, start: Callable[[int], Any] | None, pids: Any
) -> None:
    with pids.get_lock():
        number = [*pids].index(0)
        pids[number] = os.getpid()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    torch.set_num_threads(1)
    _WORKER.update(dataset=dataset, collate=collate)
    if start is None:
        return
    # what torch.utils.data.get_worker_info() tells in a worker of a DataLoader
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=len(pids), seed=torch.initial_seed(), dataset=dataset
    )
    try:
        start(number)
    except (Exception, SystemExit) as error:
        _WORKER["fault"] = f"worker_init_fn fails in worker {number}: {format_error(error)}"


def _make_batch_in_worker(ids: Sequence[int], seed: int, epoch: int) -> Any:
    if "fault" in _WORKER:
        raise ValueError(_WORKER["fault"])
    batch = make_batch(_WORKER["dataset"], _WORKER["collate"], ids, seed, epoch)
    # as arrays: tensors would go through shared memory that this process must outlive
    return tree_map(_as_array, batch)


def _as_array(x: Any) -> Any:
    # numpy has no bfloat16
    return x.numpy() if isinstance(x, Tensor) and x.dtype is not torch.bfloat16 else x


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
    descriptor: int | None = None
    with suppress(OSError, AttributeError):  # Linux before 5.3 has none
        descriptor = os.pidfd_open(parent.pid or 0)
    if _is_readable(pipe):  # it had gone before; its number may be another's by now
        os._exit(1)
    if descriptor is not None:
        threading.Thread(target=_end_after, args=(descriptor,), name="parent", daemon=True).start()


def _end_after(descriptor: int) -> None:
    _is_readable(descriptor, None)
    os._exit(1)


def _is_readable(descriptor: int, milliseconds: int | None = 0) -> bool:
    """Whether a descriptor becomes readable in that time; None waits for as long as it takes."""
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds))
