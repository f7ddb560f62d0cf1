"""HPSGD against its recurrence, in float64, over threads."""

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as some
from torch import nn

from hybrid.links import run_threads
from hybrid.solvers.block import Block
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid_hpsgd import HPSGD
from tests.solvers.sync.least_squares import (
    DECAY,
    DECAYING,
    HEAVY,
    LR,
    SGD,
    close,
    gradient,
    mean,
    problem,
    shares,
    trained,
)


def hpsgd(batches, w, replicas, h, lag, drift, decay=0.0):
    """The recurrence: weights of every replica after every step, and their mean at the end."""
    b, sums, flying, landing = w, None, None, -1
    w, seen = [w] * replicas, []
    for step, (x, y) in enumerate(batches):
        parts = shares(x, y, replicas)
        own = [gradient(v, *part) + decay * v for v, part in zip(w, parts, strict=True)]
        sums = own if sums is None else [s + g for s, g in zip(sums, own, strict=True)]
        if lag == 0 and (step + 1) % h == 0:
            flying, sums, landing = sums, None, step
        if flying is not None and landing == step:
            b = b - LR * mean(flying, replicas)
            flying = None
            kept = [torch.zeros(3)] * replicas if sums is None or drift == "discard" else sums
            w = [b - LR * s for s in kept]
        else:
            w = [v - LR * g for v, g in zip(w, own, strict=True)]
        if lag and (step + 1) % h == 0:
            flying, sums, landing = sums, None, step + lag
        seen.append(w)
    return [*seen, [mean(w, replicas)] * replicas]


@given(
    h=some.integers(1, 5),
    lag=some.integers(0, 5),
    steps=some.integers(6, 12),
    replicas=some.integers(1, 4),
    drift=some.sampled_from(["discard", "keep"]),
)
@example(h=20, lag=3, steps=10, replicas=2, drift="keep")
@settings(max_examples=25, deadline=None)
def test_hpsgd_is_its_recurrence_and_replicas_end_equal(h, lag, steps, replicas, drift):
    """The evaluations between rounds leave no trace."""
    assume(lag <= h)
    strategy = HPSGD(steps=h, lag=lag, drift=drift)
    found = trained(strategy, replicas, steps, DECAYING, seen_at=(4, 5))
    batches, first = problem(steps)
    for step, weights in enumerate(hpsgd(batches, first, replicas, h, lag, drift, DECAY)):
        for r in range(replicas):
            close(found[r][step], weights[r])
    for weights in found:
        assert torch.equal(weights[steps], found[0][steps])


@pytest.mark.parametrize("optimizer", [SGD, HEAVY, DECAYING, torch.optim.AdamW])
def test_hpsgd_without_rounds_is_all_reduce_bit_for_bit(optimizer):
    found = trained(HPSGD(steps=1, lag=0), 2, 6, optimizer)
    expected = trained(AllReduce(), 2, 6, optimizer)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(("h", "lag"), [(2, 0), (1, 1)])
def test_hpsgd_refuses_an_optimizer_of_which_one_step_is_not_worth_several(h, lag):
    reason = "the optimizer is AdamW, and sync.name 'hpsgd' .* choose optimizer.name=sgd"
    with pytest.raises(ValueError, match=reason):
        trained(HPSGD(steps=h, lag=lag), 2, 1, torch.optim.AdamW)


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_every_gradient_counts_once_also_after_a_change_of_lag(lag):
    """One replica, gradients of 1, plain SGD with rate 1: the weight counts the gradients."""

    def made(links, lag):
        module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), 1.0)
        block = Block(module, 0, 1, {"exact": optimizer, "local": optimizer})
        block.sync = HPSGD(steps=4, lag=lag).start(block, links.peers, 1.0)
        return block

    def stepped(block, number):
        for _ in range(number):
            block.module.weight.grad = torch.ones(1, 1, dtype=torch.float64)
            block.step("exact", 1.0)

    def program(links):
        before = made(links, 4)
        stepped(before, 6)
        after = made(links, lag)
        after.module.load_state_dict(before.module.state_dict())
        after.optimizers["outer"].load_state_dict(before.optimizers["outer"].state_dict())
        assert before.sync is not None
        assert after.sync is not None
        after.sync.load_state(before.sync.state())
        stepped(after, 6)
        after.keep_tested_weights()
        return after.module.weight.item()

    assert run_threads(1, program) == [-12.0]


@pytest.mark.parametrize(("h", "lag"), [(1, 0), (2, 0), (2, 2)])
def test_a_weight_without_a_gradient_stays_as_it_is(h, lag):
    def program(links):
        module = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "ab"})
        optimizer = torch.optim.SGD(module.parameters(), LR, weight_decay=0.5, momentum=0.9)
        block = Block(module, 0, 1, {"exact": optimizer, "local": optimizer})
        block.sync = HPSGD(steps=h, lag=lag).start(block, links.peers, 0.5)
        for _ in range(5):
            module["a"].grad = torch.ones(2)
            block.step("exact", LR)
        block.keep_tested_weights()
        return module["b"].tolist()

    assert run_threads(1, program, replicas=2) == [[1.0, 1.0]] * 2
