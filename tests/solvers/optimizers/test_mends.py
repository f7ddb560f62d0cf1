"""Extrapolated steps against their formula, and against what they are equal to."""

import pytest
import torch
from torch import nn

from hybrid.solvers.block import Block
from hybrid.solvers.optimizers.mends import Extrapolation
from hybrid.solvers.optimizers.muon import Muon

CURVATURE = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
START = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)


def block(optimizer, ahead=0.0):
    module = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    module.weight.data = START.clone()
    exact = optimizer(module.parameters())
    local = Extrapolation(exact.param_groups, exact, ahead) if ahead else exact
    return Block(module, 0, 1, {"exact": exact, "local": local})


def trained(found, delay=0, count=12, kind="local"):
    """All weights on the way, gradients taken at weights that are `delay` steps old."""
    (w,) = found.module.parameters()
    seen = [w.detach().clone()]
    for t in range(count):
        w.grad = CURVATURE @ seen[max(0, t - delay)]
        found.step(kind, 0.1)
        seen.append(w.detach().clone())
    return seen


def heavy_ball(p, nesterov=False):
    return torch.optim.SGD(p, momentum=0.8, nesterov=nesterov)


@pytest.mark.parametrize(
    "optimizer", [heavy_ball, lambda p: torch.optim.AdamW(p, weight_decay=0), Muon]
)
def test_it_is_weight_prediction_whose_predicted_weights_are_the_weights(optimizer):
    """SpecTrain: z moves by the optimizer alone, and gradients are taken at z + c u_{t-1}."""
    c, delay, z = 1.75, 2, nn.Parameter(START.clone())
    alone, predicted = optimizer([z]), [START]
    alone.param_groups[0]["lr"] = 0.1
    for t in range(12):
        z.grad = CURVATURE @ predicted[max(0, t - delay)]
        before = z.detach().clone()
        alone.step()
        predicted.append(z.detach() + c * (z.detach() - before))
    found = trained(block(optimizer, c), delay)
    torch.testing.assert_close(found, predicted, rtol=0, atol=1e-13)


def test_heavy_ball_extrapolated_by_its_momentum_is_nesterovs():
    nesterovs = trained(block(lambda p: heavy_ball(p, nesterov=True)))
    torch.testing.assert_close(trained(block(heavy_ball, 0.8)), nesterovs, rtol=0, atol=1e-13)


def test_exact_steps_are_not_extrapolated_and_share_the_optimizers_state():
    plain, mended = trained(block(heavy_ball), kind="exact"), block(heavy_ball, 1.0)
    assert all(map(torch.equal, trained(mended, kind="exact"), plain))
    (w,) = mended.module.parameters()
    assert mended.optimizers["local"].inner is mended.optimizers["exact"]
    trained(mended, count=1)
    assert mended.optimizers["exact"].state[w].keys() == {"momentum_buffer"}


def test_a_step_of_some_weights_extrapolates_only_these():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sgd = torch.optim.SGD(module.parameters())
    mend = Extrapolation(sgd.param_groups, sgd, 1.0)
    found = Block(module, 0, 1, {"exact": sgd, "local": mend})
    first, second = (list(part.parameters()) for part in module)
    before = [p.detach().clone() for p in (*first, *second)]
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    found.step("local", 0.1, only=first)
    moved = [p.detach() - b for p, b in zip((*first, *second), before, strict=True)]
    assert all(m.mean() == pytest.approx(-0.2) for m in moved[:2])  # u + 1 (u - 0)
    assert not any(m.any() for m in moved[2:])
    assert {id(p) for p in mend.state} == {id(p) for p in first}
