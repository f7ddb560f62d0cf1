"""The pieces of soft actor-critic against their formulas, in float64."""

import math

import pytest
import torch
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from hybrid_rl.learning import sac
from hybrid_rl.learning.draws import generator, initialize
from hybrid_rl.learning.networks import Head, Policy
from hybrid_rl.learning.representation import Frozen

STATES, ACTIONS, N = 3, 2, 7
PSI = Frozen(None)


@pytest.fixture
def learner():
    policy = Policy(STATES, 8, ACTIONS)
    critics = tuple(Head(STATES + ACTIONS, 8, 1) for _ in range(2))
    for seed, part in enumerate((policy, *critics)):
        initialize(part, generator(seed))
    return sac.Learner(policy, critics, 0.9, 0.1).double()


def normal(seed, *shape):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def test_heads_are_dense(learner):
    x = normal(0, N, STATES + ACTIONS)
    first, second = learner.critics[0].dense.layers
    one = torch.cat([first(x).relu(), x], 1)
    two = torch.cat([second(one).relu(), one], 1)
    assert torch.equal(learner.critics[0](x), learner.critics[0].last(two))


def test_log_pi_is_that_of_a_squashed_normal(learner):
    z, noise = normal(1, N, STATES), normal(2, N, ACTIONS)
    action, log_pi = learner.policy(z, noise)
    mean, log_std = learner.policy.head(z).chunk(2, 1)
    law = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))
    drawn = torch.tanh(mean + log_std.exp() * noise)
    assert torch.equal(action, drawn)
    assert torch.allclose(log_pi, law.log_prob(drawn).sum(1, keepdim=True), atol=1e-9)
    assert torch.equal(learner.policy.best(z), torch.tanh(mean))


def test_the_target_is_the_soft_value_of_the_next_state_unless_the_episode_ended(learner):
    z, noise = normal(1, N, STATES), normal(2, N, ACTIONS)
    reward, ended = normal(3, N, 1), torch.tensor([0.0, 1, 0, 1, 0, 0, 1]).double().view(N, 1)
    learner.log_alpha.data.fill_(math.log(0.3))
    y = learner.target(torch.cat([reward, ended], 1), z, noise, PSI)
    action, log_pi = learner.policy(z, noise)
    both = torch.cat([z, action], 1)
    lesser = torch.min(learner.targets[0](both), learner.targets[1](both))
    soft = reward + 0.9 * (lesser - 0.3 * log_pi)
    assert torch.allclose(y, torch.where(ended == 1, reward, soft), atol=1e-12)
    assert not y.requires_grad


def test_the_policy_loss_is_what_entropy_is_worth_less_the_lesser_value(learner):
    z, noise = normal(1, N, STATES), normal(2, N, ACTIONS)
    loss, log_pi = learner.policy_loss(z, noise, PSI)
    action, wanted_log_pi = learner.policy(z, noise)
    both = torch.cat([z, action], 1)
    lesser = torch.min(learner.critics[0](both), learner.critics[1](both))
    assert torch.equal(log_pi, wanted_log_pi)
    assert loss.item() == pytest.approx((wanted_log_pi - lesser).mean().item(), abs=1e-12)


@pytest.mark.parametrize(("entropy", "sign"), [(-3.0, 1), (-1.0, -1)])
def test_alpha_rises_while_the_entropy_is_below_minus_one_an_action(learner, entropy, sign):
    log_pi = torch.full((N, 1), -entropy, dtype=torch.float64)
    learner.alpha_loss(log_pi).backward()
    # a step down the gradient; its size is the distance from -2, of two actions
    assert -learner.log_alpha.grad.item() == pytest.approx(sign * abs(entropy + 2))


def test_targets_take_their_share_of_the_critics(learner):
    with torch.no_grad():
        for p in learner.critics.parameters():
            p.add_(1)
    before = [p.clone() for p in learner.targets.parameters()]
    learner.follow()
    pairs = zip(before, learner.targets.parameters(), strict=True)
    assert all(torch.allclose(new, old + 0.1, atol=1e-12) for old, new in pairs)


def test_an_update_is_these_losses_and_adam_one_after_the_other(learner):
    z, next_z, outcome = normal(1, N, STATES), normal(2, N, STATES), normal(3, N, 2)
    z_sa = torch.cat([z, normal(4, N, ACTIONS)], 1)
    other = sac.Learner(
        Policy(STATES, 8, ACTIONS), tuple(learner.critics), 0.9, 0.1
    ).double()  # a like one, whose critics are copied below
    other.critics = torch.nn.ModuleList(Head(STATES + ACTIONS, 8, 1).double() for _ in range(2))
    other.load_state_dict(learner.state_dict())
    sac.update(learner, learner.optimizers(1e-2), (z, z_sa, next_z, outcome), PSI, generator(5))
    noises = torch.randn(2, N, ACTIONS, generator=generator(5), dtype=torch.float64)
    y = other.target(outcome, next_z, noises[0], PSI)
    adam = torch.optim.Adam(other.critics.parameters(), 1e-2)
    sum(((critic(z_sa) - y) ** 2).mean() for critic in other.critics).backward()
    adam.step()
    policy_loss, log_pi = other.policy_loss(z, noises[1], PSI)
    adam = torch.optim.Adam(other.policy.parameters(), 1e-2)
    policy_loss.backward()
    adam.step()
    adam = torch.optim.Adam([other.log_alpha], 1e-2)
    other.alpha_loss(log_pi).backward()
    adam.step()
    other.follow()
    wanted = other.state_dict()
    for name, tensor in learner.state_dict().items():
        assert torch.allclose(tensor, wanted[name], atol=1e-10), name
