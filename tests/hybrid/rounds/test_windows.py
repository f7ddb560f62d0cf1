"""The windows of an epoch, a pure function of seed and epoch; and rounds over them that rest."""

from unittest.mock import Mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid import data
from hybrid.data.samplers.uniform import Uniform
from hybrid.method.schedule import Schedule
from hybrid.rounds.base import Phases
from hybrid.rounds.batch_sampler import BatchSampler
from hybrid.rounds.epoch_windows import BN_BATCHES, Windows
from hybrid.rounds.kinds import AlternatingRounds
from hybrid.settings.config import ScheduleSettings
from hybrid.solvers.windows import PhaseStats, Window


def windows(n, batch, length, whole=False, pad=0):
    images = torch.zeros(n, 1, 4, 4, dtype=torch.uint8)
    labels = torch.zeros(n, dtype=torch.int64)
    augmentation = data.Augmentation(pad=pad)
    train = data.Dataset(images, labels, 2, (0.5,), (0.5,), augmentation)
    schedule = Schedule(ScheduleSettings(), 0.1, max(1, n // batch), 3)
    length = n // batch if whole else length
    chosen, cpu = BatchSampler(Uniform(), train, 0, batch), torch.device("cpu")
    return Windows(train, chosen, length, whole, 2, 0, schedule, cpu)


def ids(made, epoch):
    return [b.ids.tolist() for trained, _ in made.of_epoch(epoch) for b in trained.batches]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_meets_each_sample_once_but_for_an_incomplete_batch(n, batch, length, epoch):
    batch = min(batch, n)
    found = ids(windows(n, batch, length), epoch)
    flat = [i for part in found for i in part]
    assert [len(part) for part in found] == [batch] * (n // batch)
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(range(n))


@given(st.integers(1, 9), st.integers(1, 9))
def test_the_length_of_a_window_changes_neither_order_nor_learning_rate(first, second):
    one, other = windows(50, 5, first), windows(50, 5, second)
    assert ids(one, 2) == ids(other, 2)
    rates = [
        [b.learning_rate for trained, _ in made.of_epoch(1) for b in trained.batches]
        for made in (one, other)
    ]
    assert rates[0] == rates[1]


@given(st.integers(1, 60), st.integers(1, 9))
def test_an_epoch_closes_with_its_last_mini_batches(batches, length):
    made = windows(5 * batches, 5, length)
    whole = [batch for trained, _ in made.of_epoch(2) for batch in trained.batches]
    recalibration = made.bn_recalibration(2).batches
    assert len(recalibration) == min(batches, BN_BATCHES)
    for batch, expected in zip(recalibration, whole[-len(recalibration) :], strict=True):
        assert torch.equal(batch.ids, expected.ids)
        assert (batch.step, batch.source) == (expected.step, expected.source)
        assert batch.learning_rate == expected.learning_rate


def test_windows_of_a_few_batches_are_trained_and_swept_alike():
    for trained, swept in windows(50, 5, 4, pad=1).of_epoch(0):
        assert trained is swept
        assert swept.shuffle is None


def test_the_whole_augmented_set_is_recorded_apart_and_plain():
    made = windows(50, 5, 0, whole=True, pad=1)
    ((trained, swept),) = made.of_epoch(0)
    assert trained.batches[0].source.augment
    assert not swept.batches[0].source.augment
    assert torch.equal(trained.batches[3].ids, swept.batches[3].ids)


def test_every_sweep_of_the_whole_set_draws_new_mini_batches_of_all_samples():
    ((_, swept),) = windows(50, 5, 0, whole=True).of_epoch(0)
    draws = [torch.cat([rows for rows, _ in swept.sweep(number)]) for number in (0, 1)]
    assert all(sorted(draw.tolist()) == list(range(50)) for draw in draws)
    assert not torch.equal(*draws)


def test_a_rest_corrects_every_round_whatever_the_rounds_between_corrections():
    exact = Mock()
    exact.train.side_effect = lambda *_: PhaseStats(samples=1)
    rounds = AlternatingRounds(Mock(rank=0, now=float), exact, Mock(), correct_every=3)
    rounds.resting = True
    phases = Phases(PhaseStats(), PhaseStats())
    window = Window([Mock(step=0)])
    rounds.train([(window, window)] * 4, phases, None)
    assert (phases.serial.samples, phases.parallel.samples, rounds.count) == (4, 0, 4)
