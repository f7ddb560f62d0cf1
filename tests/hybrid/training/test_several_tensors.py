"""A user's network: several inputs train as one, tests leave modes alone, samples are read once."""

import pytest
import torch
from samples import Counted
from torch import nn
from trainings import assert_same

from hybrid import Trainer, data, split
from hybrid.data import as_data
from hybrid.proof.samples import CANDIDATES
from hybrid.settings.config import TrainSettings
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop

WIDE, NARROW, CLASSES, BATCH = 6, 3, 4, 32


class Joined(nn.Module):
    """(N, 6) and (N, 3), one of them at the start and the other in the middle, to (N, 4)."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDE, 64), nn.Linear(NARROW, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, wide, narrow):
        x = self.wide(wide)
        for number, layer in enumerate(self.layers):
            x = x + layer(x).relu()
            if number == 1:
                x = x + self.narrow(narrow)
        return self.head(x)


class Apart(nn.Module):
    """The same of one tensor, (N, 9)."""

    def __init__(self):
        super().__init__()
        self.joined = Joined()

    def forward(self, both):
        wide, narrow = both.split([WIDE, NARROW], 1)
        return self.joined(wide.contiguous(), narrow.contiguous())


class Items:
    """A data set of dicts, of tuples, or of single tensors."""

    def __init__(self, kind, samples=4 * BATCH):
        random = torch.Generator().manual_seed(0)
        self.wide = torch.randn(samples, WIDE, generator=random)
        self.narrow = torch.randn(samples, NARROW, generator=random)
        self.labels = torch.randint(CLASSES, (samples,), generator=random)
        self.kind = kind

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        wide, narrow, label = self.wide[i], self.narrow[i], self.labels[i]
        if self.kind is dict:
            # in another order than the network's
            return {"narrow": narrow, "wide": wide, "label": label}
        return (wide, narrow, label) if self.kind is tuple else (torch.cat([wide, narrow]), label)


def trained(kind, blocks, solver, **settings):
    """The weights after two epochs."""
    torch.manual_seed(0)
    network, items = (Joined() if kind in (dict, tuple) else Apart()), Items(kind)
    data = as_data(items)
    prefix = "joined." * (kind is torch.Tensor)
    cuts = [f"{prefix}layers.{i}" for i in ((1, 2, 3) if blocks == 4 else (1,))]
    cut = split(network, cuts=cuts, sample=data.sample(BATCH)[0])
    train = TrainSettings(epochs=2, batch_size=BATCH, threads=1)
    trainer = Trainer(cut, solver, train=train, quiet=True, **settings)
    trainer.fit(items, items)
    return {k.removeprefix("joined."): t for k, t in network.state_dict().items()}


METHODS = {
    "waits": (DDG(), {"fill": AugmentedLagrangian(beta=0.1)}),
    "a window": (AugmentedLagrangian(beta=0.1), {"window": 2}),
    "ddg": (DDG(), {}),
}


@pytest.mark.parametrize(
    ("kind", "method", "blocks"),
    [*((dict, method, 4) for method in METHODS), (tuple, "waits", 2)],
)
def test_two_inputs_of_different_shapes_train_as_one_tensor_of_both(kind, method, blocks):
    solver, settings = METHODS[method]
    if method == "waits":
        settings = settings | {"local_budget": [(2, 2)] * blocks}
    found = trained(kind, blocks, solver, **settings)
    assert_same(found, trained(torch.Tensor, blocks, solver, **settings))


SHORT = TrainSettings(epochs=2, batch_size=8, threads=1)


@pytest.mark.parametrize("solver", [Backprop(), DDG()], ids=lambda s: s.name)
def test_a_sample_is_read_once_an_epoch(solver):
    """By local steps on earlier mini-batches, too."""
    train = Counted(64)
    blocks = split(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), cuts=["2"])
    local = {"fill": "augmented-lagrangian", "local_budget": [(8, 0), (0, 8)]}
    fill = {} if solver.name == "backprop" else local
    trainer = Trainer(blocks, solver, train=SHORT, quiet=True, **fill)
    trainer.fit(data.Mapped(train), Counted(8))
    assert len(train.read) <= 2 * 64 + 4 + CANDIDATES + 4  # to learn shapes by, and for the proof
