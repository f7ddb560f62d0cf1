"""The order of instances: who follows whom, how many are under way, and that pieces do not show."""

from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.solvers.instances.paths import Paths
from hybrid.solvers.instances.schedule import InstancePass, Schedule, limit

SURVIVALS = st.lists(
    st.lists(st.sampled_from([1.0, 0.5, 0.1]), min_size=0, max_size=4), min_size=1, max_size=5
)


def drawn(survivals, exits, seed, items):
    paths = Paths(seed, survivals, exits)
    return [paths.of(i // 8, 7 * i).lengths for i in range(items)]


def whole(count, most, lengths, pieces=()):
    """Every rank's ops, the instances made known in pieces."""
    schedule, done, start = Schedule(count, most), [[] for _ in range(count)], 0
    for end in [*sorted(pieces), len(lengths)]:
        for rank, ops in enumerate(schedule.extend(lengths[start:end], start)):
            done[rank] += ops
        start = end
    for rank, ops in enumerate(schedule.drain()):
        done[rank] += ops
    return done


@settings(max_examples=60, deadline=None)
@given(SURVIVALS, st.sampled_from([0.0, 0.3, 1.0]), st.integers(1, 9), st.integers(0, 99))
def test_all_go_up_and_down_once_where_they_pass_and_never_too_many(survivals, exits, most, seed):
    count, items = len(survivals), 30
    lengths = drawn(survivals, exits, seed, items)
    done = whole(count, most, lengths)
    for rank, ops in enumerate(done):
        passing = [i for i in range(items) if len(lengths[i]) > rank]
        assert [op.item for op in ops if op.forward] == passing, "in the order they came in"
        assert sorted(op.item for op in ops if not op.forward) == passing
        flying = set()
        for forward, item in ops:
            if forward:
                flying.add(item)
                assert len(flying) <= limit(rank, count, most)
            else:
                flying.remove(item)


@settings(max_examples=60, deadline=None)
@given(SURVIVALS, st.integers(1, 9), st.integers(0, 99))
def test_nobody_waits_for_a_message_that_waits_for_him(survivals, most, seed):
    """Ranks that take their ops in order, each waiting for its message, all come to their end."""
    lengths, count = drawn(survivals, 0.3, seed, 30), len(survivals)
    queues = [list(reversed(ops)) for ops in whole(count, most, lengths)]
    sent, moved = set(), True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue:
                forward, item = queue[-1]
                turns = rank == len(lengths[item]) - 1
                needs = (item, rank - 1, True) if forward else (item, rank + 1, False)
                if not ((rank == 0 and forward) or (turns and not forward) or needs in sent):
                    break
                queue.pop()
                sent.add((item, rank, forward))
                moved = True
    assert not any(queues)


@settings(max_examples=60, deadline=None)
@given(
    SURVIVALS,
    st.integers(1, 9),
    st.integers(0, 99),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_the_pieces_in_which_instances_become_known_do_not_matter(survivals, most, seed, pieces):
    lengths = drawn(survivals, 0.3, seed, 30)
    count = len(survivals)
    assert whole(count, most, lengths, pieces) == whole(count, most, lengths)


def test_the_picture_of_the_docstring():
    done = whole(3, 3, [(1, 1, 1), (1, 1), (1, 0, 1), (1, 1, 1), (1, 1, 1)])
    names = [" ".join(f"{'BF'[op.forward]}{op.item}" for op in ops) for ops in done]
    assert names == [
        "F0 F1 F2 B1 B0 F3 F4 B2 B3 B4",
        "F0 F1 B1 B0 F2 B2 F3 F4 B3 B4",
        "F0 B0 F2 B2 F3 B3 F4 B4",
    ]


@pytest.mark.parametrize("K", [2, 4, 7])
def test_equal_paths_and_a_key_a_block_give_one_forward_one_backward(K):
    """As a flushed pipeline has it, but for the flush."""
    done = whole(K, K, [(1,) * K] * 20)
    for rank, ops in enumerate(done):
        warm = K - 1 - rank
        steady = ops[warm : 40 - warm]
        assert ops[:warm] == [InstancePass(True, i) for i in range(warm)]
        assert [op.forward for op in steady] == [True, False] * (20 - warm)


def test_an_epoch_of_instances_takes_a_second_at_most():
    lengths = drawn([[0.7] * 7] * 4, 0.2, 0, 1250)
    start = thread_time()
    whole(4, 8, lengths)
    assert thread_time() - start < 1
