"""Iterables of samples with the interfaces of torch, Hugging Face and webdataset."""

import random

import torch
import trainings
from samples import layers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from trainings import trainer_of
from world import launched

from hybrid.data import Stream

SAMPLES, BATCH = 48, 8
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(SAMPLES) % 3


class Plain:
    """Begins anew whenever it is iterated; counts how often, and what it gives."""

    def __init__(self, count=SAMPLES):
        self.count, self.opened, self.given = count, 0, 0

    def __iter__(self):
        self.opened += 1
        for i in self.order():
            self.given += 1
            yield X[i], int(Y[i])

    def order(self):
        return range(self.count)


class Sized(Plain, IterableDataset):
    """Torch's, with a length, which draws noise from Python's generator."""

    def __len__(self):
        return self.count

    def __iter__(self):
        for x, y in super().__iter__():
            yield x + random.random(), y


class Streaming(Plain):
    """As Hugging Face streams: another order in every pass."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        return torch.randperm(
            self.count, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()

    def __iter__(self):
        for x, y in super().__iter__():
            yield {"input": x, "label": y}


class Careless(Plain):
    """Another order on every rank, and whenever it is begun."""

    def order(self):
        return random.SystemRandom().sample(range(self.count), self.count)


def batches(count=SAMPLES, size=10):
    """A DataLoader around an iterable, of batches that no mini-batch has the size of."""
    return DataLoader(Sized(count), size)


KINDS = {
    "passes": Sized,
    "on and on": lambda: Stream(Streaming(SAMPLES - 11), SAMPLES),
    "batches": batches,
}


def trainer(solver=None, blocks=1, settings=(), model=None, **more):
    train = {"batch_size": BATCH, "threads": 1, **dict(settings)}
    return trainer_of(
        model or layers(), solver, blocks, train=train, **{"sample": torch.zeros(4, 6), **more}
    )


def trained(data, *arguments, **more):
    """The weights after two epochs of six mini-batches."""
    return trainings.trained_weights(trainer(*arguments, **more), (data,))


def trained_on_rank(comm, kind, replicas):
    """The weights of the last block, or of the whole network."""
    with launched(comm):
        grid = {"replicas": replicas} if replicas > 1 else {}
        made = trainer(blocks=comm.size // replicas, **grid)
        made.fit(KINDS[kind]())
    last = made.blocks.module(comm.rank % (comm.size // replicas))
    return [p.tolist() for p in last.parameters()]


def opened_on_rank(comm):
    """How often a rank of a chain begins a stream, and how much it reads."""
    stream = Streaming()
    with launched(comm):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(comm.size)))
        made = trainer(blocks=comm.size, model=model, settings={"report_every": 2})
        made.fit(Stream(stream, SAMPLES))
    return stream.opened, stream.given


def refused_on_rank(comm):
    """Why a stream that each rank reads in an order of its own is refused."""
    with launched(comm):
        try:
            trainer(blocks=comm.size).fit(Stream(Careless(), SAMPLES))
        except ValueError as error:
            return str(error)
    return ""
