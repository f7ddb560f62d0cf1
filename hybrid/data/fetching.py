"""Items of a user's data set, read in this process or ahead in worker processes."""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

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
        seed_of_sample = int(np.random.SeedSequence((seed, epoch, n)).generate_state(1)[0])
        random.seed(seed_of_sample)
        np.random.seed(seed_of_sample)
        torch.default_generator.manual_seed(seed_of_sample)
        try:
            items.append(dataset[i])
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            raise ValueError(f"sample {i} of the data set: {format_error(error)}") from None
    try:
        return collate(items)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"samples {ids[0] % count}, ... do not make a batch: {type(error).__name__}: "
            f"{one_line(error)[:200]}; give tensors of one shape, or collate="
        ) from None


def make_batch_here(
    dataset: Any, collate: Collate, ids: Sequence[int], seed: int, epoch: int
) -> Any:
    """The same as `make_batch`, but the generators of this process are restored afterwards."""
    with _DRAWING:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return make_batch(dataset, collate, ids, seed, epoch)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


class Pool:
    """Makes batches in worker processes, or without any in the calling thread."""

    def __init__(self, dataset: Any, collate: Collate, workers: int) -> None:
        if workers < 0:
            raise ValueError(f"workers is {workers}: give 0 or more")
        self.dataset, self.collate, self.workers = dataset, collate, workers
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, ids: Sequence[int], seed: int, epoch: int) -> Future[Any]:
        """A batch to come."""
        batch: Future[Any] = Future()
        try:
            if not self.workers:
                batch.set_result(make_batch_here(self.dataset, self.collate, ids, seed, epoch))
                return batch
            self._executor = self._executor or ProcessPoolExecutor(
                self.workers,
                get_context("forkserver"),
                _initialize_worker,
                (self.dataset, self.collate),
            )
            return self._executor.submit(_make_batch_in_worker, ids, seed, epoch)
        except (BrokenProcessPool, ValueError) as error:
            batch.set_exception(error)
            return batch
        except Exception as error:  # whatever pickle finds
            raise ValueError(
                f"the data set cannot be sent to a worker process: {one_line(error)}; define its "
                "class and collate in a module, or set data.workers=0"
            ) from None

    def result(self, future: Future[Any]) -> Any:
        """What was submitted, as tensors; ValueError if its worker is gone."""
        try:
            batch = future.result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker process of the data set ended: a script that starts workers needs "
                'if __name__ == "__main__"; else see its output, or set data.workers=0'
            ) from None
        return tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, batch)

    def close(self) -> None:
        """End the worker processes, which have ended when this returns."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None


_WORKER: dict[str, Any] = {}
"""The data set and its collate function, in a worker process."""


def _initialize_worker(dataset: Any, collate: Collate) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    torch.set_num_threads(1)
    _WORKER.update(dataset=dataset, collate=collate)


def _make_batch_in_worker(ids: Sequence[int], seed: int, epoch: int) -> Any:
    batch = make_batch(_WORKER["dataset"], _WORKER["collate"], ids, seed, epoch)
    # as arrays: tensors would go through shared memory that this process must outlive
    return tree_map(lambda x: x.numpy() if isinstance(x, Tensor) else x, batch)


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
