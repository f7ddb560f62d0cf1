"""DataLoaders, their samplers, and what workers of them are told."""

from collections import UserDict

import torch
from samples import BATCH, SAMPLES, Drawing, trained
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler, get_worker_info
from world import launched

TOLD = []


class Shuffled(Sampler):
    """A permutation, drawn in place from Python's generator, in an epoch that it is told."""

    def __init__(self, count):
        self.order, self.epoch = list(range(count)), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        torch.manual_seed(self.epoch)
        order = torch.randperm(len(self.order)).tolist()
        self.order = [self.order[i] for i in order]
        return iter(self.order)


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0


class Rows:
    """Item i is (six times what the worker was told, a class)."""

    def __init__(self, count=32):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((6,), float(TOLD[-1] if TOLD else 0)), i % 3


def tell_worker(number):
    """What a user starts workers with."""
    info = get_worker_info()
    TOLD.append(100 * info.num_workers + number - info.id)


def fail_in_worker(number):
    raise KeyError("no such shard")


def loader(**more):
    return DataLoader(Rows(), **{"batch_size": 8, **more})


def pad(items, kind=UserDict):
    """As transformers' DataCollatorWithPadding: a mapping of padded rows."""
    width = max(len(item["input_ids"]) for item in items)
    ids = [item["input_ids"] + [0] * (width - len(item["input_ids"])) for item in items]
    labels = torch.tensor([item["label"] for item in items])
    return kind({"input_ids": torch.tensor(ids), "labels": labels})


def refused_on_rank(comm):
    """Why a sampler is refused that each rank has with weights of its own."""
    weights = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(comm.rank))
    with launched(comm):
        try:
            trained(
                DataLoader(Drawing(), BATCH, sampler=WeightedRandomSampler(weights, SAMPLES)),
                blocks=comm.size,
            )
        except ValueError as error:
            return str(error)
    return ""
