"""A validation set decides which weights are best; the test set is measured once, at the end."""

import json

import pytest
import torch
from answers import assert_one_line, output, refusal
from callback_program import STILL, Recorder, short, short_data
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from trainings import assert_same, digits, interrupted, lines, newest, summary

from hybrid import data
from hybrid.data import Stream, hold_out
from hybrid.data.mapped import Mapped
from hybrid.folder import checkpoint
from hybrid.solvers import DDG
from hybrid.training.callbacks.base import EarlyStopping

X, Y = torch.arange(40.0)[:, None], torch.arange(40) % 4
KINDS = {
    "images": lambda: digits()[0].take(40),
    "pairs": lambda: Mapped(TensorDataset(X, Y)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_is_drawn_by_the_seed_and_leaves_the_rest(kind):
    whole = KINDS[kind]()

    def held(seed):
        train, validation = hold_out(whole, 0.25, seed)
        rows = []
        for part in (train, validation):
            rows.append(part.batch(torch.arange(len(part)), 0, 0, False).flatten(1))
            part.close()
        return rows

    rest, some = held(0)
    assert (len(rest), len(some)) == (30, 10)
    everything = whole.batch(torch.arange(40), 0, 0, False).flatten(1)
    whole.close()
    both = torch.cat((rest, some))
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, everything.tolist()))
    assert all(map(torch.equal, held(0), (rest, some)))
    assert not torch.equal(held(1)[1], some)


def weighted():
    loader = DataLoader(TensorDataset(X, Y), 4, sampler=WeightedRandomSampler([1.0] * 40, 40))
    return data.as_data(loader)


@pytest.mark.parametrize(
    ("make", "share", "said"),
    [
        (
            lambda: Stream(list(zip(X, Y, strict=True)), 40),
            0.1,
            "decides the order of all samples",
        ),
        (weighted, 0.1, "give a validation set, or a DataLoader with shuffle=True"),
        (
            KINDS["images"],
            0.01,
            "leaves 0 to validate on and 40 to train on: choose a share from 0.025",
        ),
        (KINDS["images"], float("inf"), "the validation share is inf of 40 training samples"),
        (KINDS["images"], 0.99, "leaves 40 to validate on and 0 to train on"),
    ],
)
def test_a_share_that_cannot_be_is_one_line(make, share, said):
    assert said in refusal(hold_out, make(), share, 0)


class Odd:
    """A metric with given values, evaluation by evaluation."""

    def __init__(self, *values):
        self.values, self.count, self.samples = values or (0.3, 0.2, 0.1, 0.3, 0.4, 0.5), 0, 0

    def reset(self):
        self.samples = 0

    def update(self, output, targets):
        self.samples += len(targets)

    def compute(self):
        self.count += self.samples > 2  # of which a trial has no more
        return self.values[(self.count - 1) % len(self.values)]


FOLLOWED = {"metric": "odd", "metric_mode": "min"}
BEST = {"keep_last": 1, "best": True}


def validated(out, blocks=2, replicas=1, callbacks=(), metric=None, epochs=6, train=(), **settings):
    train = {"early_stop": 3, **FOLLOWED, **dict(train)}
    metrics = {"accuracy": lambda out, y: out.argmax(1) == y, "odd": metric or Odd()}
    given = {"checkpoint": BEST, "metrics": metrics, "replicas": replicas, **settings}
    return short([*callbacks], out, epochs, blocks, train=train, **given)


