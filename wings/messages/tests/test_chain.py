"""A chain of blocks: who works when, how many are under way, and paths as their counters say."""

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hybrid.solvers.layers.branches import Skippable
from hybrid_messages.chain import Chain, draw_path, limit
from hybrid_messages.units import node_slices

SURVIVALS = st.lists(
    st.lists(st.sampled_from([1.0, 0.5, 0.1]), min_size=0, max_size=4), min_size=1, max_size=5
)
FLAT = [1.0, 0.9, 0.6, 1.0, 0.3]


def drawn(survivals, seed, items):
    paths = [draw_path(seed, i // 8, 7 * i, survivals) for i in range(items)]
    return [[len(units) for units in path] for path in paths]


def passes(count, most, lengths, pieces=()):
    """Every rank's passes (forward?, instance), the instances made known in pieces."""
    done, start = [[] for _ in range(count)], 0
    chain = Chain(count, most, lambda k, forward, item: done[k].append((forward, item)))
    for end in [*sorted(pieces), len(lengths)]:
        chain.extend(lengths[start:end])
        start = end
    chain.drain()
    assert chain.most_active <= most
    return done


@settings(max_examples=60, deadline=None)
@given(SURVIVALS, st.integers(1, 9), st.integers(0, 99), st.lists(st.integers(0, 30), max_size=6))
def test_all_go_up_and_down_once_never_too_many_whatever_the_pieces(survivals, most, seed, pieces):
    count, items = len(survivals), 30
    lengths = drawn(survivals, seed, items)
    done = passes(count, most, lengths)
    assert passes(count, most, lengths, pieces) == done
    assert_nobody_waits_for_ever(done)
    for rank, own in enumerate(done):
        assert [i for forward, i in own if forward] == [*range(items)], "in the order they came in"
        assert sorted(i for forward, i in own if not forward) == [*range(items)]
        above = 0
        for forward, _ in own:
            above += 1 if forward else -1
            assert above <= limit(rank, count, most)


def assert_nobody_waits_for_ever(queues):
    """Ranks that make their passes in order, each waiting for its message, come to their end."""
    queues, sent, moved = [passes[::-1] for passes in queues], set(), True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue:
                forward, item = queue[-1]
                needs = (item, rank - 1, True) if forward else (item, rank + 1, False)
                if needs not in sent and rank != (0 if forward else len(queues) - 1):
                    break
                queue.pop()
                sent.add((item, rank, forward))
                moved = True
    assert not any(queues)


def test_the_picture_of_the_docstring():
    done = passes(3, 3, [[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]])
    names = [" ".join(f"{'BF'[forward]}{item}" for forward, item in own) for own in done]
    assert names == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_a_path_depends_on_seed_step_and_sample_alone_and_not_on_the_cuts():
    for step, first in ((0, 0), (1, 0), (0, 1), (7, 41)):
        (whole,) = draw_path(5, step, first, [FLAT])
        cut = draw_path(5, step, first, [FLAT[:2], FLAT[2:4], FLAT[4:]])
        assert [2 * k + u for k, units in enumerate(cut) for u in units] == whole
    numbers = [(seed, step, i) for seed in (0, 1) for step in range(9) for i in range(9)]
    assert len({tuple(draw_path(*each, [FLAT])[0]) for each in numbers}) > 4


class Unit(Skippable):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_what_may_be_left_out_is_a_unit_by_itself():
    linear = nn.Linear(2, 2)
    parts = [nn.ReLU(), Unit(), nn.ReLU(), Unit(), Unit(), linear, nn.ReLU(), nn.Linear(2, 2)]
    found = [(some.start, some.stop) for some in node_slices(nn.Sequential(*parts))]
    assert found == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 7), (7, 8)]
