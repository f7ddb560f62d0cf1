"""Networks from a network's input to what crosses a cut, whatever the rank of the two."""

import pytest
import torch
from torch import nn

from hybrid.solvers.layers.auxiliary import HASHED, auxiliary_network

GIVEN = {
    "images": (3, 8, 8),
    "tokens": (6, 5),
    "numbers": (6,),
    "vectors": (7,),
    "volumes": (2, 4, 4, 4),
}
CUTS = {"images": (4, 4, 4), "tokens": (6, 8), "other tokens": (3, 8), "vectors": (9,)}


def assert_it_fits(network, x, cut):
    """The shape of the cut, a value there, and a gradient to every weight."""
    out = network(x)
    assert out.shape == (len(x), *cut)
    assert out.isfinite().all()
    out.square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("given", GIVEN)
def test_it_gives_the_shape_of_the_cut_and_a_gradient_to_every_weight(given, cut, depth):
    shape, numbers = GIVEN[given], given == "numbers"
    network = auxiliary_network(shape, CUTS[cut], 4, depth, seed=0, indices=numbers)
    assert_it_fits(
        network,
        torch.randint(HASHED, (3, *shape)) if numbers else torch.randn(3, *shape),
        CUTS[cut],
    )
    assert sum(isinstance(m, nn.Conv2d) for m in network) == 0 or given == "images"


@pytest.mark.parametrize("given", GIVEN)
def test_its_weights_are_a_function_of_the_seed_alone(given):
    made = []
    for before in (1, 2):
        torch.manual_seed(before)
        network = auxiliary_network(GIVEN[given], (9,), 4, 1, seed=3, indices=given == "numbers")
        assert torch.initial_seed() == before
        made.append(torch.cat([p.flatten() for p in network.parameters()]))
    assert torch.equal(*made)
    assert made[0].isfinite().all()


def test_a_token_has_its_own_layer():
    """What one token is does not change what is generated for another."""
    network = auxiliary_network((6, 5), (6, 8), 4, 2, seed=0)
    x = torch.randn(2, 6, 5)
    other = x.clone()
    other[:, 2] += 1
    same = (network(x) == network(other)).all(2)
    assert same[:, [0, 1, 3, 4, 5]].all()
    assert not same[:, 2].any()
