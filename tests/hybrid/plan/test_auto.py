"""`--solver auto` takes what a plan for these ranks recommends, and says so."""

import json

import pytest
import tomllib
from answers import output, refusal

from hybrid.links import Network
from hybrid.plan import auto
from hybrid.plan.prediction import best
from hybrid.settings.resolve import load

TINY = "--epochs 1 --batch-size 32 --set data.limit=128 --set train.threads=1"


def method(folder):
    return tomllib.loads((folder / "config.toml").read_text())["solver"]["name"]


@pytest.mark.parametrize("by_file", [False, True])
def test_a_run_says_what_it_took_keeps_it_and_goes_on_with_it(hybrid, tmp_path, by_file):
    run, file = tmp_path / "run", tmp_path / "auto.toml"
    file.write_text('[solver]\nname = "auto"\n[rounds]\nmemory_gb = 1.0\n')
    asked = (file,) if by_file else ("--solver", "auto")
    status, _, err = hybrid("train", *asked, *f"--blocks 2 {TINY} --out".split(), run)
    assert status == 0, err
    line = next(line for line in err.splitlines() if " ranks" in line)
    took = method(run)
    assert f"auto: {took}" in line
    output(hybrid("train", *asked, *["--resume", "--epochs", "2", "--out"], run))
    assert method(run) == took


@pytest.mark.parametrize("key", ["solver.beta", "rounds.fill", "correction.micro_batches"])
def test_settings_that_it_chooses_are_refused(key, tmp_path):
    with pytest.raises(ValueError, match=f"{key} is 1, but --solver auto chooses it"):
        auto.settings(None, {"solver.name": "auto", key: 1})
    section, _, name = key.partition(".")
    (tmp_path / "a.toml").write_text(f"[{section}]\n{name} = 1\n")
    with pytest.raises(ValueError, match=rf"{key} is 1 in .*a\.toml, but --solver auto"):
        auto.settings(tmp_path / "a.toml", {"solver.name": "auto"})


def test_a_balance_that_it_knows_nothing_of_is_refused():
    with pytest.raises(ValueError, match=r"split\.balance is 'even'"):
        auto.settings(None, {"solver.name": "auto", "split.balance": "even"})


def on_a_slow_network(**given):
    """The settings, and those that are chosen for them where messages take long."""
    asked = {"solver.name": "auto", "data.limit": 256, "train.threads": 1, **given}
    found = auto.settings(None, asked)
    made = auto.chosen(found, Network(1e5), lambda text: None)
    return load(None, asked | made)


def test_the_grid_is_chosen_too_unless_it_is_asked_for():
    """Gradients are less than a large mini-batch's activations, and more than a small one's."""
    for batch, grid in ((128, (1, 2)), (8, (2, 1))):
        split = on_a_slow_network(**{"train.batch_size": batch}).split
        assert (split.blocks, split.replicas) == grid
    split = on_a_slow_network(**{"train.batch_size": 128, "split.blocks": 2}).split
    assert (split.blocks, split.replicas) == (2, 1)


def test_a_strategy_that_is_asked_for_has_replicas_and_stays_as_it_is():
    asked = {"train.batch_size": 8, "sync.name": "local-sgd", "sync.steps": 2}
    made = on_a_slow_network(**asked)
    assert (made.split.blocks, made.split.replicas) == (1, 2)
    assert made.sync.items() >= {"name": "local-sgd", "steps": 2}.items()
    made = on_a_slow_network(**{"train.batch_size": 8, "sync.messages": "bfloat16"})
    assert made.sync["messages"] == "bfloat16"


def test_a_strategy_that_nothing_can_have_is_refused():
    asked = {"train.precision": "float16", "sync.name": "local-sgd"}
    assert "train.precision is 'float16'" in refusal(on_a_slow_network, **asked)


def test_replicas_that_are_chosen_train_as_they_are(hybrid, tmp_path):
    slow = ["links.kind=virtual", "links.gigabits_per_second=0.001", "data.limit=256"]
    flags = [word for text in (*slow, "train.threads=1") for word in ("--set", text)]
    words = ("train", "--solver", "auto", "--epochs", 1, "--batch-size", 256, *flags)
    status, _, err = hybrid(*words, "--out", tmp_path / "run")
    assert status == 0, err
    assert "auto: planning for 2 ranks" in err
    assert "on 2 ranks (--blocks 1 --replicas 2)" in err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["blocks"], summary["replicas"]) == (1, 2)


def test_the_users_cuts_are_what_is_planned(monkeypatch):
    planned = []

    def seen(predictions):
        planned.extend(predictions)
        return best(predictions)

    monkeypatch.setattr(auto, "best", seen)
    given = {"solver.name": "auto", "split.cuts": ["layer3.0"], "data.limit": 128}
    settings = auto.settings(None, given)
    found = auto.chosen(settings, auto.network(settings), lambda text: None)
    assert found["split.cuts"] == ["layer3.0"]
    assert {tuple(p.cuts) for p in planned} == {("layer3.0",)}
