"""An episode is its seed and its actions; what cannot be learnt is refused in one line."""

import gymnasium
import pytest
import torch

from hybrid_rl.environment import Episodes, make, sizes


def play(episodes, steps, first=0):
    """The states of so many steps, and the returns of the episodes that ended."""
    states, returns = [], []
    for n in range(first, first + steps):
        width = sizes(episodes.env)[1]
        action = torch.rand(width, generator=torch.Generator().manual_seed(n)) * 2 - 1
        _, _, state, over = episodes.step(action)
        states.append(state)
        returns += [over] if over else []
    return torch.stack(states), returns


@pytest.mark.parametrize("name", ["Pendulum-v1", "Hopper-v5", "InvertedDoublePendulum-v5"])
@pytest.mark.parametrize("before", [0, 130])
def test_it_goes_on_bit_for_bit_from_what_a_checkpoint_keeps(name, before):
    one = Episodes(name, 0, 5)
    if before:
        play(one, before)
    kept = {key: tensor.clone() for key, tensor in one.tensors().items()}
    other = Episodes(name, 0, 5)
    other.restore(kept)
    (states, returns), (again, also) = play(one, 90, before), play(other, 90, before)
    assert torch.equal(states, again)
    assert returns == also
    assert one.total == other.total


def test_an_action_of_one_is_the_upper_bound_and_a_limit_of_time_ends_nothing_by_itself():
    episodes = Episodes("Pendulum-v1", 0)
    found = [episodes.step(torch.ones(1)) for _ in range(200)]
    assert episodes.env.unwrapped.last_u is None or episodes.env.unwrapped.last_u == 2.0
    assert not any(terminated for _, terminated, _, _ in found)
    total, length = found[-1][3]
    assert length == 200
    assert total == pytest.approx(sum(reward for reward, *_ in found))


def test_an_environment_that_does_not_repeat_itself_is_told_from_one_that_does():
    episodes = Episodes("Pendulum-v1", 0)
    play(episodes, 5)
    kept = episodes.tensors()
    with pytest.raises(ValueError, match="does not come to the same state"):
        Episodes("Pendulum-v1", 0).restore(kept | {"state": kept["state"] + 1})
    with pytest.raises(ValueError, match="has other actions"):
        Episodes("Hopper-v5", 0).restore(kept)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("CartPole-v1", "whose actions are Discrete(2); they must be a vector of bounded real"),
        ("Pendulun-v1", "Did you mean: `Pendulum`?. Choose an environment that is installed"),
        ("FrozenLake-v1", "whose observations are Discrete(16); they must be a vector of numbers"),
    ],
)
def test_what_cannot_be_learnt_is_refused_in_one_line(name, says):
    with pytest.raises(ValueError, match="env is") as refused:
        make(name)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    def missing(*arguments, **options):
        raise gymnasium.error.DependencyNotInstalled('no MuJoCo: pip install "gymnasium[mujoco]"')

    monkeypatch.setattr(gymnasium, "make", missing)
    with pytest.raises(ValueError, match=r'pip install "gymnasium\[mujoco\]"'):
        make("Hopper-v5")


WRONG = {
    "reward": [float("nan"), None, [1.0, 2.0], "much", 1e300],
    "observation": [[0.0, float("inf"), 0.0], None, [0.0, 0.0]],
}


@pytest.mark.parametrize(("what", "value"), [(k, v) for k, own in WRONG.items() for v in own])
def test_what_cannot_be_learnt_from_is_refused_where_it_comes(what, value):
    episodes = Episodes("Pendulum-v1", 0)
    play(episodes, 3)
    kept = episodes.state.clone()
    given = {"observation": [0.0, 0.0, 0.0], "reward": 1.0, what: value}
    episodes.env.step = lambda action: (given["observation"], given["reward"], False, False, {})
    with pytest.raises(ValueError, match=f"the {what} at step 4 of episode 0 is") as caught:
        episodes.step(torch.zeros(1))
    assert str(caught.value).startswith("Pendulum-v1: ")
    assert repr(value) in str(caught.value)
    assert torch.equal(episodes.state, kept)
    assert torch.tensor(episodes.total).isfinite()
