"""The representation has the sizes that are stated, its own loss, and no gradient of another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.learning import sac
from hybrid_rl.learning.networks import Dense, Head, Policy, flat
from hybrid_rl.learning.replay import Batch
from hybrid_rl.learning.representation import Frozen, Representation

STATES, ACTIONS = 3, 2


def made(units=240, layers=8):
    return Representation(STATES, ACTIONS, units, layers, torch.Generator().manual_seed(0))


def batch(count=16):
    draw = torch.Generator().manual_seed(1)
    sizes = (STATES, ACTIONS, 2, STATES)
    return Batch(*(torch.randn(count, size, generator=draw) for size in sizes))


@given(layers=st.integers(1, 8), each=st.integers(1, 30))
def test_the_features_are_the_units_and_what_goes_in(layers, each):
    network = made(layers * each, layers)
    assert network.phi.outputs == STATES + layers * each
    assert network.psi.outputs == STATES + ACTIONS + 2 * layers * each
    assert [layer.out_features for layer in network.phi.layers] == [each] * layers
    z_s, z_sa = network.phi.outputs, network.psi.outputs
    assert network.features(batch()).shape == (16, z_s + z_sa + z_s)


def test_a_dense_block_is_swish_of_batchnorm_beside_its_input():
    network = Dense(STATES, [4], normalized=True).double()
    x = torch.randn(9, STATES, dtype=torch.float64)
    y = network.layers[0](x)
    y = (y - y.mean(0)) / (y.var(0, correction=0) + 1e-3).sqrt()
    assert torch.allclose(network(x), torch.cat([y * torch.sigmoid(y), x], 1), atol=1e-12)


def test_its_loss_is_the_squared_distance_to_the_next_state():
    network, given_batch = made(8, 2), batch()
    found = network.loss(given_batch)
    network.train()
    z_s = network.phi(given_batch.state)
    predicted = network.predictor(network.psi(torch.cat([z_s, given_batch.action], 1)))
    wanted = sum(((p - s) ** 2).sum() for p, s in zip(predicted, given_batch.next_state)) / 16  # noqa: B905
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_features_leave_the_running_statistics_alone_and_no_row_meets_another():
    network, given_batch = made(8, 2), batch()
    network.loss(given_batch)  # which moves the statistics
    before = flat(network)
    found = network.features(given_batch)
    assert torch.equal(flat(network), before)
    first = network.features(Batch(*(part[:1] for part in given_batch)))
    assert torch.allclose(found[:1], first, atol=1e-6)
    assert not found.requires_grad


def test_the_loss_of_the_learner_gives_it_exactly_no_gradient():
    """Though psi itself, and no copy, is what the learner judges its actions with."""
    network, given_batch = made(8, 2), batch()
    z_s, z_sa, next_z_s = network.features(given_batch).split([11, 21, 11], 1)
    critics = Head(21, 8, 1), Head(21, 8, 1)
    learner = sac.Learner(Policy(11, 8, ACTIONS), critics, 0.99, 0.005)
    psi = Frozen(network.psi)
    before, acted = flat(network), flat(learner.policy)
    rest = z_s, z_sa, next_z_s, given_batch.outcome
    for step in range(3):
        draws = torch.Generator().manual_seed(step)
        sac.update(learner, learner.optimizers(1e-2), rest, psi, draws)
    assert all(p.grad is None for p in network.parameters())
    assert torch.equal(flat(network), before)
    assert not torch.equal(flat(learner.policy), acted)