@pytest.mark.parametrize(("blocks", "replicas"), [(1, 1), (2, 1), (2, 2), (1, 3)])
def test_the_test_set_is_measured_once_on_the_best_weights(blocks, replicas, tmp_path):
    told, (train, test) = Recorder(), short_data()
    made = validated(
        tmp_path,
        blocks,
        replicas,
        [told],
        solver=DDG(),
        sync="local-sgd" if replicas == 3 else "all-reduce",
    )
    found = made.fit(train, test, validation=0.25)
    assert found == summary(tmp_path)
    phases = [line for line in lines(tmp_path) if line["phase"] in ("validation", "test")]
    assert [(line["phase"], line["epoch"]) for line in phases] == [
        *(("validation", epoch) for epoch in range(1, 7)),
        ("test", 6),
    ]
    assert (found["selected_on"], found["selected_by"], found["selected_epoch"]) == (
        *("validation", "odd"),
        3,
    )
    assert found["epochs"] == 6
    assert "stopped_early" not in found
    results = [results for _, results in told.of("on_epoch")]
    assert all("validation_accuracy" in one and "test_accuracy" not in one for one in results)
    assert found["validation_loss"] == phases[2]["validation_loss"] == results[2]["validation_loss"]
    assert found["test_loss"] == phases[6]["test_loss"]
    assert phases[6]["selected_epoch"] == 3
    assert "after epoch 3, selected by the validation set&#39;s odd" in found._repr_html_()
    # the weights that were tested stay in the network, and are those of the best checkpoint
    again = made.evaluate(test)
    assert again["loss"] == pytest.approx(found["test_loss"], rel=1e-6)  # in other mini-batches
    best, last = checkpoint.complete(tmp_path / "checkpoints")
    held = checkpoint.load_model(best, checkpoint.read_manifest(best))
    assert_same(dict(made.blocks.model.state_dict()), held)
    assert last == newest(tmp_path)


def test_a_resumed_run_stops_and_selects_as_an_undisturbed_one(tmp_path):
    kept = {"checkpoint": {"keep_last": 9, "best": True}, "epochs": 9}
    values = (0.3, float("nan"), 0.1, 0.1, 0.4, 0.5, 0.05)
    keys = ("epochs", "stopped_early", "selected_epoch", "test_loss", "validation_odd")
    whole = validated(tmp_path, metric=Odd(*values), **kept).fit(*short_data(), validation=0.25)
    assert whole["stopped_early"] == (
        "train.early_stop: no better validation odd than 0.1 (epoch 3) up to epoch 6"
    )
    assert whole["selected_epoch"] == 3
    for after in (2, 4, 6):
        interrupted(tmp_path, after)
        rest = Odd(*values[after:], *values[:after])
        again = validated(tmp_path, metric=rest, resume=True, **kept).fit(
            *short_data(), validation=0.25
        )
        assert [again[key] for key in keys] == [whole[key] for key in keys]
    # it has ended, and its selected weights are given again
    made = validated(tmp_path, metric=Odd(*values), resume=True, **kept)
    assert made.fit(*short_data(), validation=0.25) == again
    assert made.evaluate(short_data()[1])["loss"] == pytest.approx(whole["test_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"metric": "acuracy"}, "train.metric: unknown metric 'acuracy'; did you mean 'accuracy'?"),
        (
            {"metric": "odd", "metric_mode": None},
            "train.metric is 'odd', a metric of your own: set train.metric_mode",
        ),
        (
            {"metric": "odd", "early_stop": 0},
            "train.metric is 'odd', which has an effect only where train.early_stop",
        ),
        (
            {"metric": "", "metric_mode": "max", "early_stop": 0},
            "train.metric_mode is 'max', which has an effect",
        ),
    ],
)
def test_a_metric_that_cannot_be_followed_is_one_line(train, said, tmp_path):
    given = {"train": train, "checkpoint": {"keep_last": 1}}
    assert said in refusal(validated(tmp_path / "run", **given).fit, *short_data(), None, 0.25)
    assert not (tmp_path / "run").exists()


NAN = float("nan")


def test_what_was_best_by_another_metric_says_nothing_after_a_resume():
    stopping = EarlyStopping(2, "test")
    for epoch, accuracy in enumerate((0.9, 0.5, 0.5), 1):
        stopping.on_epoch(epoch, {"test_accuracy": accuracy, "test_loss": 1.0})
    assert stopping.reason == "no better test accuracy than 0.9 (epoch 1) up to epoch 3"
    for on in ("validation", "training"):
        other = EarlyStopping(2, on)
        other.load_state(json.loads(json.dumps(stopping.state())))
        assert (other.reason, other.value, other.epoch) == ("", None, 3)


