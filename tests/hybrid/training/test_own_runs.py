"""What a user's own network keeps through a run, a test and a resume."""

import pytest
import torch
from samples import Counted
from torch import nn

from hybrid import Trainer, TrainSettings, data, split
from hybrid.solvers import AugmentedLagrangian, Backprop

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


@pytest.mark.parametrize("solver", [Backprop(), AugmentedLagrangian()], ids=lambda s: s.name)
def test_a_sample_is_read_once_an_epoch(solver):
    """By local steps on earlier mini-batches, too."""
    train = Counted(64)
    blocks = split(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), cuts=["2"])
    gaps = {} if solver.name == "backprop" else {"gaps": [(8, 0), (0, 8)]}
    trainer = Trainer(blocks, solver, train=SHORT, quiet=True, **gaps)
    trainer.fit(data.Mapped(train), Counted(8))
    assert len(train.read) <= 2 * 64 + 4  # and two to learn shapes by
