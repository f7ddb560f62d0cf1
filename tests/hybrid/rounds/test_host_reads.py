"""Between two reports no step reads a tensor's value, for which the host would wait for a GPU."""

import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from trainings import digits, trainer

from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import DDG, Backprop, registry
from hybrid.solvers.objective import Objective
from hybrid.solvers.registry import STRATEGIES
from hybrid.solvers.sync.all_reduce import AllReduce

READS = (
    "item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__",
    "equal", "nonzero", "unique",
)  # fmt: skip
FUNCTIONS = ("equal", "allclose", "nonzero", "unique")
ON_THE_HOST = {"right_answers", "add_batch", "_get_value", "compare", "checksum", "is_unchanged"}
"""Functions that read tensors of the host only (labels, sample numbers, the step count of Adam), or
that only a debug run calls."""


@contextmanager
def reads_counted():
    """A list that gets the caller of every read of a tensor's value."""
    found = []

    def counting(name, real):
        def read(*arguments, **options):
            caller = sys._getframe(1)
            if caller.f_code.co_name not in ON_THE_HOST:
                found.append(f"{caller.f_code.co_filename}:{caller.f_lineno} {name}")
            return real(*arguments, **options)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for home, names in ((torch.Tensor, READS), (torch, FUNCTIONS)):
            for name in names:
                patch.setattr(home, name, counting(name, getattr(home, name)))
        yield found


def reads_of_steps(solver, **settings):
    """The reads that 20 more steps make, of one epoch and one report."""
    counts = []
    for steps in (20, 40):
        wanted = {"epochs": 1, "report_every": 1000, "batch_size": 8, **settings.get("train", {})}
        made = trainer(solver, **{"model": "plain", **settings, "train": wanted})
        train, test = digits()
        with reads_counted() as found:
            made.fit(train.take(8 * steps), test.take(8))
        counts.append(Counter(found))
    return counts[1] - counts[0]


NEEDS = {
    "petra": {"model": "revnet8"},
    "penalty": {"optimizer": OptimizerSettings(lr=0.01)},
    "augmented-lagrangian": {"optimizer": OptimizerSettings(lr=0.01)},
}
"""What a solver cannot train without on mini-batches of 8."""


LOSS = nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0), ignore_index=3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", registry.OWN)
def test_a_step_of_no_solver_reads_a_tensor(name, weighted):
    settings = NEEDS.get(name, {}) | ({"loss": LOSS} if weighted else {})
    found = reads_of_steps(registry.SOLVERS[name](), **settings)
    # the ranks decide at the end of every window whether its multipliers stay bounded
    assert found.total() <= (2 * 20 // 4 if name == "block-admm" else 0), found


@pytest.mark.parametrize("solver", [Backprop(recompute=True), DDG(recompute=True)], ids=type)
def test_a_pass_that_is_made_again_compares_no_buffer(solver):
    """Of a network with BatchNorm; on a GPU others count as changed, see `is_unchanged`."""
    assert not reads_of_steps(solver, model="resnet8")


def test_the_tensors_of_a_loss_lie_where_its_block_is():
    other, y = torch.device("meta"), torch.arange(4) + 3
    for loss in (LOSS, partial(nn.functional.cross_entropy, weight=LOSS.weight)):
        objective = Objective(loss).on(other)
        assert objective.weighted.class_weights.device == other
        assert objective.weighted.loss is objective.loss
        assert Objective(loss).weighted.class_weights is LOSS.weight
        assert objective.mean_of(torch.randn(4, 10).to(other), y.to(other)).device == other
    for loss in (nn.CrossEntropyLoss(), nn.functional.cross_entropy):
        assert Objective(loss).on(other).loss is loss


@pytest.mark.parametrize("name", STRATEGIES.places)
def test_a_step_of_no_strategy_reads_a_tensor(name):
    sync = STRATEGIES[name]()
    assert not reads_of_steps(Backprop(), blocks=1, replicas=2, sync=sync, train={"batch_size": 16})


@pytest.mark.parametrize(("blocks", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_clipping_reads_nothing(blocks, replicas):
    sync, train = AllReduce(), {"batch_size": 8 * replicas}
    for solver in (Backprop(clip_norm=0.01), DDG(clip_norm=0.5)):
        found = reads_of_steps(solver, blocks=blocks, replicas=replicas, sync=sync, train=train)
        assert not found


@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [0.0, 0.01])
def test_on_a_gpu_no_step_waits_for_it(clip_norm):
    """Of the steps between two reports: what places a module, reports or tests has to wait."""
    steps = 0

    def watched(images, labels, generator):
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("error" if 5 <= steps < 15 else "default")
        return images, labels

    train, test = digits()
    settings = {"epochs": 1, "report_every": 1000, "batch_size": 32}
    made = trainer(Backprop(clip_norm=clip_norm), blocks=1, train=settings)
    made.options.batch_transform = watched
    try:
        made.fit(train.take(640), test.take(32))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps >= 20
