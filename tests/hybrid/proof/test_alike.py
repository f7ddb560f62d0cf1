"""Ranks that read other samples are told before they train on them."""

import pytest
import torch

from hybrid.data import Mapped, Stream, as_data, load
from hybrid.errors import AgreedError
from hybrid.links.threads import ThreadLinks, run_threads
from hybrid.proof.alike import check_alike, check_next

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
            check_alike(links, [own])
            for epoch in range(20 if then else 0):
                if epoch == 10 and links.rank == len(data) - 1:
                    then(own.dataset)
                check_next(links, own, 0, epoch, 0)
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
        (Items(wide=True), "shape"),
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


def test_tensors_orders_and_streams_are_compared():
    pair = X, torch.arange(40) % 4
    assert not compared(as_data(pair), as_data(pair))
    assert "by their inputs" in compared(as_data(pair), as_data((X.roll(1, 0), pair[1])))
    streams = [Stream(Lines(shift=n)) for n in (0, 0, 1)]
    assert not compared(*streams[:2])
    assert "by their first sample" in compared(*streams[1:])


def test_images_are_compared_whichever_of_them_a_rank_keeps():
    train, test = load("digits", "")
    assert not compared(train.only(True, False), train.only(False, True), train.only(False, False))
    assert "by their number" in compared(train, test)
    assert "by their content" in compared(
        train.take(99),
        train.take(99).__class__(**{**vars(train.take(99)), "labels": train.labels[1:100]}),
    )
