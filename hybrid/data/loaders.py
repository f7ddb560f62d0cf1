"""What people have, as training sees it: data sets, iterables, and torch's DataLoaders."""

import random
from collections.abc import Iterable
from copy import deepcopy
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from hybrid.data.dataset import Data
from hybrid.data.mapped import Mapped
from hybrid.data.reader import Workers
from hybrid.data.sampling import restored_generators, seed_generators
from hybrid.data.stream import Stream
from hybrid.errors import refused

MOST_PASSES = 64
"""How often an epoch may take all samples of a data set."""


def as_data(source: Any, workers: int = 0, labels_are_inputs: bool = False) -> Data:
    """Make a data set of an argument of `fit`; ValueError if it is none.

    `workers` read ahead; `labels_are_inputs` is as in `Mapped`.
    """
    if isinstance(source, Data):
        return source
    if isinstance(source, DataLoader):
        return _of_loader(source, workers, labels_are_inputs)
    several = isinstance(source, tuple | list) and len(source) > 0
    if several and all(isinstance(x, Tensor | np.ndarray) for x in source):
        tensors = [torch.as_tensor(x) for x in source]
        if len({len(x) for x in tensors}) > 1:
            raise ValueError(
                f"inputs and targets have {' and '.join(str(len(x)) for x in tensors)} rows: give "
                "as many of each"
            )
        return Mapped(TensorDataset(*tensors))
    if not isinstance(source, IterableDataset) and hasattr(source, "__getitem__"):
        return Mapped(source, workers=workers, labels_are_inputs=labels_are_inputs)
    if not isinstance(source, Iterable):
        raise ValueError(
            f"a {type(source).__name__} is no data: give a data set with __len__ and __getitem__, "
            "an iterable, a DataLoader, or a pair of tensors"
        )
    _refuse_workers(source, workers)
    return Stream(source, labels_are_inputs=labels_are_inputs)


def _refuse_workers(source: Any, workers: int) -> None:
    if workers:
        raise ValueError(
            f"data.workers is {workers}, but a {type(source).__name__} is read in its order: leave "
            "it out, or wrap the iterable in a DataLoader with num_workers"
        )


def _of_loader(loader: DataLoader[Any], workers: int, labels_are_inputs: bool) -> Data:
    """A DataLoader's data set, collate function, workers, batch size and order."""
    if isinstance(loader.dataset, IterableDataset):
        _refuse_workers(loader, workers)
        return Stream(loader, labels_are_inputs=labels_are_inputs)
    if loader.batch_sampler is None:
        raise ValueError(
            "the DataLoader has batch_size=None, by which a data set makes mini-batches itself: "
            "give it a batch_size, or give data.Stream(loader, samples=..., batched=True)"
        )
    if workers and loader.num_workers not in (0, workers):
        raise ValueError(
            f"data.workers is {workers}, but the DataLoader has num_workers={loader.num_workers}: "
            "leave one of the two out"
        )
    context = getattr(loader, "multiprocessing_context", None)
    method = "forkserver" if context is None else context.get_start_method()
    num_workers = loader.num_workers or workers
    data = Mapped(
        loader.dataset,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        workers=Workers(num_workers, loader.worker_init_fn, loader.timeout, method),
        labels_are_inputs=labels_are_inputs,
    )
    data.batch_size, data.order = _batch_size_and_order(loader, len(data))
    return data


