"""Back-propagation as a method: its settings are those of the pass, and its steps are exact."""

from collections.abc import Iterator

import pytest
from setting_modes import EXACT, Mode, Values

from hybrid.solvers import Backprop

SAME = dict.fromkeys(EXACT, "exact gradients do not depend on the cuts")


def _modes() -> Iterator[Mode]:
    grid = {"split.replicas": 2}
    # five mini-batches an epoch, for rounds that end within it
    outer = {**grid, "data.limit": 40, "sync.steps": 2, "sync.lag": 1}
    # few losses, known soon, to an assistant that learns fast from them
    soon = {"sampler.lag": 2, "train.epochs": 3}
    by_class = {"schedule.name": "ExponentialLR", "schedule.arguments": {"gamma": 0.9}}
    ways: dict[str, Values] = {
        "m = 1": {},
        "m = 4": {"solver.micro_batches": 4},
        "steps": {"schedule.name": "step"},
        "a schedule of torch's": by_class,
        "AdamW": {"optimizer.name": "adamw", "optimizer.lr": 1e-3},
        "virtual": {"links.kind": "virtual"},
        "replicas": grid,
        "local-sgd": {**grid, "sync.name": "local-sgd", "sync.steps": 2},
        "diloco": {**outer, "sync.name": "diloco"},
        "hpsgd": {**outer, "sync.name": "hpsgd"},
        "auto-assist": {**soon, "sampler.name": "auto-assist", "sampler.lr": 5.0},
        "selective-backprop": {**soon, "sampler.name": "selective-backprop"},
    }
    for name, settings in ways.items():
        yield Mode("backprop", name, settings, SAME)


EXAMPLES = {"backprop": Backprop()}
PLAIN = (*EXAMPLES,)
IMPOSSIBLE = [
    (Backprop, {"micro_batches": -1, "clip_norm": -1.0, "filter": 0, "messages": "float64"})
]
MODES = [*_modes()]


@pytest.mark.parametrize(("asked", "samples", "parts"), [(1, 8, 1), (4, 8, 4), (4, 3, 3)])
def test_a_mini_batch_has_no_more_parts_than_samples(asked, samples, parts):
    assert Backprop(micro_batches=asked).num_micro_batches(samples, 2) == parts
