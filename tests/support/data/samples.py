"""Data sets whose transforms draw, that count what is read, or give what Hugging Face's give."""

import random

import numpy as np
import torch
import trainings
from torch import nn
from torch.utils.data import Dataset
from trainings import trainer_of
from world import launched

SAMPLES, BATCH = 48, 8


class Drawing(Dataset):
    """(6 numbers, a class), its transform drawing from random, numpy and torch."""

    def __init__(self, count=SAMPLES):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        x = torch.linspace(-1, 1, 6) * (i + 1) / self.count
        noise = random.random(), float(np.random.rand()), float(torch.rand(()))
        return x + torch.tensor(noise).repeat(2), i % 3


class Counted(Drawing):
    """Notes which samples are read."""

    def __init__(self, count=SAMPLES):
        super().__init__(count)
        self.read = []

    def __getitem__(self, i):
        self.read.append(i)
        return super().__getitem__(i)


class Rows:
    """Dicts of lists and numbers by number, as Hugging Face's data sets give them."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return {"ids": [i % 5, 1, 2], "weight": 0.5, "label": i % 3}


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trained(data, solver=None, blocks=1, test=None, settings=(), model=None, **more):
    """The weights after two epochs of six mini-batches."""
    train = {"batch_size": BATCH, **dict(settings)}
    more = {"sample": torch.zeros(4, 6), **more}
    made = trainer_of(model or layers(), solver, blocks, train=train, **more)
    return trainings.trained_weights(made, (data, test or data))


class Listed(Counted):
    """The same, with a list of its targets."""

    def __init__(self, count=SAMPLES):
        super().__init__(count)
        self.targets = [i % 3 for i in range(count)]


def reads_on_rank(comm, replicas, lists):
    """On a rank of a grid: how many items it reads in two epochs."""
    data, known = Listed() if lists else Counted(), Drawing(BATCH)
    blocks = comm.size // replicas
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3))
    with launched(comm):
        grid = {"side_by_side": "chain"} if replicas > 1 else {}
        trained(data, blocks=blocks, test=known, model=model, replicas=replicas, **grid)
    return len(data.read)


def trained_unseeded(comm):
    """The weights of a replica on each rank, of a network that is drawn there."""
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].running_mean += comm.rank
    with launched(comm):
        data = Drawing(2 * BATCH)
        trained(data, blocks=1, test=data, model=model, replicas=comm.size)
    return [p.tolist() for p in model.state_dict().values()]
