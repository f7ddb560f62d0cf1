"""`--solver auto` takes what a plan for these ranks recommends, and says so."""

import pytest
import tomllib
from answers import output

from hybrid.plan import auto
from hybrid.plan.planner import best
from solvers import registry

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


def test_ranks_of_mpi_measure_their_network_and_agree(world, tmp_path):
    said = output(world.hybrid(2, *f"train --solver auto {TINY} --out".split(), tmp_path / "run"))
    assert said.count("run folder") == 1
    assert method(tmp_path / "run") in registry.OWN


def test_what_only_rank_0_finds_out_ends_all_ranks_with_one_line(world):
    """It alone reads data to plan with, and the others wait for its plan."""
    words = "train --solver auto --epochs 1 --set data.limit=100000"
    status, _, err = world.hybrid(3, *words.split(), limit=60)
    assert status != 0
    assert err.count("hybrid: error:") == 1
    assert "limit is 100000" in err


@pytest.mark.parametrize("key", ["solver.beta", "rounds.fill", "correction.micro_batches"])
def test_settings_that_it_chooses_are_refused(key, tmp_path):
    with pytest.raises(ValueError, match=f"{key} is 1, but --solver auto chooses it"):
        auto.settings(None, {"solver.name": "auto", key: 1})
    section, _, name = key.partition(".")
    (tmp_path / "a.toml").write_text(f"[{section}]\n{name} = 1\n")
    with pytest.raises(ValueError, match=rf"{key} is 1 in .*a\.toml, but --solver auto"):
        auto.settings(tmp_path / "a.toml", {"solver.name": "auto"})


@pytest.mark.parametrize(
    ("key", "value"), [("split.balance", "even"), ("model.factorise", "layer2.0:4")]
)
def test_settings_that_it_knows_nothing_of_are_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} is '{value}'"):
        auto.settings(None, {"solver.name": "auto", key: value})


def test_the_users_cuts_are_what_is_planned(monkeypatch):
    planned = []

    def seen(predictions):
        planned.extend(predictions)
        return best(predictions)

    monkeypatch.setattr(auto, "best", seen)
    given = {"solver.name": "auto", "split.cuts": ["layer3.0"], "data.limit": 64}
    settings = auto.settings(None, given)
    found = auto.chosen(settings, auto.network(settings), lambda text: None)
    assert found["split.cuts"] == ["layer3.0"]
    assert {tuple(p.cuts) for p in planned} == {("layer3.0",)}
