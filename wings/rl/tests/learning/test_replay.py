"""The replay buffer is a ring of the newest transitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.learning.replay import Replay, packed


def rows(first, count):
    return torch.arange(first, first + count).float().view(-1, 1).expand(-1, 8).clone()


@given(size=st.integers(2, 9), added=st.integers(1, 20))
def test_only_rows_that_are_there_are_drawn_and_all_of_them(size, added):
    replay = Replay(size, states=2, actions=2)
    replay.rows.fill_(-1)
    for n in range(added):
        replay.add(rows(n, 1))
    batch = replay.draw(500, torch.Generator().manual_seed(0))
    assert set(batch.state[:, 0].tolist()) == set(range(max(0, added - size), added))


def test_a_transition_comes_back_in_its_parts():
    replay = Replay(1, states=3, actions=1)
    state, action, next_state = torch.randn(3), torch.randn(1), torch.randn(3)
    replay.add(packed(state, action, -2.5, True, next_state))
    batch = replay.draw(1, torch.Generator())
    assert torch.equal(batch.state[0], state)
    assert torch.equal(batch.action[0], action)
    assert batch.outcome.tolist() == [[-2.5, 1.0]]
    assert torch.equal(batch.next_state[0], next_state)


@pytest.mark.parametrize("added", [3, 11])
def test_it_goes_on_from_what_it_keeps(added):
    one, other = (Replay(5, states=2, actions=2) for _ in range(2))
    for n in range(added):
        one.add(rows(n, 1))
    other.load_state(one.state())
    for replay in (one, other):
        replay.add(rows(added, 2))
    drawn = [replay.draw(50, torch.Generator().manual_seed(1)) for replay in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    with pytest.raises(ValueError, match="does not fit this run's"):
        Replay(4, states=2, actions=2).load_state(one.state())
