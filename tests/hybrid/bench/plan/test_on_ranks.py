"""A plan, and what two ranks of MPI then do."""

import json

from answers import output
from small_networks import SECONDS, sleeping

from hybrid.bench.plan.planner import Planner
from hybrid.bench.recipes import Recipe
from hybrid.data import load as load_data
from hybrid.links import LinkSpeed
from hybrid.networks.partition.split import split
from hybrid.settings.resolve import load
from hybrid.solvers import Backprop

TINY = "--epochs 1 --batch-size 32 --set data.limit=128 --set train.threads=1"


def test_the_prediction_is_near_what_two_ranks_do(world, tmp_path):
    """Their layers sleep, which takes as long on a busy machine; docs/benchmarks has real ones."""
    settings = {"train.batch_size": 32, "train.threads": 1, "data.name": "digits"}
    made = Planner(load(None, settings), sleeping(), load_data("digits")[0], LinkSpeed(1e12, 0.0))
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