def test_a_run_that_selects_on_the_test_set_says_so(capsys):
    made = short([], epochs=9, train={"early_stop": 2}, optimizer=STILL)
    made.options.quiet = False
    found = made.fit(*short_data())
    assert (found["selected_on"], found["selected_by"]) == ("test", "accuracy")
    assert (
        "selected on the test set, by accuracy, so its figures are optimistic"
        in capsys.readouterr().out
    )
    found = short([], epochs=1).fit(*short_data())
    assert (found["selected_on"], found["selected_by"], found["selected_epoch"]) == ("", "", 1)


def test_another_share_or_fewer_epochs_are_refused_in_a_resume(tmp_path):
    short([], tmp_path, epochs=3).fit(*short_data(), validation=0.25)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}

    def resumed(epochs, share):
        return short([], tmp_path, epochs=epochs, resume=True), (*short_data(), None, share)

    made, given = resumed(4, 0.27)
    assert "is a run with samples 120, not 117" in refusal(made.fit, *given)
    made, given = resumed(2, 0.25)
    assert f"train.epochs is 2, but {tmp_path} has trained 3 epochs: give --epochs 3" in refusal(
        made.fit, *given
    )
    assert before == {path: path.read_bytes() for path in before}


FLAGS = (
    "train",
    "--epochs",
    "2",
    "--set",
    "data.limit=80",
    "--batch-size",
    "16",
    "--set",
    "train.threads=1",
)
SHARE = ("--set", "data.validation=0.2", "--set", "checkpoint.best=true")


@pytest.mark.parametrize("grid", [("--blocks", "2"), ("--replicas", "2", "--blocks", "1")])
def test_all_launchers_hold_out_the_same_samples(grid, world, hybrid, tmp_path):
    ranks, threads = tmp_path / "ranks", tmp_path / "threads"
    words = (*FLAGS, *SHARE, "--solver", "backprop", *grid)
    output(world.hybrid(2, *words, "--out", ranks))
    said = output(hybrid(*words, "--out", threads))
    assert "  with the weights after epoch " in said
    keys = ("validation_loss", "test_loss", "selected_epoch", "selected_on")
    assert [summary(ranks)[key] for key in keys] == [summary(threads)[key] for key in keys]
    manifest = checkpoint.read_manifest(newest(ranks))
    assert (manifest["samples"], manifest["tested_on"]) == (64, "validation")
    told = summary(tmp_path / "threads")
    first, second = output(hybrid("evaluate", tmp_path / "threads", "--best")).splitlines()
    assert first.startswith(f"validation accuracy {told['validation_accuracy']:.2%}")
    assert second.startswith(f"test accuracy {told['test_accuracy']:.2%}")


OWN = """
import torch
from torch import nn
X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
def data():
    whole = (X, (X.sum(1) > 0).long())
    train, validation, test = zip(*(t.split([32, 8, 8]) for t in whole))
    return train, validation, test
"""


def test_a_function_may_give_a_validation_set(hybrid, tmp_path, monkeypatch):
    (tmp_path / "validated.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    named = ("--model", "validated:network", "--data", "validated:data")
    words = ("train", *named, "--batch-size", "8", "--epochs", "1", "--out", "run")
    output(hybrid(*words))
    told = summary(tmp_path / "run")
    said = output(hybrid("evaluate", "run", *named))
    assert f"validation accuracy {told['validation_accuracy']:.2%}" in said
    assert f"test accuracy {told['test_accuracy']:.2%}" in said
    refused = hybrid(*words[:-1], "other", "--set", "data.validation=0.1")
    assert_one_line(
        refused, "data.validation is 0.1, but validated:data gives validation data of its own"
    )


def test_a_test_set_that_is_not_finite_costs_its_figures_alone(tmp_path, capsys):
    (train, test), run = short_data(), tmp_path / "run"
    bad = TensorDataset(test.batch(torch.arange(8), 0, 0, False) * 3e38, torch.zeros(8).long())
    found = short([], out=run, epochs=1, quiet=False).fit(train, bad, validation=0.25)
    assert "the test loss is not finite after step " in capsys.readouterr().out
    assert (found.test_loss, found.test_accuracy) == (None, None)
    assert found.validation_loss > 0
    assert summary(run)["test_loss"] is None
