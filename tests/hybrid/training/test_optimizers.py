"""Trainings with other optimizers, schedules and averages: resumed, and on any blocks."""

from functools import partial

import pytest
import torch
from problems import trained_by_hand
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainings import (
    BATCH,
    assert_same,
    digits,
    interrupted,
    network,
    refused,
    trained_weights,
    trainer,
)

from hybrid.data.sampling import epoch_order
from hybrid.settings.config import OptimizerSettings, ScheduleSettings
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.optimizers import muon
from hybrid.solvers.optimizers.muon import orthogonalize
from hybrid.training import build, restore, run_settings

CONSTANT = ScheduleSettings(name="constant", warmup_epochs=0)


@pytest.fixture(scope="module")
def few():
    return digits(3)


def settings_of(name, arguments):
    return OptimizerSettings(name=name, lr=0.01, arguments=arguments)


def test_a_run_goes_on_with_the_slots_of_its_own_optimizer_alone(few, tmp_path):
    run = tmp_path / "run"
    trainer(Backprop(), run, optimizer=settings_of("Adam", {}), model="plain").fit(*few)
    interrupted(run, after=1)
    given = {"optimizer": settings_of("Adam", {"amsgrad": True}), "model": "plain"}
    said = refused(trainer(Backprop(), run, resume=True, **given), few)
    assert "Adam keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step: resume with" in said


def by_hand(few, optimizer, rate, epochs=2, ema=None):
    """A plain loop, and the average of its weights."""
    torch.set_num_threads(1)
    train, _ = few
    model = network("plain").to(memory_format=torch.channels_last)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema or 0.0))

    def steps():
        for step in range(epochs * 3):
            ids = epoch_order(0, step // 3, len(train)).split(BATCH)[step % 3]
            yield train.batch(ids, 0, step // 3), train.labels[ids], rate(step)

    update = partial(average.update_parameters, model)
    trained_by_hand(model, steps(), None, optimizer=optimizer, after_step=update)
    return (average.module if ema else model).state_dict()


class Tallying(torch.optim.SGD):
    """Counts its steps where no checkpoint looks."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["tally"] = group.get("tally", 0) + 1


def test_what_a_run_folder_could_not_keep_is_refused_at_the_start(few, tmp_path):
    def factory(groups):
        return Tallying([{**group, "tally": 0} for group in groups], lr=0.1)

    given = {"optimizer": factory, "model": "plain"}
    said = refused(trainer(Backprop(), tmp_path / "run", **given), few)
    assert "Tallying changes 'tally' of a parameter group" in said
    trainer(Backprop(), **given).fit(*few)


AVERAGED = {"schedule": CONSTANT, "train": {"ema": 0.8}, "model": "plain"}


def test_the_model_ends_with_the_average_of_a_plain_loop(few):
    def sgd(groups):
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    expected = by_hand(few, sgd, lambda step: 0.1, ema=0.8)
    made = trainer(Backprop(), **AVERAGED)
    assert_same(trained_weights(made, few), expected)


def test_the_command_tests_evaluates_and_exports_the_average(tmp_path):
    given = {
        "train.ema": 0.5,
        "train.epochs": 1,
        "train.batch_size": 32,
        "train.threads": 1,
        "data.limit": 64,
        "solver.name": "backprop",
        "model.name": "resnet8",
    }
    config = run_settings.read_settings(None, given)
    loaded = build.load_rank_data(config)
    made = build.build_trainer(config, loaded, tmp_path / "run", False)
    made.options.quiet = True
    tested = made.fit(*loaded)["test_accuracy"]
    assert restore.evaluate(tmp_path / "run")[0]["test"]["accuracy"] == tested
    assert_same(
        restore.restore(tmp_path / "run")[2].state_dict(),
        dict(made.blocks.model.state_dict()),
    )


MUON = OptimizerSettings(name="muon", lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_divide_muons_products_with_the_same_bits(replicas, few, monkeypatch):
    computed = []

    def counted(matrix, *arguments):
        computed.append(matrix.shape)
        return orthogonalize(matrix, *arguments)

    monkeypatch.setattr(muon, "orthogonalize", counted)
    found, counts = [], []
    for sharded in (False, True, None):
        given = {"optimizer": MUON.model_copy(update={"sharded": sharded}), "model": "resnet8"}
        made = trainer(DDG(micro_batches=2), blocks=2, replicas=replicas, **given)
        found.append(trained_weights(made, few))
        counts.append(len(computed))
        computed.clear()
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    assert counts[0] == replicas * counts[1]
    assert counts[2] == counts[1]  # on images so small they take more than 3 %
