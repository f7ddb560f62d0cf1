"""Paths: pure functions of their counters, probabilities as asked for, the same for any cuts."""

from collections import Counter

import pytest
from torch import nn

from hybrid.solvers.instances.nodes import node_slices
from hybrid.solvers.instances.paths import Paths
from hybrid.solvers.layers.residual import Skippable

FLAT = [1.0, 0.9, 0.6, 1.0, 0.3]


def active(path, survivals):
    """The units by their numbers in the network."""
    starts = [sum(map(len, survivals[:k])) for k in range(len(survivals))]
    pairs = zip(starts, path.units, strict=False)
    return sorted(start + u for start, units in pairs for u in units)


def test_units_are_taken_as_often_as_their_probability_says():
    paths, n = Paths(0, [FLAT]), 4000
    counts = Counter(u for i in range(n) for u in paths.of(3, i).units[0])
    for u, p in enumerate(FLAT):
        assert counts[u] / n == pytest.approx(p, abs=4 * (p * (1 - p) / n) ** 0.5)


def test_a_path_depends_on_seed_step_and_sample_alone_and_not_on_the_cuts():
    cut = [FLAT[:2], FLAT[2:4], FLAT[4:]]
    for step, first in ((0, 0), (1, 0), (0, 1), (7, 41)):
        whole = Paths(5, [FLAT]).of(step, first)
        assert Paths(5, [FLAT]).of(step, first) == whole
        assert active(Paths(5, cut).of(step, first), cut) == active(whole, [FLAT])
    some = {Paths(seed, [FLAT]).of(s, i) for seed in (0, 1) for s in range(9) for i in range(9)}
    assert len(some) > 4


def test_who_leaves_early_does_so_as_often_as_asked_at_any_cut():
    paths, n = Paths(0, [FLAT] * 4, exits=0.6), 4000
    counts = Counter(paths.of(0, i).last for i in range(n))
    for k, p in enumerate([0.2, 0.2, 0.2, 0.4]):
        assert counts[k] / n == pytest.approx(p, abs=4 * (p * (1 - p) / n) ** 0.5)


class Unit(Skippable):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_what_may_be_left_out_is_a_unit_by_itself():
    linear = nn.Linear(2, 2)
    parts = [nn.ReLU(), Unit(), nn.ReLU(), Unit(), Unit(), linear, nn.ReLU(), nn.Linear(2, 2)]
    found = [(some.start, some.stop) for some in node_slices(nn.Sequential(*parts))]
    assert found == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 7), (7, 8)]
