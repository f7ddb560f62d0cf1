"""The moving average of the weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybrid.solvers import Block
from hybrid.solvers.numerics.optimizer_state import Average


def test_the_average_is_that_of_torchs_averaged_model_bit_for_bit():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizers = {"exact": sgd, "local": sgd, "ema": Average(list(module.parameters()), 0.9)}
    block = Block(module, 0, 1, optimizers)
    reference = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for kind in ("exact", "local", "exact"):
        module(torch.randn(8, 4)).square().sum().backward()
        block.step(kind, 0.1)
        reference.update_parameters(module)
    plain = [p.detach().clone() for p in module.parameters()]
    with block.as_tested():
        assert all(map(torch.equal, module.parameters(), reference.module.parameters()))
    assert all(map(torch.equal, module.parameters(), plain))
    assert not any(map(torch.equal, module.parameters(), reference.module.parameters()))


def test_without_a_step_there_is_no_average_and_the_weights_stay():
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    Average(list(module.parameters()), 0.9).swap()
    assert torch.equal(module.weight, before)
