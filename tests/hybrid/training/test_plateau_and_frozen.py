"""A rate that follows a tested metric, and parameters that are frozen for some epochs."""

import json

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from trainings import (
    BATCH,
    assert_same,
    digits,
    interrupted,
    layer_wise,
    lines,
    network,
    newest,
    refused,
    trained_weights,
    trainer_of,
    weights,
)

from hybrid import Callback
from hybrid.data.sampling import epoch_order
from hybrid.solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    LocalUpdates,
    Penalty,
)
from hybrid_auxnet import AuxNet

STEPS, EPOCHS = 3, 4
CONSTANT = {"name": "constant", "warmup_epochs": 0}
FALLS = {"patience": 0, "factor": 0.5, "threshold": 0.3}


@pytest.fixture(scope="module")
def few():
    return digits(STEPS)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def made(blocks=2, solver=None, make=sgd, schedule=CONSTANT, train=None, model=None, **more):
    model = model or network("plain")
    optimizer = make(model) if make else "sgd"
    schedule = schedule(optimizer) if callable(schedule) else schedule
    given = {"sample": torch.zeros(4, 1, 8, 8), "optimizer": optimizer, "schedule": schedule}
    train = {"epochs": EPOCHS, **(train or {})}
    return trainer_of(model, solver or Backprop(), blocks, train=train, **given, **more)


def by_hand(few, make=sgd, plateau=None, warm_up=0, frozen=None, model=None):
    """A plain loop that tests after every epoch, and sets requires_grad before it."""
    torch.set_num_threads(1)
    train, test = few
    model = model or network("plain")
    optimizer = make(model)
    scheduler = plateau and plateau(optimizer)
    for epoch in range(EPOCHS):
        for name, p in model.named_parameters():
            p.requires_grad_(
                not any(name.startswith(k) and epoch < n for k, n in frozen.items())
                if frozen
                else p.requires_grad
            )
        model.train()
        for i, ids in enumerate(epoch_order(0, epoch, len(train)).split(BATCH)):
            nn.functional.cross_entropy(
                model(train.batch(ids, 0, epoch)), train.labels[ids]
            ).backward()
            levels = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= min(1, (epoch * STEPS + i + 1) / warm_up) if warm_up else 1
            optimizer.step()
            for group, level in zip(optimizer.param_groups, levels, strict=True):
                group["lr"] = level
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            images = test.batch(torch.arange(len(test)), 0, 0, augment=False)
            loss = nn.functional.cross_entropy(model(images), test.labels)
        if scheduler:
            scheduler.step(loss.item())
    return dict(model.state_dict()), [group["lr"] for group in optimizer.param_groups]


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, **FALLS)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_plateau_equals_a_plain_loop_that_tests(blocks, few):
    expected, rates = by_hand(few, layer_wise, plateau)
    assert 0 < rates[0] < 3e-3  # it has fallen
    assert_same(trained_weights(made(blocks, make=layer_wise, schedule=plateau), few), expected)
    named = {"name": "plateau", "arguments": FALLS}
    assert_same(trained_weights(made(blocks, make=layer_wise, schedule=named), few), expected)


def test_a_plateau_by_name_warms_up_first_and_goes_on_after_a_resume(few, tmp_path):
    named = {"name": "plateau", "arguments": FALLS, "warmup_steps": 4}
    run = tmp_path / "run"
    made(schedule=named, out=run).fit(*few)
    expected, _ = by_hand(few, sgd, plateau, warm_up=4)
    assert_same(weights(run), expected)
    rates = [line["learning_rate"] for line in lines(run) if "learning_rate" in line]
    interrupted(run, after=2)
    kept = json.loads((newest(run) / "manifest.json").read_text())["shared"]["schedule"]
    assert [step for step, _ in kept["tests"]] == [3, 6]
    made(schedule=named, out=run, resume=True).fit(*few)
    assert_same(weights(run), expected)
    assert [line["learning_rate"] for line in lines(run) if "learning_rate" in line] == rates


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"name": "plateau", "metric": "acuracy"}, "did you mean 'accuracy'?"),
        ({"name": "plateau", "arguments": {"factor": 1.5}}, "Factor should be < 1.0"),
        (lambda optimizer: (plateau(optimizer), "F1"), "unknown metric 'F1'"),
    ],
)
def test_a_plateau_that_cannot_be_is_one_line(schedule, said, few):
    assert said in refused(made(schedule=schedule), few)


FROZEN = {"1": 2, "5.bias": EPOCHS}


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("make", [sgd, layer_wise])
def test_what_is_frozen_for_some_epochs_is_as_requires_grad_in_a_plain_loop(blocks, make, few):
    one = made(blocks, make=make, train={"frozen": FROZEN})
    found = trained_weights(one, few)
    assert_same(found, by_hand(few, make, frozen=FROZEN)[0])
    assert torch.equal(found["5.bias"], network("plain")[5].bias)
    assert all(p.requires_grad for p in one.blocks.model.parameters())


WAYS = [
    *((Backprop(clip_norm=0.1), 2), (DDG(), 2), (FDG(), 1), (LocalUpdates(), 1), (Penalty(), 1)),
    *((AugmentedLagrangian(), 2), (BlockADMM(rho=0.1), 1), (AuxNet(), 1)),
]


@pytest.mark.parametrize(("solver", "replicas"), WAYS, ids=lambda value: str(value)[:9])
def test_every_method_keeps_what_is_frozen_and_goes_on(solver, replicas, few, tmp_path):
    model = network("plain")
    model[3].bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = {"solver": solver, "make": None, "out": tmp_path, "replicas": replicas}
    given |= {"train": {"frozen": {"1": 1, "5": 3}, "epochs": 2, "ema": 0.5}}
    made(model=model, **given).fit(*few)
    expected = weights(tmp_path)
    fixed = {name for name, w in expected.items() if torch.equal(w, before[name])}
    assert fixed == {"3.bias", "5.weight", "5.bias"}
    interrupted(tmp_path, after=1)
    first = weights(tmp_path)
    assert torch.equal(first["1.weight"], before["1.weight"])
    again = network("plain")
    again[3].bias.requires_grad_(False)
    made(model=again, resume=True, **given).fit(*few)
    assert_same(weights(tmp_path), expected)


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (["1.wieght"], "train.frozen: unknown parameter '1.wieght'; did you mean '1.weight'?"),
        (["1", "3", "5"], "leaves no parameter to train in the first epoch"),
        ({"1": -1}, "1 is frozen for -1 epochs"),
    ],
)
def test_a_name_that_cannot_be_frozen_is_one_line(frozen, said, few):
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        made(train={"frozen": frozen}).fit(*few)
    assert said in str(caught.value)


def test_a_callback_that_freezes_is_refused_with_the_remedy(few):
    class Thawing(Callback):
        def on_epoch(self, epoch, results):
            model[5].weight.requires_grad_(False)

    model = network("plain")
    one = made(model=model, callbacks=[Thawing()])
    assert "requires_grad of 5.weight was set to False while the training ran" in refused(one, few)
