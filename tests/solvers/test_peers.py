"""Work that replicas divide: everyone has all of it, and each tensor was computed once."""

import pytest
import torch

from hybrid.links import run_threads
from hybrid.solvers.peers import Sharing

SHAPES = (4, 3), (7,), (2, 2, 2), (1,)
COSTS = [1.0, 6.0, 2.0, 5.0]


@pytest.mark.parametrize("replicas", [1, 2, 3, 6])
def test_each_tensor_is_computed_once_and_everyone_gets_its_bits(replicas):
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]

    def program(links):
        computed = []

        def compute(i):
            computed.append(i)
            return values[i].clone()

        return computed, Sharing(links.peers)(COSTS, compute, values)

    found = run_threads(1, program, replicas=replicas)
    assert sorted(i for computed, _ in found for i in computed) == [0, 1, 2, 3]
    assert all(torch.equal(a, b) for _, all_ in found for a, b in zip(all_, values, strict=True))
