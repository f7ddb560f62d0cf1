"""What users give that cannot work, a training that is given it."""

import os
import signal
import sys
from fcntl import F_GETSIG, fcntl
from multiprocessing import parent_process

import torch
from torch import nn
from torch.utils.data import Dataset
from trainings import trainer_of

SAMPLES, FEATURES, CLASSES, BATCH = 64, 6, 3, 16
X = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % CLASSES
LINES = {"train": (X, Y), "test": (X[:BATCH], Y[:BATCH])}


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def fit(
    out=None, model=None, blocks=2, cuts=None, sample=X[:4], solver=None, settings=(), **changed
):
    """One epoch of four mini-batches on two threads, with what is not as usual."""
    data = {**LINES, **{k: changed.pop(k) for k in ("train", "test") if k in changed}}
    # a loss that counts its calls keeps state, which the proof refuses
    verify = {"verify": "never"} if "loss" in changed else {}
    train = {"epochs": 1, "batch_size": BATCH, **verify, **dict(settings)}
    how = {"cuts": cuts, "sample": sample, "train": train, "out": out}
    made = trainer_of(model or layers(), solver, blocks, **how, **changed)
    return made.fit(data["train"], data["test"])


def after(calls, good, bad):
    """What does as `good` so many times, and then as `bad`."""
    count = 0

    def either(*given):
        nonlocal count
        count += 1
        return (good if count <= calls else bad)(*given)

    return either


def failing(*given):
    raise KeyError("out of\nluck")


def leaving(*given):
    sys.exit(0)


class Items(Dataset):
    """Sample i is item(i)."""

    def __init__(self, item=lambda i: (X[i], Y[i]), count=SAMPLES):
        self.item, self.count = item, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.item(i)


class Deadly(Items):
    """Whoever reads sample 30 in a process of its own, ends."""

    def __init__(self):
        super().__init__(None)

    def __getitem__(self, i):
        if i == 30 and parent_process() is not None:
            os._exit(3)
        return X[i], Y[i]


class Listening(Deadly):
    """Tells, as the classes of two samples, which signals end whoever reads them.

    The class of sample SIGNAL is what such a process gets from the kernel at its parent's end, that
    of INTERRUPT what it does at Ctrl-C.
    """

    SIGNAL, INTERRUPT = 31, 32

    def __getitem__(self, i):
        if i == self.SIGNAL:
            return X[i], fcntl(parent_process().sentinel, F_GETSIG)
        if i == self.INTERRUPT:
            return X[i], int(signal.getsignal(signal.SIGINT))
        return super().__getitem__(i)


class Careless(nn.Module):
    """A forward pass in training that fails, at the fourth mini-batch unless it is told when."""

    def __init__(self, fails=failing, passes=3):
        super().__init__()
        self.count, self.fails, self.passes = 0, fails, passes

    def forward(self, x):
        self.count += self.training
        return self.fails(x) if self.count > self.passes else x


class Exiting(Items):
    """Sample 30 ends whoever reads it, as it thinks."""

    def __init__(self):
        super().__init__(None)

    def __getitem__(self, i):
        return leaving() if i == 30 else (X[i], Y[i])


class Choosing(nn.Module):
    """A forward pass that depends on values."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(self.a(x) if x.sum() > 0 else x)


class Sharing(nn.Module):
    """One layer at the beginning and at the end."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.c(torch.relu(self.a(torch.relu(self.b(torch.relu(self.a(x)))))))


class Numbered(nn.Module):
    """Vectors and a number a sample, which are added up behind the first layer."""

    def __init__(self):
        super().__init__()
        self.a, self.e, self.b = nn.Linear(6, 6), nn.Embedding(3, 6), nn.Linear(6, 3)

    def forward(self, x, number):
        return self.b(torch.relu(self.a(x)) + self.e(number % 3))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.a, self.b = nn.Embedding(3, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, number):
        return self.b(torch.relu(self.a(self.e(number))).mean(1))


class Twofold(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        return self.b(hidden), hidden
