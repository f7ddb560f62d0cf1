"""A factorization layer in a model: where it sits, and runs that train, resume and show it."""

import pytest
import torch
from answers import assert_one_line, output, refusal
from safetensors.torch import load_file
from trainings import network, summary

from hybrid import models
from hybrid.models import units
from hybrid.settings import resolve as settings

LIMIT, BATCH = 192, 48
QUICK = ("--batch-size", BATCH, "--set", "train.threads=1", "--set", f"data.limit={LIMIT}")
ADMM = ("train", "--solver", "block-admm", "--factorize", "layer3.0:8", *QUICK)


@pytest.mark.parametrize(
    ("name", "target", "unit", "channels"),
    [
        ("resnet8", "layer3.0", "layer3.factors", 32),
        ("resnet14", "layer2.1", "layer2.factors", 32),
        ("resnet8", "head", "factors", 64),
        ("preact-resnet20", "layer2.0", "layer2.factors", 16),
    ],
)
def test_the_layer_comes_before_its_unit_and_all_else_stays(name, target, unit, channels):
    plain = network(name).train()
    names = [u.name for u in units(plain)]
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    made, told = models.factorized(plain, f"{target}:5")
    assert (told, made.training) == (unit, True)
    at = names.index(target)
    assert [u.name for u in units(made)] == [*names[:at], unit, *names[at:]]
    state = made.state_dict()
    dictionary = state.pop(f"{unit}.dictionary")
    assert dictionary.shape == (5, channels)
    assert list(state) == list(before)
    assert all(torch.equal(state[key], before[key]) for key in before)
    assert made.eval()(torch.randn(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("layer9.0:4", "layer1.0, layer2.0, layer3.0, head"),
        ("stem:4", "write UNIT:RANK, as in layer3.0:16"),
        ("layer3.0:-1", "write UNIT:RANK"),
        (":4", "write UNIT:RANK"),
        ("layer3.0:0", "the rank must be at least 1"),
    ],
)
def test_a_layer_that_cannot_be_is_refused_in_one_line(wanted, said):
    found = refusal(models.factorized, network(), wanted)
    assert found.startswith(f"model.factorize is {wanted!r}; ")
    assert said in found


def test_a_run_moves_the_cut_and_evaluate_export_and_report_know_the_layer(hybrid, tmp_path):
    run = tmp_path / "run"
    output(hybrid(*ADMM, "--epochs", 1, "--out", run))
    assert summary(run)["cuts"] == ["layer3.factors"]
    assert settings.load(run / "config.toml", {}).split.cuts == ["layer3.factors"]
    out = output(hybrid("evaluate", run))
    assert out.startswith(f"test accuracy {summary(run)['test_accuracy']:.2%}")
    file = tmp_path / "model.safetensors"
    output(hybrid("export", run, file))
    exported = load_file(file)
    made, _ = models.factorized(network(), "layer3.0:8")
    start = made.state_dict()["layer3.factors.dictionary"].clone()
    made.load_state_dict(exported)
    assert not torch.equal(exported["layer3.factors.dictionary"], start)
    assert bool((exported["layer3.factors.dictionary"] >= 0).all())
    output(hybrid("report", run))
    page = (run / "report" / "index.html").read_text()
    assert "What each factor responds to (layer3.factors)" in page
    assert page.count("<svg") + page.count("data:image/png;base64,") > 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--solver", "backprop"), "only block-admm can: choose another --solver"),
        (("--set", "split.cuts=['layer2.0']"), "'layer3.factors' is a constraint on a cut"),
        (("--blocks", 1), "'layer3.factors' is a constraint on a cut"),
    ],
)
def test_what_cannot_be_trained_is_answered_in_one_line(hybrid, tmp_path, flags, said):
    assert_one_line(hybrid(*ADMM, *flags, "--out", tmp_path / "run"), said)
    assert not (tmp_path / "run").exists()
