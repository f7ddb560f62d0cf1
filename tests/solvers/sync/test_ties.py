"""A weight that several blocks have: copies with the bits of the undivided network's weight."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainings import assert_same, stopped

from hybrid import Trainer, split
from hybrid.folder import checkpoint
from hybrid.links.base import RankLinks
from hybrid.networks.local_init import build_local, divide
from hybrid.rounds.base import Rounds
from hybrid.rounds.phase_report import DivergedError
from hybrid.settings.config import CheckpointSettings
from hybrid.solvers import DDG, FDG, Backprop, FeaturesReplay
from hybrid.solvers.block import Block
from hybrid.solvers.sync.ties import AllTies, Ties

IDS = torch.randint(7, (24, 5), generator=torch.Generator().manual_seed(1))


class Shared(nn.Module):
    """An embedding that two output layers have, too."""

    def __init__(self, width=16, words=7):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.heads = nn.ModuleList(nn.Linear(width, words, bias=False) for _ in range(2))
        for head in self.heads:
            head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers[:2]:
            x = x + layer(x)
        early = self.heads[0](x)
        for layer in self.layers[2:]:
            x = x + layer(x)
        return self.heads[1](x) + early


def loss(out, ids):
    return nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())


def trained_blocks(blocks, solver, **given):
    torch.manual_seed(0)
    made = split(Shared(), blocks, sample=IDS[:4])
    settings = {"epochs": 1, "batch_size": 4, "threads": 1, "report_every": 1}
    settings |= given.pop("train", {})
    given = {"optimizer": {"name": "adamw", "lr": 0.01}, **given}
    more = {"loss": loss, "metrics": {}, "train": settings, "quiet": True}
    Trainer(made, solver, **more, **given).fit((IDS, IDS), (IDS, IDS))
    return made


def trained(blocks, solver, **given):
    return trained_blocks(blocks, solver, **given).model.state_dict()


def copies(blocks):
    ((owners, (names,)),) = blocks.ties.items()
    found = []
    for k in owners:
        there = {n: p for unit in blocks.units_of(k) for n, p in unit.parameters().items()}
        found.append(next(there[name] for name in names if name in there))
    return found


def assert_alike(blocks):
    first, *others = copies(blocks)
    assert first.isfinite().all()
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"solver": Backprop(clip_norm=0.3), "train": {"ema": 0.9}},
        {"solver": Backprop(), "train": {"frozen": ["heads.0"]}},
        {"solver": Backprop(), "train": {"frozen": {"embedding": 1}, "epochs": 2}},
        {"solver": Backprop(), "optimizer": {"name": "muon"}},
        {"solver": Backprop(), "optimizer": {"name": "soap"}},
        {"solver": DDG(1), "window": 6, "correct_every": 2},
    ],
    ids=["clipped", "frozen", "thawed", "muon", "soap", "serial rounds"],
)
def test_blocks_have_the_bits_of_the_undivided_network(settings):
    expected = trained(1, **settings)
    for blocks in (2, 3):
        assert_same(trained(blocks, **settings), expected)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("step", [3, 6])
def test_a_resume_in_mid_flight_goes_on_as_if_nothing_had_been(step, tmp_path, monkeypatch):
    """Blocks that wait for what others have used must not keep these from their first step."""
    monkeypatch.setattr("hybrid.method.make_method.WINDOW", 1)  # or checkpoints wait for its end
    saved = {"checkpoint": CheckpointSettings(steps=1, keep_last=0), "solver": DDG(2)}
    expected = trained(3, out=tmp_path / "whole", **saved)
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    folders = checkpoint.complete(run / "checkpoints")
    assert step in [int(folder.name) for folder in folders]
    for folder in folders:
        if int(folder.name) > step:
            shutil.rmtree(folder)
    (run / "summary.json").unlink()
    assert_same(trained(3, out=run, resume=True, **saved), expected)


def test_a_rank_builds_a_weight_that_any_of_its_blocks_uses():
    def make():
        torch.manual_seed(0)
        return Shared(width=64, words=512)

    ids = torch.randint(512, (4, 5))
    division = divide(make, lambda model, cuts=None: split(model, 2, cuts=cuts, sample=ids), False)
    assert frozenset({0, 1}) in {each.blocks for each in division.allocations.values()}
    expected = make().embedding.weight
    for rank in (0, 1):
        assert torch.equal(build_local(make, division, [rank]).embedding.weight, expected)


RAMP = {"name": "cosine", "warmup_epochs": 0.5}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "settings",
    [
        {"solver": DDG(1), "schedule": RAMP},
        {"solver": FDG(1), "schedule": RAMP, "optimizer": {"name": "sgd", "lr": 0.5}},
        {"solver": FeaturesReplay(1, clip_norm=0.1), "optimizer": {"name": "nadamw"}},
        {"solver": DDG(1, stash=False, clip_norm=0.1), "optimizer": {"name": "muon"}},
        {"solver": DDG(2), "replicas": 2, "optimizer": {"name": "sgd", "lr": 0.5}},
        {"solver": DDG(1), "window": 2, "correct_every": 2, "correction": Backprop(clip_norm=0.1)},
        {
            "solver": DDG(2, clip_norm=0.1),
            "fill": "augmented-lagrangian",
            "local_budget": [(1, 0), (1, 0), (0, 1)],
        },
    ],
    ids=["ddg", "fdg", "clipped", "newest weights", "replicas", "corrected", "local work"],
)
def test_copies_are_alike_after_late_steps(settings):
    assert_alike(trained_blocks(3, **settings))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("solver", [DDG(2), DDG(1), FDG(1), Backprop()], ids=repr)
def test_copies_begin_alike_where_a_resumed_run_has_other_delays(solver, tmp_path, monkeypatch):
    monkeypatch.setattr("hybrid.method.make_method.WINDOW", 1)  # or it stops at its end
    every = CheckpointSettings(steps=1, keep_last=0)
    given = {"out": tmp_path / "run", "checkpoint": every, "train": {"ema": 0.5}}
    trained_blocks(3, DDG(1), **given)
    stopped(tmp_path / "run", 3)
    assert_alike(trained_blocks(3, solver, resume=True, **given))


@pytest.mark.timeout(60)
def test_copies_make_the_steps_before_a_roll_back_at_one_rate(tmp_path, monkeypatch):
    plain, went_back = Rounds.run, []

    def run(self, windows, first_step, *more):
        reports = plain(self, windows, first_step, *more)
        if first_step == 3 and self.exact.block.rates["local"] == 1:
            went_back.append(first_step)
            raise DivergedError("as the test wants it")
        return reports

    monkeypatch.setattr(Rounds, "run", run)
    monkeypatch.setattr("hybrid.method.make_method.WINDOW", 1)
    every = CheckpointSettings(steps=1, keep_last=0)
    assert_alike(trained_blocks(3, DDG(1), out=tmp_path / "run", checkpoint=every))
    assert len(went_back) == 3


def test_a_copy_that_differs_is_noticed_at_the_next_step(monkeypatch):
    plain = Block.move

    def move(self, *given):
        plain(self, *given)
        if self.last:
            with torch.no_grad():
                next(iter(self.ties.ties[0].parameters)).view(-1)[0] += 1e-6

    monkeypatch.setattr(Block, "move", move)
    with pytest.raises(RuntimeError, match="differs between them before their step 1"):
        trained_blocks(3, DDG(1))
    monkeypatch.setattr("hybrid.solvers.peers.COMPARED", False)
    trained_blocks(3, DDG(1))


def tied(rank, blocks, *parameters):
    links = SimpleNamespace(rank=rank, meet=lambda blocks: None)
    return Ties(links, parameters, blocks, [0] * len(blocks), {})


def with_gradients(*values):
    parameters = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for p, value in zip(parameters, values, strict=True):
        p.grad = torch.tensor(value)
    return parameters


def test_what_other_blocks_have_is_clipped_by_its_own_norm_where_there_is_no_chain():
    a, own, b = with_gradients([3.0, 4.0], [6.0, 8.0], [0.1])
    module = nn.ParameterList([a, own, b])
    block = Block(module, 1, 3, {"local": torch.optim.SGD(module.parameters(), 1.0)})
    block.ties = AllTies([tied(1, (0, 1), a), tied(1, (1, 2), b)])
    block.ties.sum_gradients = lambda exact: None
    block.step("local", 1.0, clip_norm=1.0)
    for p, value in ((a, [0.6, 0.8]), (own, [0.6, 0.8]), (b, [0.1])):
        torch.testing.assert_close(p.detach(), -torch.tensor(value))


@pytest.mark.parametrize("solver", [Backprop(), DDG(1)], ids=repr)
def test_a_frozen_weight_costs_a_digest_and_is_copied_where_it_differs(solver, monkeypatch):
    sent, send = [], RankLinks.to_block

    def counted(self, block, tensor):
        sent.append(tensor.numel())
        send(self, block, tensor)

    monkeypatch.setattr(RankLinks, "to_block", counted)
    model = Shared()
    model.embedding.weight.requires_grad_(False)
    blocks = split(model, 3, sample=IDS[:4])
    for words in ([], [7 * 16, 7 * 16]):
        sent.clear()
        given = {"epochs": 1, "batch_size": 4, "threads": 1}
        Trainer(blocks, solver, loss=loss, metrics={}, train=given, quiet=True).fit((IDS, IDS))
        assert sorted(sent) == [*[32] * 8, *words]  # once in the trial before the run
        assert_alike(blocks)
        for copy in copies(blocks)[1:]:
            copy.data.add_(1)


def test_a_factory_that_steps_copies_unlike_is_refused():
    def unlike(groups):
        return torch.optim.SGD(groups, lr=0.1 / sum(len(g["params"]) for g in groups))

    with pytest.raises(ValueError, match="the optimizer's factory gives it other settings"):
        trained_blocks(3, Backprop(), optimizer=unlike)


def test_a_factory_gets_a_weight_by_one_name_on_all_blocks():
    def by_name(named_parameters):
        groups = [
            {"params": [p], "lr": 0.5 if name.startswith("heads") else 0.1}
            for name, p in named_parameters
        ]
        return torch.optim.SGD(groups, lr=0.1)

    assert_same(
        trained(3, Backprop(), optimizer=by_name), trained(1, Backprop(), optimizer=by_name)
    )
