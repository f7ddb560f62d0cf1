"""Samples that an epoch takes several times are other ones each time."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from trainings import assert_same, digits, trained_weights, trainer

from hybrid.data.augment import Augmentation
from hybrid.data.dataset import Dataset
from hybrid.data.mapped import Mapped
from hybrid.samplers.auto_assist import AutoAssist
from hybrid.samplers.base import Choice, Sampler
from hybrid.samplers.batch_sampler import BatchSampler
from hybrid.samplers.selective_backprop import SelectiveBackprop
from solvers import Backprop


@dataclass(frozen=True)
class Favorites(Sampler):
    """The first samples alone, again and again."""

    name: ClassVar[str] = "favorites"
    few: int = 5

    def start(self, data, seed):
        choice = Choice.__new__(type("Few", (Choice,), {"choose": self.choose}))
        choice.__init__(data, seed)
        return choice

    def choose(self, epoch, first, count):
        return torch.arange(first, first + count) % self.few


class Noise:
    """Items whose fraction is drawn by a transform, and whose whole part is the sample."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.rand(1, dtype=torch.float64) + i, i % 10


def images(count, augmentation):
    made = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(count) % 10
    return Dataset(made, labels, 10, (0.5,) * 3, (0.2,) * 3, augmentation)


@pytest.mark.parametrize("sampler", [AutoAssist(), SelectiveBackprop(lag=1), Favorites()])
def test_no_augmented_sample_is_trained_on_twice_in_an_epoch(sampler):
    chosen = BatchSampler(sampler, Mapped(Noise(200), augmented=True), 0, 20)
    for epoch in range(3):
        seen = []
        for n in range(chosen.steps):
            (ids,) = chosen.ids(epoch, [n])
            chosen.take_losses([[torch.rand(20)]])
            seen += chosen.choice.data.batch(ids, 0, epoch)[:, 0].tolist()
            assert (chosen.choice.data.targets(ids, 0, epoch) == ids % 200 % 10).all()
    assert max(Counter(map(int, seen)).values()) > 1
    assert max(Counter(seen).values()) == 1


def test_an_image_is_augmented_by_its_number():
    made = images(50, Augmentation(pad=16))
    first = torch.arange(50)
    once, again = (made.batch(ids, 0, 0) for ids in (first, first + 50))
    apart = (once != again).flatten(1).any(1)
    assert apart.sum() > 45  # of 33 x 33 places
    assert torch.equal(made.batch(first, 0, 0, augment=False), made.batch(first + 50, 0, 0, False))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2, 1], [2, 3, 0]])
def test_numbers_do_not_depend_on_which_mini_batch_is_asked_for_first(order):
    chosen = BatchSampler(Favorites(few=7), images(40, Augmentation()), 0, 10)
    for n in order:
        (ids,) = chosen.ids(0, [n])
        places = torch.arange(10 * n, 10 * n + 10)
        assert ids.tolist() == (places % 7 + 40 * (places // 7)).tolist()


def test_losses_come_back_for_samples_and_not_for_numbers():
    chosen = BatchSampler(SelectiveBackprop(lag=1), images(20, Augmentation()), 0, 20)
    told = []
    chosen.choice.learn = lambda ids, losses: told.extend(ids.tolist())
    chosen.choice._chosen = torch.zeros(20, dtype=torch.int64)
    chosen.choice._epoch = 0
    for epoch in range(2):
        chosen.ids(epoch, [0])
        chosen.take_losses([[torch.rand(20)]])
    assert told == [0] * 20


def test_a_sampler_that_chooses_no_sample_there_is_is_refused():
    chosen = BatchSampler(Favorites(few=9), images(4, Augmentation()), 0, 2)
    with pytest.raises(ValueError, match="the sampler chose sample 4 of a data set of 4: let it"):
        chosen.ids(0, [2])
    chosen.choice.choose = lambda epoch, first, count: torch.zeros(count, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"choice is \(2,\) of torch\.uint8; it must be"):
        chosen.ids(1, [0])


def test_a_sampler_that_fails_on_one_rank_ends_the_run(monkeypatch):
    calls = []

    def choose(sampler, epoch, first, count):
        calls.append(first)
        if len(calls) == 5:
            raise OSError("one rank's file cannot be read")
        return torch.arange(first, first + count)

    monkeypatch.setattr(Favorites, "choose", choose)
    made = trainer(Backprop(), sampler=Favorites(), model="plain", blocks=1, replicas=2)
    with pytest.raises((ValueError, OSError), match="one rank's file cannot be read"):
        made.fit(*digits(4))


def test_a_sampler_of_ones_own_trains_alike_on_any_grid():
    few = digits(4)
    made = [
        trainer(solver, sampler=Favorites(few=50), model="plain", blocks=1, replicas=replicas)
        for solver, replicas in ((Backprop(micro_batches=2), 1), (Backprop(), 2))
    ]
    assert_same(*(trained_weights(one, few) for one in made))
