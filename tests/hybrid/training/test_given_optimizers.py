"""Optimizers and schedulers that a user has as objects, against the plain loop that has them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from trainings import (
    BATCH,
    assert_same,
    digests,
    digits,
    layer_wise,
    network,
    refused,
    trained_weights,
    trainer_of,
)

from hybrid.data.sampling import epoch_order
from hybrid.solvers import Backprop

EPOCHS, STEPS = 2, 3


@pytest.fixture(scope="module")
def few():
    return digits(STEPS)


def sgd(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "lr": 0.3}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def lambdas(optimizer):
    shapes = [lambda step, i=i: (step + 1) / (step + 2 + i) for i in range(6)]
    return lr_scheduler.LambdaLR(optimizer, shapes[: len(optimizer.param_groups)])


def in_sequence(optimizer):
    first = lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2)
    then = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[2])


def chained(optimizer):
    both = lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.ConstantLR(optimizer, 0.5, 1)
    return lr_scheduler.ChainedScheduler(both, optimizer=optimizer)


def one_cycle(optimizer):
    """Six steps, with a rate of its own for each group; it moves momenta, too."""
    peaks = [0.01 * (i + 1) for i in range(len(optimizer.param_groups))]
    return lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=6)


def by_hand(few, make, schedule=None, interval="step", model=None):
    """A plain loop, with what torch's users write in it."""
    torch.set_num_threads(1)
    train, _ = few
    model = (model or network("plain")).train()
    optimizer = make(model)
    scheduler = schedule(optimizer) if schedule else None
    for epoch in range(EPOCHS):
        for ids in epoch_order(0, epoch, len(train)).split(BATCH):
            output = model(train.batch(ids, 0, epoch))
            nn.functional.cross_entropy(output, train.labels[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler and interval == "step":
                scheduler.step()
        if scheduler and interval == "epoch":
            scheduler.step()
    return model.state_dict()


def given(make, schedule=None, interval=None, blocks=2, solver=None, **more):
    """A trainer with the same objects, which it must leave as they are."""
    model = network("plain")
    optimizer = make(model)
    wanted = {"name": "constant", "warmup_epochs": 0}
    if schedule is not None:
        wanted = schedule(optimizer) if interval is None else (schedule(optimizer), interval)
    settings = {"sample": torch.zeros(4, 1, 8, 8), "schedule": wanted, **more}
    return trainer_of(model, solver or Backprop(), blocks, optimizer=optimizer, **settings)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize(
    ("make", "schedule", "interval"),
    [
        (layer_wise, None, None),
        (layer_wise, lambdas, "step"),
        (layer_wise, one_cycle, None),
        (sgd, one_cycle, "epoch"),
        (sgd, in_sequence, "step"),
        (sgd, chained, "epoch"),
    ],
)
def test_an_optimizer_and_a_scheduler_equal_a_plain_loop(blocks, make, schedule, interval, few):
    made = given(make, schedule, interval, blocks)
    before = [dict(group) for group in made.options.optimizer.param_groups]
    found = trained_weights(made, few)
    assert_same(found, by_hand(few, make, schedule, interval or "step"))
    assert made.options.optimizer.param_groups == before
    assert not made.options.optimizer.state


def trained(out):
    """Two blocks of two replicas, of which the first is frozen for an epoch."""
    model = network("plain")
    optimizer = layer_wise(model)
    made = trainer_of(
        *(model, Backprop(), 2),
        sample=torch.zeros(4, 1, 8, 8),
        optimizer=optimizer,
        schedule=one_cycle(optimizer),
        train={"frozen": {"1": 1}},
        replicas=2,
        out=out,
    )
    made.fit(*digits(STEPS))


def test_ranks_of_mpirun_step_by_the_bits_of_threads(world, tmp_path):
    world.train(4, f"{__name__}:trained", tmp_path / "ranks")
    trained(tmp_path / "threads")
    assert digests(tmp_path / "ranks") == digests(tmp_path / "threads")


def test_a_function_of_names_and_one_of_the_optimizer_equal_a_plain_loop(few):
    def factory(named_parameters):
        groups = [
            {"params": [p], "lr": 0.1 * 0.5 ** int(n.partition(".")[0])}
            for n, p in named_parameters
        ]
        return torch.optim.SGD(groups, lr=0.1)

    def cosine(optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)

    expected = by_hand(few, lambda m: factory([*m.named_parameters()]), cosine)
    made = given(lambda model: factory, lambda factory: cosine, "step", blocks=3)
    assert_same(trained_weights(made, few), expected)


class WithPooler(nn.Module):
    """As models of Hugging Face are: what a task does not need is there, or computed for nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.encoder = nn.Linear(64, 16), nn.Linear(16, 16)
        self.pooler, self.spare, self.head = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.encoder(self.embed(x.flatten(1)).relu()).relu()
        self.pooler(x)
        return self.head(x)[:, :10]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("way", ["object", "settings", "replicas"])
def test_parameters_without_a_gradient_do_not_decay(blocks, way, few):
    model = WithPooler()
    chosen = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    settings = {"name": "AdamW", "lr": 0.01, "weight_decay": 0.5, "decay_all": True}
    made = trainer_of(
        *(model, Backprop(), blocks),
        sample=torch.zeros(4, 1, 8, 8),
        optimizer=settings if way == "settings" else chosen,
        schedule={"name": "constant", "warmup_epochs": 0},
        replicas=2 if way == "replicas" else 1,
    )
    found = trained_weights(made, few)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)

    expected = by_hand(few, adamw, model=WithPooler())
    unused = {name for name in expected if name.startswith(("pooler", "spare"))}
    for name in unused if way == "replicas" else expected:
        assert torch.equal(found[name], expected[name]), name
        assert torch.equal(found[name], WithPooler().state_dict()[name]) == (name in unused)


def trained_already(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def stepped_scheduler(optimizer):
    scheduler = lambdas(optimizer)
    optimizer.step()
    scheduler.step()
    return scheduler


@pytest.mark.parametrize(
    ("make", "schedule", "interval", "said"),
    [
        (trained_already, None, None, "the optimizer, SGD, has made steps"),
        (
            lambda m: torch.optim.SGD([*m.parameters()][1:], 0.1),
            *(None, None),
            "lacks 1 parameters of the model that require gradients, the first 1.weight: add them",
        ),
        (
            lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(7))], 0.1),
            *(None, None),
            "has 1 parameters that are not the model's, the first of shape (7,)",
        ),
        (lambda m: torch.optim.LBFGS(m.parameters()), None, None, "blocks have no closure"),
        (lambda m: torch.optim.SGD(m.parameters(), 0.0), None, None, "learning rates 0.0"),
        (sgd, lambdas, None, "schedule is a LambdaLR, which may step after every mini-batch"),
        (sgd, lambdas, "day", "schedule has a LambdaLR and 'day'; choose 'step' or 'epoch'"),
        (sgd, lambda o: lambdas(sgd(network("plain"))), "step", "does not train here"),
        (sgd, stepped_scheduler, "step", "has made 1 steps"),
        (
            sgd,
            partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3),
            None,
            "OneCycleLR that does not last for 2 epochs of 3 steps: Tried to step",
        ),
        (
            lambda m: lambdas(sgd(m)).optimizer,
            *(None, None),
            "a scheduler was made on the optimizer, SGD, and schedule= is another",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_what_cannot_be_is_one_line(make, schedule, interval, said, few):
    assert said in refused(given(make, schedule, interval), few)
