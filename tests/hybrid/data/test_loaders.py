"""DataLoaders: their order, their workers and their batches, or one line that refuses them."""

import random

import loaders
import numpy as np
import pytest
import torch
from answers import refusal
from loaders import Endless, Shuffled, loader
from misused import X, Y, fit
from samples import BATCH, SAMPLES, Drawing, layers, trained
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from trainings import assert_same, stopped, trainer_of

from hybrid.data import as_data
from hybrid.settings.config import CheckpointSettings

PAIRS = TensorDataset(X, Y)


def order(sampler, seed=0, epoch=0, count=64, **more):
    data = as_data(DataLoader(TensorDataset(X[:count], Y[:count]), 8, sampler=sampler, **more))
    return data.order.of_epoch(seed, epoch).tolist()


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_loader_trains_as_a_loop_of_ones_own_over_it(blocks):
    model, loop = layers(), layers()
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1, momentum=0.9)
    given = DataLoader(TensorDataset(X, Y), 16, drop_last=True)
    for _ in range(2):
        for x, y in given:
            optimizer.zero_grad()
            nn.functional.cross_entropy(loop(x), y).backward()
            optimizer.step()
    cut = {"blocks": blocks, "sample": X[:4], "schedule": {"name": "constant", "warmup_epochs": 0}}
    sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
    made = trainer_of(model, train={"batch_size": 16}, optimizer=sgd, **cut)
    made.fit(given, DataLoader(TensorDataset(X, Y), 48))
    assert_same(dict(made.blocks.model.state_dict()), dict(loop.state_dict()))


def test_the_batch_size_of_a_loader_is_taken_where_none_is_set():
    data = DataLoader(Drawing(), 12)
    made = trainer_of(layers(), sample=torch.zeros(4, 6))
    made.options.train = {"epochs": 1, "threads": 1}
    made.fit(data)
    assert made.options.train.batch_size == 12
    made.fit(DataLoader(Drawing(), 16))
    assert made.options.train.batch_size == 16, "the first loader's is not the user's"


def test_workers_collate_and_worker_init_fn_of_a_loader_act():
    # 2 s and more, for a process begins with an import of torch
    data = as_data(loader(num_workers=1, worker_init_fn=loaders.tell_worker, pin_memory=True))
    try:
        assert data.batch(torch.arange(8), 0, 0).unique().tolist() == [100]
    finally:
        data.close()


def test_a_worker_init_fn_that_fails_ends_the_run_in_one_line():
    said = refusal(as_data, loader(num_workers=1, worker_init_fn=loaders.fail_in_worker))
    assert "worker_init_fn fails in worker 0" in said
    assert "no such shard" in said


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.rand(64), 40),
    "seeded": lambda: WeightedRandomSampler([1.0] * 64, 40, generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler(range(8, 32)),
    "replacement": lambda: RandomSampler(PAIRS, replacement=True, num_samples=48),
    "in place": lambda: Shuffled(64),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_is_a_function_of_seed_and_epoch_alone(name):
    torch.manual_seed(0)
    sampler = SAMPLERS[name]()
    data = [as_data(DataLoader(PAIRS, 8, sampler=sampler)) for _ in range(2)]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    later = data[0].order.of_epoch(5, 2)
    first, second = (data[1].order.of_epoch(5, epoch) for epoch in (0, 1))
    assert torch.equal(data[1].order.of_epoch(5, 2), later)
    assert not torch.equal(first, second)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert (sampler.epoch if name == "in place" else 0) == 0, "the user's own is not touched"


def test_a_batch_sampler_of_batches_of_one_size_is_an_order():
    batches = BatchSampler(SequentialSampler(range(20)), 8, drop_last=False)
    data = as_data(DataLoader(PAIRS, batch_sampler=batches))
    assert data.batch_size == 8
    assert data.order.of_epoch(0, 0).tolist() == list(range(20))


def test_a_sample_that_is_taken_twice_is_augmented_twice():
    data = as_data(DataLoader(PAIRS, 8, sampler=[5, 6, 5]))
    assert data.test_order().tolist() == [5, 6, 5 + 64]


def test_a_test_takes_all_that_its_sampler_gives_and_no_more():
    made = trainer_of(layers(), train={"batch_size": 16}, sample=X[:4])
    odd = made.evaluate(DataLoader(PAIRS, 7, sampler=range(10, 31), drop_last=True))
    assert odd["loss"] == pytest.approx(made.evaluate((X[10:31], Y[10:31]))["loss"], rel=1e-6)


def test_a_run_with_a_sampler_goes_on_as_if_nothing_had_happened(tmp_path):
    def run(out=None, resume=False):
        sampler = WeightedRandomSampler(torch.linspace(0, 1, SAMPLES), SAMPLES)
        often = CheckpointSettings(keep_last=0, steps=1)
        more = {"out": out, "checkpoint": often, "resume": resume, "blocks": 2}
        data = DataLoader(Drawing(), BATCH, sampler=sampler)
        return trained(data, settings={"report_every": 2}, **more)

    whole = run(tmp_path / "run")
    stopped(tmp_path / "run", 8)
    assert_same(run(tmp_path / "run", resume=True), whole)


REFUSED = {
    "a share of a replica": (
        lambda: as_data(DataLoader(PAIRS, 8, sampler=DistributedSampler(PAIRS, 2, 0))),
        *("DistributedSampler", "replicas take their shares", "shuffle=True"),
    ),
    "batches of several sizes": (
        lambda: as_data(DataLoader(PAIRS, batch_sampler=[[0, 1], [2], [3, 4]])),
        *("batches of 1 to 2 samples", "data.Stream(loader, samples=...)"),
    ),
    "no batches": (lambda: as_data(DataLoader(PAIRS, None)), "batch_size=None", "batched=True"),
    "samples without end": (lambda: order(Endless()), "gives 4097 samples", "__len__"),
    "samples that are not there": (lambda: order([64]), "samples 64 to 64", "0 to 63"),
    "no samples": (lambda: order([]), "gives 0 samples in epoch 1", "must give 1"),
    "a sampler of another's choice": (
        lambda: fit(train=DataLoader(PAIRS, 16), sampler="selective-backprop"),
        *("sampler.name is 'selective-backprop'", "shuffle=True"),
    ),
    "more workers": (
        lambda: as_data(loader(num_workers=1), workers=2),
        *("data.workers is 2", "num_workers=1"),
    ),
    "fewer samples than a mini-batch": (
        lambda: fit(train=DataLoader(PAIRS, 16, sampler=[1, 2])),
        *("batch size is 16", "choose a smaller one"),
    ),
}


@pytest.mark.parametrize("use", REFUSED)
def test_a_loader_that_cannot_be_is_refused(use):
    make, *parts = REFUSED[use]
    said = refusal(make)
    assert [part for part in parts if part not in said] == []
