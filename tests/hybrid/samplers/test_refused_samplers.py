"""Samplers that learn are refused where no losses reach them, and outside their limits."""

import pytest
from torch import nn
from trainings import digits, refused, trainer

from hybrid.samplers import AutoAssist, SelectiveBackprop
from solvers import PDASGD, AMPNet, AugmentedLagrangian, AuxNet, Backprop, BlockADMM


@pytest.fixture(scope="module")
def few():
    return digits(6)


REFUSED = [
    (
        AugmentedLagrangian(),
        {"sampler": AutoAssist(lag=2), "window": 3},
        "(--window), which are chosen together, and here it is 2 of 3: set a larger sampler.lag",
    ),
    (
        BlockADMM(),
        {"sampler": AutoAssist(), "window": "all"},
        "sampler.name is 'auto-assist', which works only where a window is a number",
    ),
    (
        PDASGD(any_order=True),
        {"sampler": SelectiveBackprop(), "blocks": 1},
        "as none does with solver.any_order: take another solver",
    ),
    (
        AMPNet(),
        {"sampler": SelectiveBackprop()},
        "only where the solver reports the losses of all samples",
    ),
    (
        AuxNet(),
        {"sampler": SelectiveBackprop(), "window": 2, "correct_every": 2},
        "take another solver, rounds.correct_every=1",
    ),
    (
        Backprop(),
        {"sampler": SelectiveBackprop(), "loss": nn.CrossEntropyLoss()},
        "the sampler learns from a loss of each: give one that takes reduction='none'",
    ),
]


@pytest.mark.parametrize(("solver", "some", "reason"), REFUSED)
def test_what_cannot_learn_is_refused(solver, some, reason, few):
    assert reason in refused(trainer(solver, **some), few)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: AutoAssist(gamma=0), "gamma is 0; it must lie in (0, 1]"),
        (lambda: AutoAssist(gamma=1.5), "gamma is 1.5; it must lie in (0, 1]"),
        (lambda: AutoAssist(lr=4.0, decay=1.0), "decay is 1; it must be under 2 / lr = 0.5"),
        (lambda: AutoAssist(lag=0), "lag is 0; it must be at least 1"),
        (lambda: SelectiveBackprop(beta=-1.0), "beta is -1.0; it must lie in [0, 10]"),
        (lambda: SelectiveBackprop(beta=11.0), "beta is 11.0; it must lie in [0, 10]"),
        (lambda: SelectiveBackprop(history=0), "history is 0; it must be at least 1"),
    ],
)
def test_settings_have_limits(make, reason):
    with pytest.raises(ValueError, match="it must") as caught:
        make()
    assert reason in str(caught.value)
