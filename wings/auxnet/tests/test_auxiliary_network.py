"""Networks from a network's input to what crosses a cut, whatever the rank of the two."""

import pytest
import torch

from hybrid_auxnet.auxnet import auxiliary_network

INPUTS = {"images": (3, 8, 8), "tokens": (6, 5), "vectors": (7,), "volumes": (2, 4, 4, 4)}
CUTS = {"images": (4, 4, 4), "larger images": (2, 12, 16), "tokens": (6, 8), "vectors": (9,)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", INPUTS)
def test_it_gives_the_shape_of_the_cut_and_a_gradient_to_every_weight(kind, cut, depth):
    networks = []
    for torch_seed in (1, 2):  # its weights are a function of its own seed alone
        torch.manual_seed(torch_seed)
        networks.append(auxiliary_network(INPUTS[kind], CUTS[cut], 4, depth, seed=0))
        assert torch.initial_seed() == torch_seed
    network, again = networks
    assert all(map(torch.equal, network.parameters(), again.parameters()))
    out = network(torch.randn(3, *INPUTS[kind]))
    assert out.shape == (3, *CUTS[cut])
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
