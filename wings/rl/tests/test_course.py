"""Actors act by weights of a fixed age, and nothing depends on who runs on which rank, or when."""

from itertools import pairwise

import pytest
import torch
from rl_runs import over

from hybrid.links import run_threads, run_virtual
from hybrid_rl.course import Course
from hybrid_rl.environment import make, sizes
from hybrid_rl.learning.networks import flat
from hybrid_rl.parts import Networks
from hybrid_rl.resolve import load


def networks(**settings):
    rl = load(None, over(settings)).rl
    return Networks(rl, *sizes(make(rl.env)))


def watched(course, acted, learnt):
    """Note what the policy is after each update, and at each step of each actor."""
    middle = course.middle
    if middle is not None:

        def learn(t, before=middle.learn):
            before(t)
            learnt[t] = flat(middle.learner.policy)

        middle.learn = learn
    for actor in course.actors:

        def act(t, actor=actor, before=actor.act):
            acted[actor.number, t] = flat(actor.policy)
            before(t)

        actor.act = act


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("lag", [1, 2, 3, 5])
def test_an_actor_is_exactly_its_lag_behind_the_learner(blocks, lag):
    R, T, A = 2, 14, 2
    made = networks(actors=A, lag=lag, steps=A * T, random_steps=A * R)
    acted, learnt = {}, {}

    def program(links):
        course = Course(links, made)
        watched(course, acted, learnt)
        for first, last in ((0, 2), (2, 9), (9, T)):
            course.run(first, last)

    run_threads(blocks, program)
    begun = flat(made.policy())
    assert len({tuple(weights.tolist()) for t, weights in learnt.items() if t >= R}) == T - R
    for t in range(T):
        for actor in range(A):
            wanted = learnt[t - lag] if t - lag >= R else begun
            assert torch.equal(acted[actor, t], wanted), (actor, t)


def outcome(course):
    """What each part has come to, by name."""
    found = {}
    if course.front is not None:
        found["replay"] = course.front.replay.rows[: len(course.front.replay)]
        if course.front.network is not None:
            found["representation"] = flat(course.front.network)
    if course.middle is not None:
        found["learner"] = flat(course.middle.learner)
    return found | {f"actor {a.number}": a.episodes.state for a in course.actors}


def after(blocks, stretches, run=run_threads, **settings):
    made = networks(**settings)

    def program(links):
        course = Course(links, made)
        for first, last in pairwise(stretches):
            course.run(first, last)
        return outcome(course)

    found = {}
    for own in run(blocks, program):
        found |= own
    return found


@pytest.mark.parametrize("representation", [True, False])
@pytest.mark.parametrize(("actors", "lag"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 3)])
def test_ranks_links_and_stretches_change_no_bit(actors, lag, representation):
    settings = {"actors": actors, "lag": lag, "representation": representation, "steps": 60}
    if not representation:
        for name in ("units", "layers", "pretrain_steps"):
            settings[name] = None
    rounds = 60 // actors
    base = after(1, [0, rounds], **settings)
    assert len(base["replay"]) == 60
    for blocks in range(2, 3 + actors):
        for run in (run_threads, run_virtual):
            found = after(blocks, [0, rounds // 3, rounds // 2, rounds], run, **settings)
            assert found.keys() == base.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, base[name]), (blocks, run, name)


def test_transitions_are_ordered_by_step_and_actor():
    """Each actor's are a chain, in which a state is the next state of the one before."""
    rows = after(4, [0, 30], actors=2, steps=60)["replay"]
    for actor in range(2):
        own = rows[actor::2]
        assert torch.equal(own[1:, :3], own[:-1, -3:])
    assert not torch.equal(rows[0, :3], rows[1, :3])
