"""Trainings with other optimizers, schedules and averages: resumed, and on any blocks."""

from functools import partial

import pytest
import torch
from answers import refusal
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
from hybrid.method.optimizers import count_moments
from hybrid.settings.config import OptimizerSettings, ScheduleSettings
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.optimizers import muon
from hybrid.solvers.optimizers.muon import orthogonalize
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid.training import build, references, restore, run_settings

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


class Eight(torch.Tensor):
    """Numbers in eight bits: codes, and the scale of all."""

    def __new__(cls, codes, scale, kind):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale, kind):
        self.codes, self.scale, self.kind = codes, scale, kind

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.kind

    @classmethod
    def __tensor_unflatten__(cls, parts, kind, size, stride):
        return cls(parts["codes"], parts["scale"], kind)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of eight bits")

    def set(self, value):
        self.scale = value.abs().max().clamp(min=1e-20)
        self.codes = (value / self.scale * self.kind).round().to(torch.int8)


class EightBit(torch.optim.Optimizer):
    """A momentum in eight bits, of `levels` on either side; `levels` is no default."""

    def __init__(self, params, lr=0.1, weight_decay=0.0, levels=127, counts=False):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.levels, self.counts = levels, counts

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                zero = torch.zeros_like(p, dtype=torch.int8), torch.zeros(())
                moment = self.state[p].setdefault("moment", Eight(*zero, self.levels))
                moment.set(moment.codes * moment.scale / moment.kind * 0.9 + p.grad)
                moment.kind += self.counts
                p -= group["lr"] * (moment.codes * moment.scale / moment.kind)
                p -= group["lr"] * group["weight_decay"] * p


class Plain(torch.optim.SGD):
    """Has no weight decay of its own, and hides an argument."""

    def __init__(self, params, lr, hidden=0):
        super().__init__(params, lr=lr)
        del self.defaults["weight_decay"]


class Closed(torch.optim.SGD):
    """Needs a closure."""

    def step(self, closure):
        return super().step(closure)


def eight(**more):
    usual = {"name": f"{__name__}:EightBit", "lr": 0.05, "arguments": {"levels": 63}}
    return OptimizerSettings(**{**usual, **more})


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_class_by_its_module_steps_as_in_a_plain_loop_and_goes_on_with_its_codes(
    blocks, few, tmp_path
):
    def made(params):
        return EightBit(params, lr=0.05, levels=63)

    given = {"schedule": CONSTANT, "model": "plain", "blocks": blocks, "optimizer": eight()}
    expected = by_hand(few, made, lambda step: 0.05)
    run = tmp_path / "run"
    assert_same(trained_weights(trainer(Backprop(), run, **given), few), expected)
    interrupted(run, after=1)
    assert_same(trained_weights(trainer(Backprop(), run, resume=True, **given), few), expected)
    interrupted(run, after=1)
    other = {**given, "blocks": 3 - blocks}
    assert_same(trained_weights(trainer(Backprop(), run, resume=True, **other), few), expected)
    interrupted(run, after=1)
    given["optimizer"] = settings_of("SGD", {})
    said = refused(trainer(Backprop(), run, resume=True, **given), few)
    assert "holds moment.codes, moment.scale of" in said


def test_the_delayed_gradients_of_a_class_by_its_module_go_on_with_the_same_bits(few, tmp_path):
    run, given = tmp_path / "run", {"model": "plain", "blocks": 2, "optimizer": eight()}
    whole = trained_weights(trainer(DDG(micro_batches=2), run, **given), few)
    interrupted(run, after=1)
    again = trainer(DDG(micro_batches=2), run, resume=True, **given)
    assert_same(trained_weights(again, few), whole)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"arguments": {"counts": True}}, "EightBit changes what its moment of a parameter have"),
        ({"arguments": {"speed": 1}}, "but its class says: EightBit.__init__() got an unexpected"),
        ({"name": f"{__name__}:Plain", "weight_decay": 0.1}, "it keeps no weight_decay among"),
        ({"name": f"{__name__}:Plain", "arguments": {"hidden": 1}}, "it keeps no hidden among its"),
        ({"name": f"{__name__}:Closed"}, "missing 1 required positional argument: 'closure'"),
        ({"name": f"{__name__}:few"}, ":few': name a class of torch.optim.Optimizer"),
        ({"name": "torch.nn:Linear"}, "optimizer.name is 'torch.nn:Linear': name a"),
        ({"name": "torch.optim:AdamV"}, "--set optimizer.name=torch.optim:AdamV: torch.optim has"),
        ({"name": "no_such_module:X"}, "no_such_module cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_class_that_cannot_step_blocks_is_refused_in_one_line(settings, said, few):
    given = {"lr": 0.1, "arguments": {}, **settings}
    assert said in refused(trainer(Backprop(), optimizer=eight(**given), model="plain"), few)


def test_replicas_that_step_apart_refuse_momenta_in_codes(few):
    given = {"optimizer": eight(), "model": "plain", "replicas": 2}
    apart = trainer(Backprop(), sync=LocalSGD(steps=2), **given)
    assert "EightBit keeps codes of a parameter" in refused(apart, few)
    trainer(Backprop(), **given).fit(*few)


def test_a_class_that_a_file_names_is_not_imported_until_the_command_line_names_it():
    file = {"optimizer": {"name": "no_such_module:X", "weight_decay": 0.1}}
    said = refusal(run_settings.read_settings, file, {})
    assert said.endswith("give --set optimizer.name=no_such_module:X on the command line to run it")
    read = run_settings.read_settings(file, {"optimizer.name": "no_such_module:X"})
    assert read.optimizer.lr == 1e-3
    assert references.reference_flags(read) == ["--set", "optimizer.name=no_such_module:X"]


def test_momenta_of_eight_bits_count_as_a_quarter():
    assert count_moments(eight()) == 0.25
    assert count_moments(OptimizerSettings(name="adamw")) == 2


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
