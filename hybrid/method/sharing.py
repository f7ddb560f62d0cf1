"""Whether replicas divide what their optimizers would compute alike."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.optimizers.optimizer import make_optimizer, output_weight
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers.optimizers.muon import Muon

WORTH_SHARING = 0.03
"""Of a mini-batch's passes: what the products of a step must take for replicas to divide them."""


def shares_products(problem: Problem, options: Options) -> bool:
    """Whether the replicas of a block divide Muon's products.

    Operations are counted, not timed, so that all ranks come to the same answer.
    """
    settings = options.optimizer
    if not isinstance(settings, OptimizerSettings) or settings.name != "muon":
        return False
    if options.replicas == 1 or not options.sync.exact:
        return False
    if settings.sharded is not None:
        return settings.sharded
    model: nn.Module = problem.blocks.model
    optimizer = make_optimizer(model, settings, output_weight([model]))
    assert isinstance(optimizer, Muon)
    uncounted = replace(problem.blocks, costs=[])
    passes = sum(sum(cost) for cost in uncounted.block_costs(problem.inputs))
    share = options.train.batch_size // options.replicas
    return optimizer.count_operations() > WORTH_SHARING * passes * share
