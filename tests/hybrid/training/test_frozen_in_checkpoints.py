"""Frozen weights that checkpoints leave out: a digest in their place, and the network has them."""

from functools import partial

import pytest
import torch
from answers import assert_one_line, output, refusal
from torch import nn
from trainings import assert_same, digits, interrupted, newest, trainer_of, weights
from zoo_packages import installed

import hybrid as package
from hybrid.folder import checkpoint
from tests.hybrid.training import pretrained_program as program


def adapted(seed=0):
    """A frozen layer, one that may be frozen for a while, and a last one."""
    torch.manual_seed(seed)
    layers = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
    layers[0].requires_grad_(False)
    return nn.Sequential(nn.Flatten(), *layers)


def made(out, model=None, frozen=False, train=None, **given):
    train = {"epochs": 2, "batch_size": 8, **(train or {})}
    kept = {"keep_last": 0, **({} if frozen is None else {"frozen": frozen})}
    sample, model = torch.zeros(4, 1, 8, 8), model or adapted()
    return trainer_of(model, sample=sample, out=out, train=train, checkpoint=kept, **given)


def trained(out, *given, **more):
    trainer = made(out, *given, **more)
    trainer.fit(*digits(2))
    return dict(trainer.blocks.model.state_dict())


def test_a_setting_decides_what_a_checkpoint_has(tmp_path):
    for name, frozen in (("auto", None), ("true", True), ("false", False)):
        expected = trained(tmp_path / name, frozen=frozen)
        left_out = {"1.weight", "1.bias"} if frozen is False else set()
        assert weights(tmp_path / name).keys() == expected.keys() - left_out
        assert checkpoint.read_manifest(newest(tmp_path / name))["frozen"].keys() == left_out


def test_it_is_refused_where_nothing_is_frozen(tmp_path):
    model = adapted().requires_grad_(True)
    said = refusal(made(tmp_path / "run", model).fit, *digits(2))
    assert "checkpoint.frozen is False" in said
    assert "a parameter is frozen for the whole run" in said


@pytest.mark.parametrize(("epochs", "left_out"), [(0, 4), (2, 4), (1, 2)])
def test_what_a_setting_freezes_is_left_out_unless_it_thaws(epochs, left_out, tmp_path):
    trained(tmp_path / "run", train={"frozen": {"2": epochs}})
    manifests = map(checkpoint.read_manifest, checkpoint.complete(tmp_path / "run/checkpoints"))
    assert {len(each["frozen"]) for each in manifests} == {left_out}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("now", [True, False])
def test_a_resume_may_keep_what_was_left_out_and_leave_out_what_was_kept(before, now, tmp_path):
    expected = trained(tmp_path / "run", frozen=before, blocks=3)
    interrupted(tmp_path / "run", 1)
    assert_same(trained(tmp_path / "run", frozen=now, blocks=2, resume=True), expected)
    assert bool(checkpoint.read_manifest(newest(tmp_path / "run"))["frozen"]) != now


def test_what_was_trained_before_it_was_frozen_is_kept(tmp_path):
    expected = trained(tmp_path / "run", adapted(), train={"epochs": 1})
    again = adapted()
    again[2].requires_grad_(False)
    trained(tmp_path / "run", again, resume=True)
    found = weights(tmp_path / "run")
    assert found.keys() == expected.keys() - {"1.weight", "1.bias"}
    assert torch.equal(found["2.weight"], expected["2.weight"])
    assert not torch.equal(found["3.weight"], expected["3.weight"])


def test_another_network_is_refused_by_name(tmp_path):
    run = tmp_path / "run"
    expected = trained(run)
    interrupted(run, 1)
    line = "leaves out 2 frozen weights, of which the network has 2 other ones (1.weight, 1.bias)"
    assert line in refusal(partial(trained, run, adapted(1), resume=True))
    assert line in refusal(lambda: package.load(run, adapted(1)))
    assert line in refusal(lambda: package.export(run, tmp_path / "folder", adapted(1)))
    for target in ("folder", "file.safetensors"):
        said = refusal(lambda target=target: package.export(run, tmp_path / target))
        assert "would lack: name a folder, and give model=" in said
    assert trained(run, resume=True).keys() == expected.keys()
    assert_same(dict(package.load(run, adapted).state_dict()), expected)


@pytest.mark.skipif(not installed("transformers"), reason="needs transformers")
def test_a_file_of_weights_has_what_is_left_out(hybrid, tmp_path):
    program.make("tied").save_pretrained(tmp_path / "base")
    own = [
        f"--{x}=tests.hybrid.training.pretrained_program:{y}"
        for x, y in (("model", "frozen"), ("data", "data"), ("loss", "loss"))
    ]
    words = ("--solver=backprop", "--epochs=1", "--batch-size=4", "--set=checkpoint.frozen=false")
    words += ("--weights", tmp_path / "base", "--out", tmp_path / "run", "--blocks=2")
    output(hybrid("train", *own, *words))
    assert "transformer.wte.weight" not in weights(tmp_path / "run")
    output(hybrid("evaluate", tmp_path / "run", *own))
    output(hybrid("export", tmp_path / "run", tmp_path / "whole", own[0]))
    again = program.package("transformers").GPT2LMHeadModel.from_pretrained(tmp_path / "whole")
    base = program.make("tied")
    assert torch.equal(again.lm_head.weight, base.lm_head.weight)
    assert not torch.equal(again.transformer.ln_f.weight, base.transformer.ln_f.weight)
    (tmp_path / "base").rename(tmp_path / "gone")
    assert_one_line(hybrid("evaluate", tmp_path / "run", *own), "there is no such file or folder")
