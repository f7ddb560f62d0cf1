"""Plans on the ranks of MPI, and what two ranks then do."""

import json

import tomllib
from answers import output
from small_networks import SECONDS, sleeping

from hybrid.bench.recipes import Recipe
from hybrid.data import load as load_data
from hybrid.links import Network
from hybrid.networks.partition import split
from hybrid.plan.planner import Planner
from hybrid.settings.resolve import load
from hybrid.solvers import Backprop, registry

TINY = "--epochs 1 --batch-size 32 --set data.limit=128 --set train.threads=1"


def test_ranks_of_mpi_measure_their_network_and_agree(world, tmp_path):
    said = output(world.hybrid(2, *f"train --solver auto {TINY} --out".split(), tmp_path / "run"))
    assert said.count("run folder") == 1
    chosen = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert chosen["solver"]["name"] in registry.OWN


def test_what_only_rank_0_finds_out_ends_all_ranks_with_one_line(world):
    """It alone reads data to plan with, and the others wait for its plan."""
    words = "train --solver auto --epochs 1 --set data.limit=100000"
    status, _, err = world.hybrid(3, *words.split(), limit=60)
    assert status != 0
    assert err.count("hybrid: error:") == 1
    assert "limit is 100000" in err


def test_the_prediction_is_near_what_two_ranks_do(world, tmp_path):
    """Their layers sleep, which takes as long on a busy machine; docs/benchmarks has real ones."""
    settings = {"train.batch_size": 32, "train.threads": 1, "data.name": "digits"}
    made = Planner(load(None, settings), sleeping(), load_data("digits")[0], Network(1e12, 0.0))
    blocks = split(made.model, 2, balance="even")
    predicted = made.predict(blocks, Recipe("piped", Backprop(micro_batches=4))).images_per_second
    words = "train --model small_networks:sleeping --data digits --solver backprop --set"
    asked = ["solver.micro_batches=4", "--set", "split.balance=even", *TINY.split()]
    output(world.hybrid(2, *words.split(), *asked, "--out", tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # two blocks of one layer each, and five micro-batches' time for four
    ideal = 4 / 5 / sum(SECONDS)
    assert 0.9 * ideal < predicted <= ideal
    assert 0.2 * ideal < summary["images_per_second"] <= ideal
