"""BatchNorm over all replicas' samples is torch's over the whole mini-batch."""

import copy

import pytest
import torch
from torch import nn

from hybrid.links import run_threads
from hybrid.solvers.norms import SharedNorms
from hybrid.solvers.numerics.buffers import frozen_statistics

SHAPES = {nn.BatchNorm1d: (7, 3), nn.BatchNorm2d: (7, 3, 4, 5), nn.BatchNorm3d: (7, 3, 2, 2, 3)}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [*zip(SHAPES, [{"momentum": None}, {}, {"affine": False}], strict=True)],
)
def test_it_is_torchs_over_the_whole_mini_batch(kind, replicas, settings):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(SHAPES[kind], generator=random, dtype=torch.float64) * 3 + 5
    p = torch.randn(x.shape, generator=random, dtype=torch.float64)
    whole = kind(3, **settings).double()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, generator=random)
    own = [copy.deepcopy(whole) for _ in range(replicas)]
    lam = x.clone().requires_grad_()
    for _ in range(2):
        expected = whole(lam)
        expected.backward(p)

    def program(links):
        module, r = own[links.place.replica], links.place.replica
        shared = SharedNorms(module, links.peers)
        mine = x.tensor_split(replicas)[r].clone().requires_grad_()
        for _ in range(2):
            y = module(mine)
            y.backward(p.tensor_split(replicas)[r])
        shared.remove()
        assert "forward" not in vars(module)
        return y.detach(), mine.grad, [parameter.grad for parameter in module.parameters()]

    found = run_threads(1, program, replicas=replicas)
    torch.testing.assert_close(torch.cat([y for y, _, _ in found]), expected.detach())
    torch.testing.assert_close(torch.cat([g for _, g, _ in found]), lam.grad)
    for i, parameter in enumerate(whole.parameters()):
        torch.testing.assert_close(sum(grads[i] for _, _, grads in found), parameter.grad)
    for module in own:
        for mine, theirs in zip(module.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_frozen_and_tested_it_leaves_statistics_alone():
    def program(links):
        module = nn.BatchNorm1d(2)
        SharedNorms(module, links.peers)
        before = [b.clone() for b in module.buffers()]
        with frozen_statistics(module):
            module(torch.randn(4, 2))
        module.eval()
        torch.testing.assert_close(module(torch.ones(4, 2)), torch.ones(4, 2))
        return all(map(torch.equal, before, module.buffers()))

    assert run_threads(1, program, replicas=2) == [True, True]
