"""What is frozen costs nothing: no copy in a step, no message, nothing of what is under way."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainings import OFTEN, assert_same, digits, newest, stopped, trained_weights, trainer_of

from hybrid.folder import checkpoint
from hybrid.solvers import DDG, FDG, PDASGD, Backprop, FeaturesReplay, LocalUpdates, Penalty
from hybrid.training.rank_training import RankTraining

SIZE = 37 * 41
"""Numbers in each frozen matrix, and in nothing else."""


def adapted():
    """Four blocks, each with a trained layer and two frozen ones."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 37)]
    for _ in range(4):
        layers += [nn.Linear(37, 37), nn.Tanh()]
        layers += [nn.Linear(37, 41, bias=False), nn.Linear(41, 37, bias=False)]
    model = nn.Sequential(*layers, nn.Linear(37, 10))
    for p in model.parameters():
        p.requires_grad_(p.numel() != SIZE)
    return model


def frozen(model):
    return {n: p for n, p in model.named_parameters() if not p.requires_grad}


class Watch(TorchDispatchMode):
    """Tells of every tensor of a frozen matrix's size that is not one of those."""

    def __init__(self, memory, found):
        super().__init__()
        self.memory, self.found = memory, found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            is_large = isinstance(x, torch.Tensor) and x.numel() == SIZE
            if is_large and x.untyped_storage().data_ptr() not in self.memory:
                self.found.append((func, tuple(x.shape)))
        return out


@pytest.mark.parametrize(
    "solver",
    [
        Backprop(micro_batches=2),
        DDG(micro_batches=1),
        DDG(micro_batches=1, recompute=True),
        FDG(micro_batches=1),
        PDASGD(),
        FeaturesReplay(),
        LocalUpdates(),
        Penalty(),
    ],
    ids=lambda solver: solver.name,
)
def test_no_step_makes_a_tensor_of_the_size_of_a_frozen_matrix(solver, monkeypatch):
    run, found, model = RankTraining.run, [], adapted()
    memory = {p.untyped_storage().data_ptr() for p in frozen(model).values()}
    places = {n: p.data_ptr() for n, p in frozen(model).items()}
    assert len(places) == 8

    def watched(self, pairs):
        with Watch(memory, found):
            return run(self, pairs)

    monkeypatch.setattr(RankTraining, "run", watched)
    made = trainer_of(
        model,
        solver,
        cuts=["6", "10", "14"],
        sample=torch.zeros(4, 1, 8, 8),
        train={"epochs": 2, "batch_size": 8},
    )
    made.fit(*digits(3))
    assert not found
    assert {n: p.data_ptr() for n, p in frozen(model).items()} == places


@pytest.mark.parametrize("solver", [DDG(micro_batches=1), PDASGD()], ids=lambda s: s.name)
def test_what_is_under_way_resumes_without_frozen_weights(solver, tmp_path):
    def made(resume=False):
        return trainer_of(
            adapted(),
            solver,
            cuts=["6", "10", "14"],
            sample=torch.zeros(4, 1, 8, 8),
            train={"epochs": 1, "batch_size": 8, "report_every": 1},
            out=tmp_path / "run",
            resume=resume,
            checkpoint=OFTEN,
        )

    expected = trained_weights(made(), digits(2))
    folders = checkpoint.complete(tmp_path / "run" / "checkpoints")
    stopped(tmp_path / "run", int(folders[len(folders) // 2].name))
    manifest = checkpoint.read_manifest(newest(tmp_path / "run"))
    kept = [
        checkpoint.load_state(newest(tmp_path / "run"), manifest, name)
        for name in manifest["states"]
    ]
    assert any("version" in name for tensors in kept for name in tensors)
    assert SIZE not in [x.numel() for tensors in kept for x in tensors.values()]
    assert_same(trained_weights(made(resume=True), digits(2)), expected)
