"""Every strategy against its formulas, in float64, over threads."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

from hybrid.links import run_threads
from solvers.blocks.block import Block
from solvers.sync.all_reduce import AllReduce
from solvers.sync.diloco import DiLoCo
from solvers.sync.hpsgd import HPSGD
from solvers.sync.local_sgd import LocalSGD

LR, SAMPLES = 0.05, 6


def problem(steps, seed=0):
    """(x, y) of every step, and the first weights, float64."""
    random = torch.Generator().manual_seed(seed)
    made = partial(torch.randn, generator=random, dtype=torch.float64)
    return [(made(SAMPLES, 3), made(SAMPLES)) for _ in range(steps)], made(3)


def gradient(w, x, y):
    """Of half the mean square of x w - y."""
    return x.T @ (x @ w - y) / len(y)


def shares(x, y, replicas):
    return list(zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True))


def trained(strategy, replicas, steps, momentum=0.0, join=True, seed=0):
    """Weights of every replica after every step, and after the end of the epoch."""
    batches, first = problem(steps, seed)

    def program(links):
        module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(first)
        optimiser = torch.optim.SGD(module.parameters(), LR, momentum)
        block = Block(module, 0, 1, {"exact": optimiser, "local": optimiser})
        mine = [shares(x, y, replicas)[links.place.replica] for x, y in batches]
        share = len(mine[0][1]) / SAMPLES
        if strategy is not None:
            block.sync = strategy.start(block, links.peers, share)
        seen = []
        for x, y in mine:
            loss = (module(x)[:, 0] - y).square().mean() / 2 * share
            loss.backward()
            block.step("exact", LR)
            seen.append(module.weight.detach()[0].clone())
        if join and block.sync is not None:
            block.sync.join()
            seen.append(module.weight.detach()[0].clone())
        return seen

    return run_threads(1, program, replicas=replicas)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_all_reduce_is_sgd_on_the_whole_mini_batch(replicas):
    batches, w = problem(5)
    found = trained(AllReduce(), replicas, 5, join=False)
    for step, (x, y) in enumerate(batches):
        w = w - LR * gradient(w, x, y)
        for weights in found:
            close(weights[step], w)
            assert torch.equal(weights[step], found[0][step])


@pytest.mark.parametrize("messages", ["bfloat16", "int8"])
def test_messages_of_fewer_bits_leave_all_replicas_equal_and_their_errors_for_later(messages):
    narrow, whole = (trained(AllReduce(messages=kind), 2, 60) for kind in (messages, "float32"))
    for step in range(60):
        assert torch.equal(narrow[0][step], narrow[1][step])
    apart = [(a - b).norm() / b.norm() for a, b in zip(narrow[0], whole[0], strict=True)]
    assert 0 < max(apart) < 0.01


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("h", [1, 3, 4])
def test_local_sgd_averages_every_h_steps_and_at_the_end(replicas, h):
    batches, first = problem(7)
    w = [first] * replicas
    found = trained(LocalSGD(steps=h), replicas, 7)
    for step, (x, y) in enumerate(batches):
        parts = shares(x, y, replicas)
        w = [v - LR * gradient(v, *part) for v, part in zip(w, parts, strict=True)]
        if (step + 1) % h == 0:
            w = [sum(w) / replicas] * replicas
        for r in range(replicas):
            close(found[r][step], w[r])
    for r in range(replicas):
        close(found[r][-1], sum(w) / replicas)
        assert torch.equal(found[r][-1], found[0][-1])


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("replicas", [2, 3])
def test_diloco_takes_outer_steps(replicas, lag):
    batches, first = problem(11)
    strategy = DiLoCo(steps=3, outer_lr=0.6, outer_momentum=0.8, lag=lag)
    found = trained(strategy, replicas, 11)
    w, b, v, sent = [first] * replicas, first, torch.zeros(3, dtype=torch.float64), None

    def land(w, b, v, sent):
        change = sum(b - s for s in sent) / replicas
        v = 0.8 * v + change
        b = b - 0.6 * (change + 0.8 * v)
        return [b + (now - s) for now, s in zip(w, sent, strict=True)], b, v, None

    for step, (x, y) in enumerate(batches):
        parts = shares(x, y, replicas)
        w = [u - LR * gradient(u, *part) for u, part in zip(w, parts, strict=True)]
        if (step + 1) % 3 == 0:
            sent, landing = w, step + lag
        if sent is not None and step == landing:
            w, b, v, sent = land(w, b, v, sent)
        for r in range(replicas):
            close(found[r][step], w[r])
    if sent is not None:
        w, b, v, sent = land(w, b, v, sent)
    w, b, v, _ = land(w, b, v, w)
    for r in range(replicas):
        close(found[r][-1], b)


def test_diloco_with_a_plain_outer_step_is_local_sgd():
    found = trained(DiLoCo(steps=3, outer_lr=1.0, outer_momentum=0.0), 2, 8, momentum=0.9)
    expected = trained(LocalSGD(steps=3), 2, 8, momentum=0.9)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            close(a, b)


def hpsgd(batches, w, replicas, h, lag, drift):
    """The recurrence: weights of every replica after every step, and after the end."""
    b, sums, flying, landing = w, None, None, -1
    w, seen = [w] * replicas, []
    for step, (x, y) in enumerate(batches):
        parts = shares(x, y, replicas)
        own = [gradient(v, *part) for v, part in zip(w, parts, strict=True)]
        sums = own if sums is None else [s + g for s, g in zip(sums, own, strict=True)]
        if lag == 0 and (step + 1) % h == 0:
            flying, sums, landing = sums, None, step
        if flying is not None and landing == step:
            b = b - LR * sum(g * len(p[1]) / SAMPLES for g, p in zip(flying, parts, strict=True))
            flying = None
            kept = [torch.zeros(3)] * replicas if sums is None or drift == "discard" else sums
            w = [b - LR * s for s in kept]
        else:
            w = [v - LR * g for v, g in zip(w, own, strict=True)]
        if lag and (step + 1) % h == 0:
            flying, sums, landing = sums, None, step + lag
        seen.append(w)
    for left in (flying, sums):
        if left is not None:
            b = b - LR * sum(g * len(p[1]) / SAMPLES for g, p in zip(left, parts, strict=True))
    return [*seen, [b] * replicas]


@pytest.mark.parametrize("drift", ["discard", "keep"])
@pytest.mark.parametrize(("h", "lag"), [(1, 0), (1, 1), (3, 0), (3, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_hpsgd_is_its_recurrence(replicas, h, lag, drift):
    batches, first = problem(10)
    found = trained(HPSGD(steps=h, lag=lag, drift=drift), replicas, 10)
    expected = hpsgd(batches, first, replicas, h, lag, drift)
    for step, weights in enumerate(expected):
        for r in range(replicas):
            close(found[r][step], weights[r])


@pytest.mark.parametrize(("h", "lag"), [(1, 0), (1, 1), (2, 1), (3, 3), (5, 2)])
def test_hpsgd_of_one_replica_that_keeps_its_drift_is_sgd(h, lag):
    (found,) = trained(HPSGD(steps=h, lag=lag, drift="keep"), 1, 9)
    (expected,) = trained(None, 1, 9)
    for step in range(9):
        close(found[step], expected[step])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_hpsgd_without_rounds_is_all_reduce_bit_for_bit(momentum):
    found = trained(HPSGD(steps=1, lag=0), 2, 6, momentum)
    expected = trained(AllReduce(), 2, 6, momentum)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_hpsgd_without_lag_is_local_sgd():
    found, expected = trained(HPSGD(steps=3, lag=0), 2, 9), trained(LocalSGD(steps=3), 2, 9)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            close(a, b)


@given(
    h=some.integers(1, 5),
    lag=some.integers(0, 5),
    steps=some.integers(1, 12),
    replicas=some.integers(1, 4),
    drift=some.sampled_from(["discard", "keep"]),
)
@settings(max_examples=25, deadline=None)
def test_in_hpsgd_every_gradient_counts_once_and_replicas_end_equal(h, lag, steps, replicas, drift):
    if lag > h:
        return
    found = trained(HPSGD(steps=h, lag=lag, drift=drift), replicas, steps, seed=steps)
    batches, first = problem(steps, seed=steps)
    expected = hpsgd(batches, first, replicas, h, lag, drift)[-1]
    for weights, wanted in zip(found, expected, strict=True):
        close(weights[-1], wanted)
        assert torch.equal(weights[-1], found[0][-1])


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (AllReduce, {"messages": "int4"}, "messages is 'int4'; choose one of float32"),
    (LocalSGD, {"steps": 0}, "steps is 0; it must be at least 1"),
    (DiLoCo, {"outer_momentum": 1.0}, "outer_momentum is 1.0; it must be below 1"),
    (DiLoCo, {"steps": 4, "lag": 4}, "lag is 4 of rounds of 4 steps: choose one below sync.steps"),
    (HPSGD, {"steps": 2, "lag": 3}, "lag is 3 of rounds of 2 steps: choose one of at most"),
    (HPSGD, {"drift": "lose"}, "drift is 'lose'; choose one of discard, keep"),
]


@pytest.mark.parametrize(("strategy", "given", "reason"), WRONG)
def test_settings_that_cannot_be_are_refused(strategy, given, reason):
    with pytest.raises(ValueError, match=reason):
        strategy(**given)


def test_buckets_leave_within_the_last_backward_pass_the_last_layers_first():
    """In the same order on all replicas, and the sums are those of one message at the end."""

    made = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))

    def program(links):
        module = copy.deepcopy(made)
        # as optimisers have them: weights, then biases
        groups = [[p for p in module.parameters() if (p.dim() > 1) == many] for many in (1, 0)]
        optimiser = torch.optim.SGD([{"params": group} for group in groups], LR)
        block = Block(module, 0, 1, {"exact": optimiser, "local": optimiser})
        block.sync = AllReduce().start(block, links.peers, 0.5)
        left, start, sent = [], links.peers.start, []
        links.peers.start = lambda pieces: (sent.append(sum(map(len, pieces))), start(pieces))[1]
        hooks = [m.register_full_backward_hook(lambda *_: left.append(len(sent))) for m in module]
        loss = (
            module(torch.full((2, 300), links.place.replica + 1.0, requires_grad=True))
            .square()
            .sum()
        )
        with block.last_pass("exact"):
            loss.backward()
        assert len(hooks) == 4
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        early = len(sent)
        block.step("exact", LR)
        return left, early, [p.detach().clone() for p in module.parameters()]

    found = run_threads(1, program, replicas=2)
    assert found[0][:2] == found[1][:2]
    left, early, _ = found[0]
    assert left == sorted(left)
    assert left[-1] >= 2, "most buckets leave before the pass has ended"
    assert early == 4
    assert all(map(torch.equal, found[0][2], found[1][2]))


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_every_gradient_counts_once_also_after_a_change_of_lag(lag):
    """One replica, gradients of 1, plain SGD with rate 1: the weight counts the gradients."""

    def made(links, lag):
        module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(module.weight)
        optimiser = torch.optim.SGD(module.parameters(), 1.0)
        block = Block(module, 0, 1, {"exact": optimiser, "local": optimiser})
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
        after.optimisers["outer"].load_state_dict(before.optimisers["outer"].state_dict())
        assert before.sync is not None
        assert after.sync is not None
        after.sync.load_state(before.sync.state())
        stepped(after, 6)
        after.sync.join()
        return after.module.weight.item()

    assert run_threads(1, program) == [-12.0]
