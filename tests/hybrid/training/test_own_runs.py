"""What a user's own network keeps through a run, a test and a resume."""

import shutil

import pytest
import torch
from answers import refusal
from samples import Counted
from small_networks import Masked, UNet
from torch import nn

from hybrid import Trainer, TrainSettings, data, split
from hybrid.folder import checkpoint
from hybrid.solvers import FDG, AugmentedLagrangian, Backprop

SHORT = TrainSettings(epochs=2, batch_size=8, threads=1)


class Dropping(nn.Module):
    """One dropout module, called on both sides of a cut."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 32), nn.Linear(32, 3)
        self.norm, self.dropout = nn.BatchNorm1d(32), nn.Dropout(0.5)

    def forward(self, x):
        return self.b(self.dropout(self.norm(torch.relu(self.dropout(self.a(x))))))


def test_tests_leave_every_modules_mode_alone_and_drop_nothing():
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(64, 4)
    trainer = Trainer(split(model, cuts=["norm"], sample=x), Backprop(), train=SHORT, quiet=True)
    # in batches as a test has them: a product of more rows may round otherwise
    expected = torch.cat([model.eval()(rows) for rows in x.split(SHORT.batch_size)])
    for module in model.modules():
        module.training = module is model.norm
    for _ in range(20):
        assert trainer.evaluate((x, expected.argmax(1)))["accuracy"] == 1
    assert [m for m in model.modules() if m.training] == [model.norm]


def test_a_run_whose_cuts_several_tensors_cross_goes_on_with_other_blocks(tmp_path):
    x, y = torch.randn(24, 1, 16, 16), torch.randint(3, (24, 16, 16))

    def trained(blocks, out, resume=False):
        torch.manual_seed(0)
        model = UNet(3)
        cut = split(model, blocks, sample=x[:2])
        made = Trainer(cut, Backprop(), train=SHORT, out=out, resume=resume, quiet=True)
        made.fit((x, y), (x, y))
        return torch.cat([t.flatten().double() for t in model.state_dict().values()])

    whole = trained(3, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (tmp_path / "part" / "summary.json").unlink()
    shutil.rmtree(checkpoint.complete(tmp_path / "part" / "checkpoints")[-1])
    assert torch.equal(trained(2, tmp_path / "part", resume=True), whole)


def test_a_mask_over_a_cut_refuses_8_bits(tmp_path):
    tokens, mask = torch.randint(9, (16, 6)), torch.ones(16, 6, dtype=torch.int64)
    blocks = split(Masked(9, 2), cuts=["layers.1"], sample=(tokens[:2], mask[:2]))
    fit = Trainer(blocks, FDG(messages="int8"), train=SHORT, out=tmp_path / "run").fit
    own = (tokens, mask, torch.zeros(16, dtype=torch.int64))
    assert "solver.messages is 'int8', which would change the integers" in refusal(fit, own, own)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("solver", [Backprop(), AugmentedLagrangian()], ids=lambda s: s.name)
def test_a_sample_is_read_once_an_epoch(solver):
    """By local steps on earlier mini-batches, too."""
    train = Counted(64)
    blocks = split(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), cuts=["2"])
    gaps = {} if solver.name == "backprop" else {"gaps": [(8, 0), (0, 8)]}
    trainer = Trainer(blocks, solver, train=SHORT, quiet=True, **gaps)
    trainer.fit(data.Mapped(train), Counted(8))
    assert len(train.read) <= 2 * 64 + 4  # and two to learn shapes by
