"""Items of a user's data set, read in this thread, in worker threads or worker processes."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hybrid.data.orphans import end_with_parent
from hybrid.errors import format_error, one_line

WorkerKind = Literal["thread", "forkserver"]
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
        own = int(np.random.SeedSequence((seed, epoch, n)).generate_state(1)[0])
        random.seed(own)
        np.random.seed(own)
        torch.default_generator.manual_seed(own)
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
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return make_batch(dataset, collate, ids, seed, epoch)
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])


class Pool:
    """Makes batches in workers, or without any in the calling thread."""

    def __init__(self, dataset: Any, collate: Collate, workers: int, kind: WorkerKind) -> None:
        if workers < 0 or kind not in get_args(WorkerKind):
            raise ValueError(
                f"workers is {workers} and worker_kind {kind!r}: give 0 or more workers of kind "
                f"{' or '.join(get_args(WorkerKind))}"
            )
        self.dataset, self.collate, self.workers, self.kind = dataset, collate, workers, kind
        self._executor: Executor | None = None

    def submit(self, ids: Sequence[int], seed: int, epoch: int) -> Future[Any]:
        """A batch to come."""
        if not self.workers:
            done: Future[Any] = Future()
            try:
                done.set_result(make_batch_here(self.dataset, self.collate, ids, seed, epoch))
            except ValueError as error:
                done.set_exception(error)
            return done
        if self.kind == "thread":
            self._executor = self._executor or ThreadPoolExecutor(self.workers, "data")
            return self._executor.submit(
                make_batch_here, self.dataset, self.collate, ids, seed, epoch
            )
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                self.workers,
                get_context("forkserver"),
                _initialize_worker,
                (self.dataset, self.collate),
            )
        try:
            return self._executor.submit(_make_batch_in_worker, ids, seed, epoch)
        except BrokenProcessPool as error:
            lost: Future[Any] = Future()
            lost.set_exception(error)
            return lost
        except Exception as error:  # whatever pickle finds
            raise ValueError(
                f"the data set cannot be sent to a worker process: {one_line(error)}; define its "
                "class and collate in a module, or set data.worker_kind=thread"
            ) from None

    def result(self, future: Future[Any]) -> Any:
        """What was submitted, as tensors; ValueError if its worker is gone."""
        try:
            found = future.result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker process of the data set ended: a script that starts workers needs "
                'if __name__ == "__main__"; else see its output, or set data.workers=0'
            ) from None
        return tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, found)

    def close(self) -> None:
        """End the workers; worker processes have ended when this returns."""
        if self._executor is not None:
            # the end of the process would otherwise wait for them for ever
            processes = isinstance(self._executor, ProcessPoolExecutor)
            self._executor.shutdown(wait=processes, cancel_futures=True)
            self._executor = None


_WORKER: dict[str, Any] = {}
"""The data set and its collate function, in a worker process."""


def _initialize_worker(dataset: Any, collate: Collate) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    torch.set_num_threads(1)
    _WORKER.update(dataset=dataset, collate=collate)


def _make_batch_in_worker(ids: Sequence[int], seed: int, epoch: int) -> Any:
    found = make_batch(_WORKER["dataset"], _WORKER["collate"], ids, seed, epoch)
    # as arrays: tensors would go through shared memory that this process must outlive
    return tree_map(lambda x: x.numpy() if isinstance(x, Tensor) else x, found)
