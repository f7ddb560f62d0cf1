"""Training without a test set, and with what tokenizers and their collators give."""

import json
from collections import UserDict
from functools import partial
from pathlib import Path

import pytest
import torch
from answers import refusal
from loaders import pad
from misused import X, Y, fit, layers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from trainings import lines, stopped, trainer_of
from transformers import BatchEncoding, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from hybrid import Callback
from hybrid.data import Stream
from hybrid.data.loaders import as_data
from hybrid.settings.config import CheckpointSettings
from hybrid.training import build, restore, run_settings

OFTEN = CheckpointSettings(keep_last=0, steps=1)


class Seen(Callback):
    def __init__(self):
        self.results = []

    def on_epoch(self, epoch, results):
        self.results.append(results)


def trainer(**more):
    train = {"batch_size": 16, "report_every": 2, **more.pop("settings", {})}
    return trainer_of(layers(), blocks=2, sample=X[:4], train=train, checkpoint=OFTEN, **more)


def test_a_run_without_a_test_set_has_no_test_figures(tmp_path):
    seen, out = Seen(), tmp_path / "run"
    summary = trainer(out=out, callbacks=[seen]).fit((X, Y))
    assert [k for k in summary if k.startswith("test_")] == ["test_accuracy", "test_loss"]
    assert (summary.test_accuracy, summary.test_loss) == (None, None)
    assert json.loads((out / "summary.json").read_text())["test_accuracy"] is None
    assert not any(name.startswith("test") for results in seen.results for name in results)
    found = lines(out)
    assert {line["phase"] for line in found} == {"serial"}
    assert all(line["accuracy"] is not None for line in found), "accuracy is measured in training"
    losses = [line["loss"] for line in found if line["epoch"] == 0]
    assert seen.results[0]["epoch_loss"] == pytest.approx(sum(losses) / len(losses))


def test_early_stop_without_a_test_set_goes_by_the_training_loss(tmp_path):
    def run(resume=False):
        settings = {"epochs": 8, "early_stop": 2}
        more = {"optimizer": {"name": "sgd", "lr": 1e-12}, "resume": resume}
        return trainer(out=tmp_path / "run", settings=settings, **more).fit((X.abs() * 1e-6, Y))

    summary = run()
    assert "no better training loss than" in summary["stopped_early"]
    stopped(tmp_path / "run", 6)
    assert run(resume=True)["stopped_early"] == summary["stopped_early"]


NEEDS_A_TEST = {
    "tests": (
        {"settings": {"evaluate_every": 2}},
        *("evaluate_every is 2", "there is a validation or test set"),
    ),
    "a metric to follow": (
        {"settings": {"metric": "loss"}},
        *("train.metric is 'loss'", "there is a validation or test set"),
    ),
    "a plateau": ({"schedule": "plateau"}, "follows a validation or test set"),
    "the best test": (
        {"checkpoint": {"best": True}},
        *("checkpoint.best is True", "there is a validation or test set"),
    ),
    "a metric of tests": (
        {"metrics": {"luck": lambda out, y: out.sum(1)}},
        *("metrics has 'luck'", "measured on a validation or test set"),
    ),
}


@pytest.mark.parametrize("use", NEEDS_A_TEST)
def test_what_needs_a_test_set_is_refused_without_one(use, tmp_path):
    given, *parts = NEEDS_A_TEST[use]
    said = refusal(fit, tmp_path / "run", test=None, **given)
    assert [part for part in parts if part not in said] == []
    assert not (tmp_path / "run").exists()


def only_training():
    return X, Y


def training_and_none():
    return DataLoader([(x, int(y)) for x, y in zip(X, Y, strict=True)], 16), None


def network():
    return layers()


@pytest.mark.parametrize("function", [only_training, training_and_none])
def test_a_function_may_give_training_data_alone(function, tmp_path, monkeypatch):
    names = {"data.name": f"{__name__}:{function.__name__}", "model.name": f"{__name__}:network"}
    asked = {**names, "train.epochs": 1, "split.blocks": 2, "solver.name": "backprop"}
    asked |= {"train.batch_size": 16} if function is only_training else {}
    config = run_settings.read_settings(None, asked)
    loaded = build.load_rank_data(config)
    assert loaded[1] is None
    made = build.build_trainer(config, loaded, tmp_path / "run", False)
    made.options.quiet = True
    made.fit(*loaded)
    assert "batch_size = 16" in Path(tmp_path / "run" / "config.toml").read_text()
    given = {"model": names["model.name"], "data": names["data.name"]}
    said = refusal(restore.evaluate, tmp_path / "run", **given)
    assert "have no validation or test set" in said


TEXTS = [{"input_ids": [1] * (1 + i % 4), "label": i % 3} for i in range(16)]
FIRST, SECOND = torch.arange(4), torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("labels", "workers", "kind"),
    [(False, 0, BatchEncoding), (True, 0, BatchEncoding), (True, 1, UserDict)],
)
def test_batches_of_a_tokenizer_are_inputs_by_name_and_targets(labels, workers, kind):
    # 2 s and more with a worker
    made = DataLoader(TEXTS, 4, collate_fn=partial(pad, kind=kind), num_workers=workers)
    data = as_data(made, 0, labels)
    try:
        inputs, targets = data.sample(2)
        assert targets.tolist() == [0, 1]
        assert data.targets(FIRST).tolist() == [0, 1, 2, 0]
        if labels:
            assert list(inputs) == ["input_ids", "labels"]
            assert inputs["labels"].tolist() == [0, 1]
        else:
            assert inputs.tolist() == [[1, 0], [1, 1]]
    finally:
        data.close()


def masks():
    """A collator that draws which words to hide, of a tokenizer of three words."""
    words = Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1, "a": 2, "b": 3, "c": 4}, unk_token="a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]")
    return DataCollatorForLanguageModeling(fast, mlm_probability=0.4)


def test_what_a_collator_draws_is_the_same_on_every_rank_and_another_in_the_next_epoch():
    texts = [{"input_ids": [2, 3, 4, 2, 3][: 2 + i % 4]} for i in range(16)]
    for make in (lambda: as_data(DataLoader(texts, 4, collate_fn=masks())), stream_of(texts)):
        first, last = make(), make()
        labels = [last.targets(FIRST, 0, epoch) for epoch in (0, 1)]
        inputs = first.batch(FIRST, 0, 0)
        hidden = last.answers.unpack(labels[0]) if last.answers else labels[0]
        assert inputs.shape[0] == len(hidden) == 4
        assert torch.equal(make().targets(FIRST, 0, 1), labels[1])
        assert not torch.equal(*labels)


def stream_of(texts):
    return lambda: Stream(texts, collate=masks())
