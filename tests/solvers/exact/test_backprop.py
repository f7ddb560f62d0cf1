"""Back-propagation as a method: its settings are those of the pass, and its steps are exact."""

import pytest

from hybrid.solvers import Backprop


@pytest.mark.parametrize(("asked", "samples", "parts"), [(1, 8, 1), (4, 8, 4), (4, 3, 3)])
def test_a_mini_batch_has_no_more_parts_than_samples(asked, samples, parts):
    assert Backprop(micro_batches=asked).num_micro_batches(samples, 2) == parts
