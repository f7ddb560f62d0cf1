"""Recorded passes have the bits of eager ones, on a stand-in that replays as a GPU's graphs do."""

import pytest
import torch
from answers import refusal
from torch import nn
from torch.utils._pytree import tree_leaves
from trainings import OFTEN, assert_same, digits, stopped, trained_weights, trainer

from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop, FeaturesReplay
from hybrid.solvers.block import Block
from hybrid.solvers.engine import graphs
from hybrid.solvers.engine.policies import KeepGraph, Recompute, StashWeights

FLAGS = "training", "track_running_stats"


def flags(module):
    """What a pass of torch's modules looks at in Python."""
    return [(m, {n: getattr(m, n) for n in FLAGS if hasattr(m, n)}) for m in module.modules()]


def set_flags(found):
    for module, values in found:
        vars(module).update(values)


class Replayer:
    """Records on the CPU: always the same memory, which a recording leaves without numbers."""

    made = 0

    def __init__(self, device):
        pass

    def pool(self):
        pass

    def record(self, work, pool):
        Replayer.made += 1
        results = work()
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.data.fill_(torch.nan)

        modes = flags(work.__self__.block.module)

        @torch.enable_grad()
        def replay():
            now = flags(work.__self__.block.module)
            set_flags(modes)  # what Python looks at has been recorded, too
            repeat()
            set_flags(now)

        def repeat():
            for old, new in zip(tree_leaves(results), tree_leaves(work()), strict=True):
                if old is not None:
                    old.data.copy_(new.detach())

        return results, replay


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(Replayer, "made", 0)
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Replayer)


def weights(solver, compiled, blocks, data, **settings):
    wanted = {"epochs": 2, "compile": compiled, **settings.pop("train", {})}
    made = trainer(solver, blocks=blocks, train=wanted, **settings)
    return trained_weights(made, data)


CASES = {
    "backprop alone": (Backprop(), 1, {}, 1),
    "backprop in micro-batches": (Backprop(micro_batches=3), 3, {}, 2 * (3 + 2 + 1)),
    "ddg": (DDG(micro_batches=1), 3, {}, 3 + 2 + 1),
    "ddg in uneven micro-batches": (DDG(micro_batches=3), 3, {}, 2 * (3 + 2 + 1)),
    "fdg": (FDG(), 2, {}, 12),
    "auxiliary variables": (
        AugmentedLagrangian(), 2, {"optimizer": OptimizerSettings(lr=0.01)}, 12
    ),
    "observed windows": (
        AugmentedLagrangian(), 2,
        {"optimizer": OptimizerSettings(lr=0.01), "window": "all", "correct_every": 2}, 24,
    ),
    "two replicas": (DDG(micro_batches=1), 2, {"replicas": 2}, 2 * (2 + 1)),
    "bfloat16": (DDG(micro_batches=1), 2, {"train": {"precision": "bfloat16"}}, 2 + 1),
    "float16": (DDG(micro_batches=1), 2, {"train": {"precision": "float16"}}, 2 + 1),
    "frozen for an epoch": (
        DDG(micro_batches=1), 2, {"train": {"frozen": {"conv1": 1, "layer2": 1}}}, 2 * (2 + 1)
    ),
}  # fmt: skip
"""A method, its blocks and settings, and the most recordings that it makes."""


@pytest.mark.parametrize("case", CASES)
def test_recorded_passes_have_the_bits_of_eager_ones(case):
    solver, blocks, settings, most = CASES[case]
    data = digits(5)
    expected = weights(solver, False, blocks, data, **settings)
    assert Replayer.made == 0
    assert_same(weights(solver, "graphs", blocks, data, **settings), expected)
    assert 0 < Replayer.made <= 2 * most


@pytest.mark.gpu
@pytest.mark.parametrize("case", [name for name, (_, _, settings, _) in CASES.items()])
def test_graphs_of_a_gpu_have_the_bits_of_eager_passes(case):
    solver, blocks, settings, _ = CASES[case]
    train = {"device": "cuda", "deterministic": True, **settings.get("train", {})}
    found = [
        weights(solver, how, blocks, digits(5), **{**settings, "train": train})
        for how in (False, "graphs")
    ]
    assert_same(*found)


def test_a_run_goes_on_from_flights_of_recorded_passes(tmp_path):
    data, found = digits(6), []
    for compiled in (False, "graphs"):
        run = tmp_path / str(compiled)
        settings = {"out": run, "blocks": 3, "checkpoint": OFTEN}
        settings["train"] = {"epochs": 1, "report_every": 1, "compile": compiled}
        trainer(DDG(micro_batches=1), **settings).fit(*data)
        stopped(run, 3)
        made = trainer(DDG(micro_batches=1), resume=True, **settings)
        found.append(trained_weights(made, data))
    assert_same(*found)


class Counting(nn.Linear):
    """A module of one's own."""


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x):
        return x * self.mask


Masked.__module__ = "torch.nn.made_up"


@pytest.mark.parametrize(
    ("last", "changes", "policy", "said"),
    [
        (nn.ReLU(), {}, KeepGraph, ""),
        (nn.ReLU(), {}, lambda block: StashWeights(block, False), ""),
        (nn.ReLU(), {}, lambda block: StashWeights(block, True), "do not run on the graph"),
        (nn.ReLU(), {}, Recompute, "do not run on the graph"),
        (nn.ReLU(), {"draws": object()}, KeepGraph, "draws random numbers"),
        (nn.ReLU(), {"norms": object()}, KeepGraph, "BatchNorm communicates"),
        (Counting(3, 3), {}, KeepGraph, "are not torch's"),
        (Masked(), {}, KeepGraph, "may change buffers"),
    ],
)
def test_what_python_does_in_a_pass_is_not_recorded(last, changes, policy, said):
    block = Block(nn.Sequential(nn.Linear(3, 3), last), 0, 2, {}, **changes)
    made = policy(block)
    found = graphs.recorded(made)
    assert isinstance(found, graphs.Recorded) == (not said)
    assert said in found.eager


def test_a_run_names_the_ranks_without_graphs_and_its_solver(capsys):
    made = trainer(FeaturesReplay(), blocks=2, train={"epochs": 1, "compile": "graphs"})
    made.options.quiet = False
    made.fit(*digits(1))
    said = "rank 0 runs without graphs: its backward passes do not run on the graph"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (None, "'graphs', which are recorded on a GPU, and this block is on the cpu: leave"),
        ("record", r"cannot be recorded (RuntimeError: operation not permitted when stream is"),
    ],
)
def test_what_cannot_be_recorded_is_refused(monkeypatch, graph, said):
    if graph is None:
        monkeypatch.delitem(graphs.RECORDERS, "cpu")

    def fail(self, work, pool):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(Replayer, "record", fail)
    said = said.replace("RuntimeError: o", "RuntimeError: CUDA error: o")
    made = trainer(Backprop(), blocks=2, train={"epochs": 1, "compile": "graphs"})
    assert said in refusal(made.fit, *digits(1))


def test_inputs_of_many_forms_are_not_all_recorded(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_FORMS", 1)
    solver, data = DDG(micro_batches=3), digits(5)  # of 11, 11 and 10 samples
    expected = weights(solver, False, 2, data)
    assert_same(weights(solver, "graphs", 2, data), expected)
    assert 0 < Replayer.made <= 2 * (2 + 1) + 2 * 2 * 3
