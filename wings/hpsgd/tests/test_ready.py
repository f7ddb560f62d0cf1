"""Sums that each replica takes when they are there: the recurrence, and what all agree on."""

from copy import deepcopy

import pytest
import torch
from hpsgd_program import fast_link
from hypothesis import example, given, settings
from hypothesis import strategies as some
from torch import nn

from hybrid.links import run_threads
from hybrid.solvers.block import Block
from hybrid.solvers.peers import Sum
from hybrid_hpsgd import HPSGD
from tests.solvers.sync.least_squares import (
    DECAY,
    DECAYING,
    HEAVY,
    LR,
    close,
    gradient,
    mean,
    problem,
    shares,
    trained,
)


class LatePeers:
    """Peers whose i-th sum after a trial is there when replica r has asked `late[r][i]` times."""

    def __init__(self, links, late):
        self.peers, self.late = links.peers, iter([0, *late[links.place.replica]])
        self.replica, self.replicas = self.peers.replica, self.peers.replicas
        self.exchange = self.peers.exchange

    def sum(self, vector):
        begun, left = self.peers.sum(vector), [next(self.late)]

        def ready():
            left[0] -= 1
            return left[0] < 0

        return Sum(begun.finish, ready)


def recurrence(batches, first, replicas, h, late, drift, decay):
    """Weights of every replica after every step; P_j is taken `late[r][j]` steps late."""
    grids = [shares(x, y, replicas) for x, y in batches]
    anchors = [first] * replicas
    w, sums, under_way = [first] * replicas, [None] * replicas, [None] * replicas
    sent = []  # by round, S_r of every replica
    seen = []
    for step in range(len(batches)):
        number = step // h
        if step % h == 0:
            sent.append([None] * replicas)
        for r in range(replicas):
            x, y = grids[step][r]
            own = gradient(w[r], x, y) + decay * w[r]
            sums[r] = own if sums[r] is None else sums[r] + own
            w[r] = w[r] - LR * own
        for r in range(replicas):
            due = under_way[r] is not None and (
                step == under_way[r] * h + h + late[r][under_way[r]] or (step + 1) % h == 0
            )
            if due:
                anchors[r] = anchors[r] - LR * mean(sent[under_way[r]], replicas)
                kept = LR * sums[r] if drift == "keep" else 0.0
                w[r] = anchors[r] - kept if drift == "keep" else anchors[r]
                under_way[r] = None
        if (step + 1) % h == 0:
            sent[number] = sums
            sums, under_way = [None] * replicas, [number] * replicas
        seen.append([*w])
    return [*seen, [mean(w, replicas)] * replicas]


@given(
    h=some.integers(1, 5),
    steps=some.integers(6, 12),
    replicas=some.integers(1, 3),
    drift=some.sampled_from(["discard", "keep"]),
    late=some.lists(
        some.lists(some.integers(0, 6), min_size=13, max_size=13), min_size=3, max_size=3
    ),
)
@example(h=4, steps=10, replicas=2, drift="keep", late=[[0] * 13, [2] * 13, [0] * 13])
@settings(max_examples=20, deadline=None)
def test_each_replica_takes_a_sum_when_it_is_there_and_all_end_equal(
    h, steps, replicas, drift, late
):
    strategy = HPSGD(steps=h, commit="ready", drift=drift)
    found = trained(strategy, replicas, steps, DECAYING, peers=lambda links: LatePeers(links, late))
    batches, first = problem(steps)
    expected = recurrence(batches, first, replicas, h, late, drift, DECAY)
    for step, weights in enumerate(expected):
        for r in range(replicas):
            close(found[r][step], weights[r])
    for weights in found:
        assert torch.equal(weights[steps], found[0][steps])


def test_a_step_on_a_sum_has_the_same_bits_at_whichever_step_it_is_taken():
    """With momentum and a learning rate that changes: the drift after it is thrown away."""
    rates = [0.05 / (1 + step) for step in range(12)]
    late = [[0] * 4, [2] * 4]
    found = trained(
        HPSGD(steps=4, commit="ready", drift="discard"),
        *(2, 12, HEAVY),
        peers=lambda links: LatePeers(links, late),
        rates=rates,
    )
    for taken in (4, 8):
        assert torch.equal(found[0][taken], found[1][taken + 2])
        assert not torch.equal(found[0][taken], found[1][taken])


def test_every_gradient_counts_once_also_in_a_resumed_run_where_some_have_taken_the_sum():
    """Gradients of 1, plain SGD with rate 1: the weight counts the gradients of all steps."""
    late = [[1, 9, 9], [9, 9, 9]]

    def made(links, late):
        module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), 1.0)
        block = Block(module, 0, 1, {"exact": optimizer, "local": optimizer})
        peers = LatePeers(links, late)
        block.sync = HPSGD(steps=4, commit="ready").start(block, peers, 0.5)
        return block

    def stepped(block, number):
        for _ in range(number):
            block.module.weight.grad = torch.full((1, 1), 0.5, dtype=torch.float64)
            block.step("exact", 1.0)

    def program(links):
        before = made(links, late)
        stepped(before, 6)
        taken = before.sync._sum is None
        after = made(links, late)
        after.module.load_state_dict(before.module.state_dict())
        # as in a checkpoint, which has what is not under way from the first replica alone
        first = deepcopy(links.all_gather_grid(before.optimizers["outer"].state_dict())[0])
        after.optimizers["outer"].load_state_dict(first)
        after.sync.load_state(before.sync.state())
        stepped(after, 6)
        after.keep_tested_weights()
        return taken, after.module.weight.item()

    assert run_threads(1, program, replicas=2) == [(True, -12.0), (False, -12.0)]


@pytest.mark.slow
def test_over_a_fast_link_a_sum_is_taken_sooner_than_after_the_lag(world):
    """Steps from sending a sum to taking it, of rounds of 8; MPI may need to be asked again."""
    assert run_threads(1, fast_link, replicas=2) == [[1] * 5] * 2
    for each in world.run(2, "hpsgd_program:on_ranks"):
        assert len(each) == 5
        assert max(each) < 8
