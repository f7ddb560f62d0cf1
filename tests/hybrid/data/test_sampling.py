"""Orders and random numbers are pure functions of their counters."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.sampling import epoch_order, uniform

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 1000)


@given(seeds, epochs, st.integers(1, 300))
def test_an_epoch_order_is_a_permutation_that_repeats_without_the_global_generator(seed, epoch, n):
    before = torch.get_rng_state()
    order = epoch_order(seed, epoch, n)
    assert torch.equal(before, torch.get_rng_state())
    assert order.dtype == torch.int64
    assert order.sort().values.tolist() == list(range(n))
    assert torch.equal(order, epoch_order(seed, epoch, n))


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
