"""Orders and random numbers are pure functions of their counters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.sampling import _mix, batches, epoch_order, uniform

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 1000)


@given(seeds, epochs, st.integers(1, 300))
def test_an_epoch_order_is_a_permutation_that_repeats(seed, epoch, n):
    order = epoch_order(seed, epoch, n)
    assert order.dtype == torch.int64
    assert order.sort().values.tolist() == list(range(n))
    assert torch.equal(order, epoch_order(seed, epoch, n))


def test_orders_differ_between_epochs_and_between_seeds():
    orders = {tuple(epoch_order(s, e, 100).tolist()) for s in range(4) for e in range(4)}
    assert len(orders) == 16


def test_an_order_does_not_touch_the_global_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    epoch_order(0, 0, 10)
    assert torch.equal(before, torch.get_rng_state())


def test_an_order_of_no_samples_is_refused():
    with pytest.raises(ValueError, match="at least 1 sample, got 0"):
        epoch_order(0, 0, 0)


@given(st.integers(1, 60), st.integers(1, 60))
def test_batches_cut_the_order_and_drop_the_incomplete_rest(n, size):
    order = epoch_order(0, 0, n)
    if size > n:
        with pytest.raises(ValueError, match=f"batch size is {size} but there are {n} samples"):
            batches(order, size)
        return
    cut = batches(order, size)
    assert [len(ids) for ids in cut] == [size] * (n // size)
    assert torch.equal(torch.cat(cut), order[: n // size * size])


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_size_below_one_is_refused(size):
    with pytest.raises(ValueError, match=f"batch size is {size}"):
        batches(torch.arange(5), size)


@given(st.integers(0, 2**64 - 1))
def test_the_hash_is_the_finaliser_of_splitmix64(value):
    mask = 2**64 - 1
    x = value
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    signed = value - 2**64 if value >= 2**63 else value
    assert int(_mix(torch.tensor(signed))) % 2**64 == x


@given(seeds, epochs, st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.integers(0, 9))
def test_a_number_depends_on_its_own_id_only(seed, epoch, ids, stream):
    together = uniform(seed, epoch, torch.tensor(ids), stream)
    alone = torch.cat([uniform(seed, epoch, torch.tensor([i]), stream) for i in ids])
    assert together.dtype == torch.float64
    assert torch.equal(together, alone)
    assert bool(((together >= 0) & (together < 1)).all())


def test_numbers_are_uniform():
    sample = uniform(3, 1, torch.arange(100_000), 2)
    histogram = torch.histc(sample, bins=20, min=0, max=1)
    chi_square = float(((histogram - 5000) ** 2 / 5000).sum())
    assert chi_square < 45  # 19 degrees of freedom: exceeded by one seed in a thousand


@pytest.mark.parametrize("other", [(1, 0, 1), (0, 1, 1), (0, 0, 2)])
def test_seeds_epochs_and_streams_are_uncorrelated(other):
    ids = torch.arange(20_000)
    seed, epoch, stream = other
    pair = torch.stack([uniform(0, 0, ids, 1), uniform(seed, epoch, ids, stream)])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.03
