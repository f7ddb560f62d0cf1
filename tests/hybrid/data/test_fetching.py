"""Samples are the same whoever makes them, and whatever is made before them."""

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

from hybrid.data.fetching import Pool, Workers, make_batch, make_batch_here

WORKERS = {"inline": 0, "processes": 2}


@pytest.fixture
def pool(request):
    before = active_children()
    made = Pool(Drawing(), default_collate, WORKERS[request.param])
    yield made
    made.close()
    assert {*active_children()} <= {*before}, "a closed pool leaves no process"


@pytest.mark.parametrize("pool", WORKERS, indirect=True)
def test_what_transforms_draw_does_not_depend_on_who_makes_the_sample_or_when(pool):
    # processes: 2 s and more, for each begins with an import of torch
    alone = {i: make_batch(Drawing(), default_collate, [i], 3, 1)[0][0] for i in range(SAMPLES)}
    orders = [torch.randperm(SAMPLES).split(size) for size in (7, 1, 48)]
    batches = [ids.tolist() for order in orders for ids in order]
    futures = [pool.submit(ids, 3, 1) for ids in batches]
    for ids, future in zip(batches, futures, strict=True):
        images, labels = pool.result(future)
        assert torch.equal(images, torch.stack([alone[i] for i in ids]))
        assert labels.tolist() == [i % 3 for i in ids]


@pytest.mark.parametrize("given", [(4, 1, [5]), (3, 2, [5]), (3, 1, [6])], ids=str)
def test_another_seed_epoch_or_sample_draws_anew(given):
    seed, epoch, ids = given
    assert noise([5], 3, 1) != noise(ids, seed, epoch)
    assert noise([5], 3, 1) == noise([5], 3, 1)


def noise(ids, seed, epoch):
    """What was drawn for the first value of a sample."""
    images, _ = make_batch(Drawing(), default_collate, ids, seed, epoch)
    return float(images[0, 0] + (ids[0] + 1) / SAMPLES)


@pytest.mark.parametrize("ids", [[1, 2], [1, 99]])
def test_the_generators_of_this_process_stay_as_they_were(ids):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    future = Pool(Failing(100), default_collate, 0).submit(ids, 0, 0)
    assert (future.exception() is not None) == (ids[1] > 50)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


class Failing(Drawing):
    def __getitem__(self, i):
        if i > 50:
            raise IndexError("beyond the end")
        return super().__getitem__(i)


def test_a_sample_that_fails_is_named_with_the_place():
    said = refusal(make_batch_here, Failing(100), default_collate, [3, 77], 0, 0)
    assert "sample 77 of the data set: IndexError: beyond the end (test_fetching.py, line" in said


def test_items_that_make_no_batch_are_told_with_the_remedy():
    items = Items(lambda i: torch.zeros(i + 1))
    said = refusal(make_batch_here, items, default_collate, [3, 4], 0, 0)
    assert said.startswith("samples 3, ... do not make a batch: RuntimeError")
    assert said.endswith("give tensors of one shape, or collate=")


@pytest.fixture(scope="module")
def deadly():
    """A pool of one process, which takes 2 s and more to begin, for it imports torch."""
    pool = Pool(Listening(), default_collate, 1)
    yield pool
    pool.close()


def test_the_kernel_kills_a_worker_process_with_the_one_it_works_for(deadly):
    signals = deadly.result(deadly.submit([Listening.SIGNAL], 0, 0))[1]
    assert signals.tolist() == [signal.SIGKILL]


def test_a_worker_process_leaves_ctrl_c_to_the_one_it_works_for(deadly):
    answers = deadly.result(deadly.submit([Listening.INTERRUPT], 0, 0))[1]
    assert answers.tolist() == [signal.SIG_IGN]


def test_a_process_that_ends_is_told_and_so_is_every_later_batch(deadly):
    assert deadly.result(deadly.submit([1, 2], 0, 0))[1].tolist() == [1, 2]
    for ids in ([30], [1]):
        assert "a worker process of the data set ended" in refusal(
            lambda ids=ids: deadly.result(deadly.submit(ids, 0, 0))
        )


def test_a_data_set_that_cannot_be_sent_is_told():
    pool = Pool(Items(lambda i: i), default_collate, 1)
    assert "cannot be sent to a worker process" in refusal(pool.submit, [0], 0, 0)
    pool.close()


class Hanging(Drawing):
    """Its first sample never comes, and its worker takes its time to start."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        sleep(0.5)

    def __getitem__(self, i):
        sleep(0 if i else 1000)
        return super().__getitem__(i)


def test_a_worker_that_hangs_is_told_after_the_timeout_and_killed_and_its_start_does_not_count():
    before = active_children()
    made = Pool(Hanging(), default_collate, Workers(1, timeout=0.3))
    try:
        made.result(made.submit([1], 0, 0))
        assert "more than 0.3 s for a batch" in refusal(made.result, made.submit([0], 0, 0))
        begin = monotonic()
    finally:
        made.close()
    assert monotonic() - begin < 60
    assert {*active_children()} <= {*before}