def _batch_size_and_order(loader: DataLoader[Any], count: int) -> "tuple[int, SamplerOrder | None]":
    """The size of its mini-batches, and their order; None: a permutation for each epoch."""
    batches = loader.batch_sampler
    for sampler in (loader.sampler, getattr(batches, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                "the DataLoader has a DistributedSampler, but replicas take their shares of every "
                "mini-batch by themselves: give DataLoader(dataset, batch_size, shuffle=True), "
                "with the batch size of all replicas together"
            )
    if loader.batch_size is None:  # batch_sampler= was given
        cut = SamplerOrder(batches, loader.dataset, count, batched=True)
        return cut.batch_size, cut
    permutes = isinstance(loader.sampler, RandomSampler) and (
        type(loader.sampler).__iter__ is RandomSampler.__iter__
        and not loader.sampler.replacement
        and loader.sampler.num_samples == count
    )
    order = None if permutes else SamplerOrder(loader.sampler, loader.dataset, count)
    return loader.batch_size, order


class SamplerOrder:
    """The order that a torch sampler gives, as a function of (seed, epoch) alone.

        a copy of the sampler as it was given  ->  set_epoch  ->  its generators, and those of
        this process, seeded  ->  iterated once  ->  the generators of this process as before

    Every rank and every resumed run have the same order without a message. Samplers draw otherwise
    than in a loop of one's own, where an epoch goes on from the generators of the one before.
    """

    def __init__(self, sampler: Any, dataset: Any, count: int, batched: bool = False) -> None:
        """`sampler` gives numbers below `count`, or lists of them if `batched`."""
        self.count, self.batched = count, batched
        self.name = f"the sampler {type(sampler).__name__}"
        # the data set is shared, for it may be large and a copy would know no more
        self._shared = {id(dataset): dataset}
        self._sampler = self._copy(sampler)
        self._length: int | None = None
        self._drawn = lru_cache(maxsize=2)(self._draw)
        self.batch_size = 0
        """Samples of every batch of a batch sampler."""
        if batched:
            self.of_epoch(0, 0)
            self._length = None  # of the seed of a run

    def of_epoch(self, seed: int, epoch: int) -> Tensor:
        return self._drawn(seed, epoch)

    def _copy(self, sampler: Any) -> Any:
        with refused(f"{self.name} cannot be copied, as every epoch has to begin with it anew"):
            return deepcopy(sampler, dict(self._shared))

    def _draw(self, seed: int, epoch: int) -> Tensor:
        sampler = self._copy(self._sampler)
        with restored_generators(), refused(f"{self.name} fails"):
            for each in _with_inner_samplers(sampler):
                if hasattr(each, "set_epoch"):
                    each.set_epoch(epoch)
            seed_generators(seed, epoch)
            for each in _with_inner_samplers(sampler):
                _seed_attributes(each, seed, epoch)
            length = len(sampler) if hasattr(sampler, "__len__") else MOST_PASSES * self.count + 1
            draws = list(islice(sampler, length))
            samples = [i for batch in draws for i in batch] if self.batched else draws
            order = torch.tensor([int(i) for i in samples], dtype=torch.int64)
        self._check(order, [len(batch) for batch in draws] if self.batched else [], epoch)
        return order

    def _check(self, order: Tensor, sizes: list[int], epoch: int) -> None:
        most = MOST_PASSES * self.count
        if not 0 < len(order) <= most:
            raise ValueError(
                f"{self.name} gives {len(order)} samples in epoch {epoch + 1}: it must give 1 to "
                f"{most}, and needs a __len__ if it has no end"
            )
        if order.min() < 0 or order.max() >= self.count:
            raise ValueError(
                f"{self.name} gives samples {int(order.min())} to {int(order.max())} in epoch "
                f"{epoch + 1}: they must be from 0 to {self.count - 1}"
            )
        if self._length not in (None, len(order)):
            raise ValueError(
                f"{self.name} gives {len(order)} samples in epoch {epoch + 1}, but {self._length} "
                "in the first: let it give as many in every epoch"
            )
        size = self.batch_size or max(sizes, default=0)
        if any(n != size for n in sizes[:-1]) or any(n > size for n in sizes[-1:]):
            raise ValueError(
                f"{self.name} gives batches of {min(sizes)} to {max(sizes)} samples, and "
                "mini-batches have one size: let all have the same, or give "
                "data.Stream(loader, samples=...), which cuts them anew"
            )
        self._length, self.batch_size = len(order), size


def _with_inner_samplers(sampler: Any) -> list[Any]:
    """A sampler and those that it takes samples from, which torch calls `sampler`."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, *_with_inner_samplers(inner)]


def _seed_attributes(sampler: Any, seed: int, epoch: int) -> None:
    """Seed the generators among a sampler's attributes."""
    number = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    for name, value in list(getattr(sampler, "__dict__", {}).items()):
        if isinstance(value, torch.Generator):
            value.manual_seed(number)
        elif isinstance(value, random.Random | np.random.RandomState):
            value.seed(number)
        elif isinstance(value, np.random.Generator):
            setattr(sampler, name, np.random.default_rng(number))
