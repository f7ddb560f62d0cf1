"""What is frozen costs nothing: no copy in a step, no message, nothing of what is under way."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainings import assert_same, digits, newest, stopped, trained_weights, trainer_of

from hybrid.folder import checkpoint
from hybrid.links import run_threads
from hybrid.links.base import RankLinks
from hybrid.method import make_method
from hybrid.solvers import DDG, FDG, Backprop, FeaturesReplay, LocalUpdates, Penalty, Petra
from hybrid.solvers.block import Block
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.training.rank_training import RankTraining
from hybrid.training.shared_folder import SharedFolder
from hybrid_messages import PDASGD

SIZE = 37 * 41
"""Numbers in each frozen matrix, and in nothing else."""


def adapted(width=41):
    """Four blocks, each with a trained layer and two frozen ones."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 37)]
    for _ in range(4):
        layers += [nn.Linear(37, 37), nn.Tanh()]
        layers += [nn.Linear(37, width, bias=False), nn.Linear(width, 37, bias=False)]
    model = nn.Sequential(*layers, nn.Linear(37, 10))
    for p in model.parameters():
        p.requires_grad_(p.numel() != 37 * width)
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
def test_what_is_under_way_resumes_without_frozen_weights(solver, tmp_path, monkeypatch):
    monkeypatch.setattr(SharedFolder, "checkpoint_is_due", lambda folder: True)

    def made(resume=False):
        return trainer_of(
            adapted(),
            solver,
            cuts=["6", "10", "14"],
            sample=torch.zeros(4, 1, 8, 8),
            train={"epochs": 1, "batch_size": 8, "report_every": 1},
            out=tmp_path / "run",
            resume=resume,
            checkpoint={"keep_last": 0},
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


def trained_behind(solver, patch, needs_all=False):
    """A training whose first two blocks are frozen: weights, and numbers that blocks send down.

    With `needs_all` every block gets its adjoint, as if all were trained.
    """
    model, sent, send = adapted(), Counter(), RankLinks.to_previous
    for p in model[:10].parameters():
        p.requires_grad_(False)

    def counted(self, tensor):
        sent[self.rank] += tensor.numel()
        send(self, tensor)

    with patch.context() as inside:
        inside.setattr(RankLinks, "to_previous", counted)
        if needs_all:
            inside.setattr(make_method, "_first_trained", lambda *given: 0)
        made = trainer_of(
            model,
            solver,
            cuts=["6", "10", "14"],
            sample=torch.zeros(4, 1, 8, 8),
            train={"epochs": 2, "batch_size": 8},
        )
        return trained_weights(made, digits(2)), sent


@pytest.mark.parametrize(
    "solver",
    [
        Backprop(micro_batches=2),
        DDG(),
        DDG(stash=False),
        PDASGD(),
        FeaturesReplay(),
        Petra(),
    ],
    ids=lambda solver: solver.name,
)
def test_no_adjoint_goes_to_blocks_that_train_nothing(solver, monkeypatch):
    found, sent = trained_behind(solver, monkeypatch)
    expected, everything = trained_behind(solver, monkeypatch, needs_all=True)
    assert_same(found, expected)
    assert everything[1] == everything[2] == everything[3] > 0
    assert sent == {1: 0, 2: 0, 3: everything[3]}


@pytest.mark.parametrize("style", ["overlapping", "chunked"])
def test_local_updates_report_their_progress_to_blocks_that_train_nothing(style, monkeypatch):
    solver = LocalUpdates(style=style, **({"chunks": 1} if style == "chunked" else {}))
    found, sent = trained_behind(solver, monkeypatch)
    expected, everything = trained_behind(solver, monkeypatch, needs_all=True)
    assert_same(found, expected)
    assert everything[1] == everything[2] == everything[3] > 8 * 37
    assert sent == {1: 2, 2: 2, 3: everything[3]}


@pytest.mark.parametrize("sync", [AllReduce(), LocalSGD(2), DiLoCo(2)], ids=repr)
def test_bytes_between_ranks_do_not_depend_on_what_is_frozen(sync, monkeypatch):
    send = RankLinks.send_to
    traffics = []
    for width in (41, 410):
        sent = Counter()

        def counted(self, side, number, tensor, sent=sent):
            sent[self.place.number, side] += tensor.nbytes
            send(self, side, number, tensor)

        monkeypatch.setattr(RankLinks, "send_to", counted)
        made = trainer_of(
            adapted(width),
            cuts=["10"],
            sample=torch.zeros(4, 1, 8, 8),
            train={"epochs": 1, "ema": 0.9 if isinstance(sync, AllReduce) else 0.0},
            replicas=2,
            sync=sync,
            optimizer={"name": "sgd"},
        )
        made.fit(*digits(4))
        traffics.append(sent)
    assert traffics[0] == traffics[1]
    assert sum(traffics[0][n, "peers"] for n in range(4)) > 0


def test_replicas_that_begin_with_other_frozen_weights_take_those_of_the_first():
    def program(links):
        module = nn.Linear(3, 3).requires_grad_(False)
        nn.init.constant_(module.weight, links.place.replica)
        nn.init.zeros_(module.bias)
        optimizers = {"exact": torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)}
        block = Block(module, 0, 1, optimizers)
        AllReduce().start(block, links.peers, 0.5).copy_first_replica()
        return module.weight.sum().item(), links.traffic.bytes_sent["peers"]

    weights, sent = zip(*run_threads(1, program, replicas=2), strict=True)
    assert weights == (0.0, 0.0)
    assert sent == (2 * 32 + 9 * 4, 2 * 32)
