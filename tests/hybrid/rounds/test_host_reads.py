"""Between two reports no step reads a tensor's value, for which the host would wait for a GPU."""

import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from trainings import digits, trainer

from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import DDG, Backprop, registry
from hybrid.solvers.registry import STRATEGIES
from hybrid.solvers.sync.all_reduce import AllReduce

READS = (
    "item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"
)  # fmt: skip
ON_THE_HOST = {"right_answers", "add_batch", "_get_value", "compare", "checksum"}
"""Functions that read tensors of the host only (labels, sample numbers, the step count of Adam), or
that only a debug run calls."""


@contextmanager
def reads_counted():
    """A list that gets the caller of every read of a tensor's value."""
    found, real = [], {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name):
        def read(self, *arguments, **options):
            caller = sys._getframe(1)
            if caller.f_code.co_name not in ON_THE_HOST:
                found.append(f"{caller.f_code.co_filename}:{caller.f_lineno} {name}")
            return real[name](self, *arguments, **options)

        return read

    try:
        for name in READS:
            setattr(torch.Tensor, name, counting(name))
        yield found
    finally:
        for name, function in real.items():
            setattr(torch.Tensor, name, function)


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


@pytest.mark.parametrize("name", registry.OWN)
def test_a_step_of_no_solver_reads_a_tensor(name):
    found = reads_of_steps(registry.SOLVERS[name](), **NEEDS.get(name, {}))
    # the ranks decide at the end of every window whether its multipliers stay bounded
    assert found.total() <= (2 * 20 // 4 if name == "block-admm" else 0), found


@pytest.mark.parametrize("name", STRATEGIES.places)
def test_a_step_of_no_strategy_reads_a_tensor(name):
    strategy = STRATEGIES[name]()
    plain = OptimizerSettings(momentum=0.0) if strategy.plain else OptimizerSettings()
    assert not reads_of_steps(
        Backprop(), blocks=1, replicas=2, sync=strategy, optimizer=plain, train={"batch_size": 16}
    )


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
