"""`--solver auto` takes what a plan for these ranks recommends, and says so."""

import pytest
import tomllib
from answers import output

from hybrid.plan import auto
from hybrid.settings.config import Config
from solvers import registry

TINY = "--epochs 1 --batch-size 32 --set data.limit=128 --set train.threads=1"


def method(folder):
    return tomllib.loads((folder / "config.toml").read_text())["solver"]["name"]


def test_a_run_says_what_it_took_keeps_it_and_goes_on_with_it(hybrid, tmp_path):
    run = tmp_path / "run"
    status, _, err = hybrid(*f"train --solver auto --blocks 2 {TINY} --out".split(), run)
    assert status == 0, err
    line = next(line for line in err.splitlines() if " ranks" in line)
    assert f"auto: {method(run)}" in line
    again = "train --solver auto --resume --epochs 2 --out"
    output(hybrid(*again.split(), run))
    assert method(run) in registry.OWN


def test_ranks_of_mpi_measure_their_network_and_agree(world, tmp_path):
    said = output(world.hybrid(2, *f"train --solver auto {TINY} --out".split(), tmp_path / "run"))
    assert said.count("run folder") == 1
    assert method(tmp_path / "run") in registry.OWN


@pytest.mark.parametrize("key", ["solver.beta", "rounds.fill", "correction.micro_batches"])
def test_settings_that_it_chooses_are_refused(key):
    with pytest.raises(ValueError, match=f"{key} is 1, but --solver auto chooses it"):
        auto.chosen(None, {"solver.name": "auto", key: 1}, lambda text: None)


def test_the_users_cuts_stay(tmp_path):
    given = {"solver.name": "auto", "split.cuts": ["layer2.0"], "data.limit": 64}
    found = auto.chosen(None, given, lambda text: None)
    assert found["split.cuts"] == ["layer2.0"]
    assert found["solver.name"] != "auto"
    assert Config().solver["name"] == registry.DEFAULT
