"""Ranks that read other samples are told before they train on them."""

import pytest
import torch
from torch.utils.data import DataLoader

from hybrid.data import Mapped, Stream, as_data, load
from hybrid.errors import AgreedError
from hybrid.links.threads import ThreadLinks, run_threads
from hybrid.proof.sample_comparison import SampleComparison

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


class Items:
    """Samples of a file on one host, of which a copy may be stale."""

    def __init__(self, count=32, shift=0, drawn=False, wide=False):
        self.count, self.shift, self.drawn, self.wide = count, shift, drawn, wide
        self.random = torch.Generator()
        self.random.seed()

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        x = X[(i + self.shift) % len(X)]
        x = x + self.drawn * torch.rand(3, generator=self.random)
        return (x.double() if self.wide else x), (i + self.shift) % 4


class Lines(Items):
    def __iter__(self):
        return (self[i] for i in range(self.count))

    __getitem__ = Items.__getitem__


class Apart(ThreadLinks):
    """Threads as ranks that share no memory."""

    in_one_process = False


def compared(*data, then=None):
    """What every rank says of its own data; `then` happens after the start, on the last."""

    def program(links):
        own = data[links.rank]
        try:
            comparison = SampleComparison(links, [own])
            for epoch in range(20 if then else 0):
                if epoch == 10 and links.rank == len(data) - 1:
                    then(getattr(own, "dataset", None))
                comparison.check_next(own, epoch)
        except AgreedError as error:
            return str(error)
        return ""

    said = run_threads(len(data), program, make=Apart)
    assert len({*said}) == 1
    return said[0]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Items(24), "number, 24 and 32"),
        (Items(shift=1), "inputs"),
        (Items(shift=40), ""),
        (Items(wide=True), "inputs"),
        (Items(drawn=True), ""),
        (Items(drawn=True, shift=1), "targets"),
    ],
)
def test_map_style_data_that_differ_are_refused_and_what_an_item_draws_may(other, named):
    said = compared(Mapped(Items()), Mapped(other))
    assert (f"rank 1 other samples than the first rank (by their {named})" in said) == bool(named)
    assert bool(said) == bool(named)


def test_a_copy_that_becomes_another_while_a_run_trains_is_noticed():
    def changes(items):
        items.shift = 1

    assert "by their" in compared(Mapped(Items()), Mapped(Items()), Mapped(Items()), then=changes)
    assert not compared(Mapped(Items()), Mapped(Items()), then=lambda items: None)


class Rare(Items):
    """Its transform acts on few items, and draws from a generator of its own."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (-x if torch.rand((), generator=self.random) < 0.05 else x), y


class Kept(Items):
    """Items are kept as they were drawn when they were first read; half of them are missing."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __getitem__(self, i):
        if i % 2 and i > 2:
            raise FileNotFoundError(f"image {i} is not there")
        return self.kept.setdefault(i, (X[i] + torch.rand(3), i % 4))


def pairs(items):
    """A collate function that stacks what has one length, and takes several items only."""
    assert len(items) > 1
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


class Lengths(Items):
    def __getitem__(self, i):
        return torch.ones(1 + i // 16, 3), i % 4


def test_data_that_trained_before_train_still():
    for _ in range(20):
        nothing = compared(Mapped(Rare()), Mapped(Rare()), then=lambda items: None)
        assert not nothing
    even = [DataLoader(Kept(), 4, sampler=range(0, 32, 2)) for _ in "12"]
    kept = [as_data(loader) for loader in even]
    assert not compared(*kept, then=lambda items: [items[i] for i in range(0, 32, 2)])
    grouped = [DataLoader(Lengths(), 4, collate_fn=pairs, sampler=range(32)) for _ in "12"]
    assert not compared(*map(as_data, grouped), then=lambda items: None)
    streams = [Stream(Lines(), collate=pairs) for _ in "12"]
    assert not compared(*streams, then=lambda items: None)


def test_tensors_orders_and_streams_are_compared():
    pair = X, torch.arange(40) % 4
    assert not compared(as_data(pair), as_data(pair))
    assert not compared(as_data(pair), as_data((X * (1 + 1e-4), pair[1])))  # another processor
    assert "by their inputs" in compared(as_data(pair), as_data((X.roll(1, 0), pair[1])))
    streams = [Stream(Lines(shift=n)) for n in (0, 0, 1)]
    assert not compared(*streams[:2])
    assert "by their inputs" in compared(*streams[1:])


def test_images_are_compared_whichever_of_them_a_rank_keeps():
    train, test = load("digits", "")
    assert not compared(train.only(True, False), train.only(False, True), train.only(False, False))
    assert "by their number" in compared(train, test)
    assert "by their content" in compared(
        train.take(99),
        train.take(99).__class__(**{**vars(train.take(99)), "labels": train.labels[1:100]}),
    )
