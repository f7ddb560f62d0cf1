"""Samples are the same whoever reads them, and whatever is read before them."""

import random
import signal
from multiprocessing import active_children
from time import monotonic, sleep

import numpy as np
import pytest
import torch
from answers import refusal
from misused import Items, Listening
from samples import SAMPLES, Drawing
from torch.utils.data import default_collate

from hybrid.data.reader import AHEAD, Reader, Workers, make_batch


def keys(*batches, seed=3, epoch=1):
    return [(seed, epoch, *numbers) for numbers in batches]


@pytest.fixture
def reader(request):
    before = active_children()
    made = Reader(Drawing(), default_collate, request.param)
    yield made
    made.close()
    assert {*active_children()} <= {*before}, "a closed reader leaves no process"


@pytest.mark.parametrize("reader", [0, 2], indirect=True)
def test_what_transforms_draw_does_not_depend_on_who_reads_the_sample_or_when(reader):
    # 2 workers: 2 s and more, for each begins with an import of torch
    single = [make_batch(Drawing(), default_collate, key) for key in keys(*zip(range(SAMPLES)))]
    orders = [torch.randperm(SAMPLES).split(size) for size in (7, 1, 48)]
    batches = keys(*(ids.tolist() for order in orders for ids in order))
    reader.announce(batches[:-3])
    for key in [*batches[::2], *batches]:
        images, labels = reader.read(key)
        assert torch.equal(images, torch.cat([single[i][0] for i in key[2:]]))
        assert labels.tolist() == [i % 3 for i in key[2:]]


@pytest.mark.parametrize("reader", [1], indirect=True)
def test_workers_read_the_next_batches_while_one_is_used(reader):
    # 2 s and more, for a worker begins with an import of torch
    shares = keys(*([i] for i in range(16)))
    for replica in range(2):
        reader.announce(shares[replica::2])
    reader.read(shares[0])
    assert [*reader._assigned] == shares[1 : 1 + AHEAD]
    reader.read(shares[12])
    assert [*reader._assigned] == shares[13 : 13 + AHEAD], "a resumed epoch begins later"


@pytest.mark.parametrize("given", [(4, 1, 5), (3, 2, 5), (3, 1, 6)], ids=str)
def test_another_seed_epoch_or_sample_draws_anew(given):
    def noise(key):
        images, _ = make_batch(Drawing(), default_collate, key)
        return float(images[0, 0] + (key[-1] + 1) / SAMPLES)

    assert noise((3, 1, 5)) != noise(given)
    assert noise((3, 1, 5)) == noise((3, 1, 5))


class Failing(Drawing):
    def __getitem__(self, i):
        if i > 50:
            raise IndexError("beyond the end")
        return super().__getitem__(i)


@pytest.mark.parametrize("last", [2, 77])
def test_generators_stay_as_they_were_and_a_sample_that_fails_is_named_with_the_place(last):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    reader = Reader(Failing(100), default_collate, 0)
    if last == 2:
        reader.read((0, 0, 3, last))
    else:
        said = refusal(reader.read, (0, 0, 3, last))
        assert "sample 77 of the data set: IndexError: beyond the end (test_reader.py, li" in said
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_items_that_make_no_batch_are_told_with_the_remedy():
    items = Items(lambda i: torch.zeros(i + 1))
    said = refusal(make_batch, items, default_collate, (0, 0, 3, 4))
    assert said.startswith("samples 3, ... do not make a batch: RuntimeError")
    assert said.endswith("give tensors of one shape, or collate=")


def test_a_worker_ends_with_its_parent_leaves_ctrl_c_to_it_and_is_missed_when_it_ends():
    # 7 s and more: an import of torch, and the DataLoader looks every 5 s whether workers live
    reader = Reader(Listening(), default_collate, 1)
    try:
        answers = reader.read((0, 0, Listening.SIGNAL, Listening.INTERRUPT))[1]
        assert answers.tolist() == [signal.SIGKILL, signal.SIG_IGN]
        assert "a worker process of the data set ended" in refusal(reader.read, (0, 0, 30))
    finally:
        reader.close()


def test_a_data_set_that_cannot_be_sent_is_told():
    reader = Reader(Items(lambda i: i), default_collate, 1)
    assert "cannot be sent to a worker process" in refusal(reader.read, (0, 0, 0))
    reader.close()


class Hanging(Drawing):
    """Its first sample never comes, and its worker takes its time to start."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        sleep(0.5)

    def __getitem__(self, i):
        sleep(0 if i else 1000)
        return super().__getitem__(i)


def test_a_worker_that_hangs_is_told_after_the_timeout_and_killed_and_its_start_does_not_count():
    # 7 s and more: an import of torch, and 5 s in which a worker may end by itself
    before = active_children()
    reader = Reader(Hanging(), default_collate, Workers(1, timeout=0.3))
    begin = monotonic()
    try:
        reader.read((0, 0, 1))
        assert "more than 0.3 s for a batch" in refusal(reader.read, (0, 0, 0))
    finally:
        reader.close()
    assert monotonic() - begin < 100
    assert {*active_children()} <= {*before}
