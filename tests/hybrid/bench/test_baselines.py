"""What others would use, on two ranks: one program that checks many things."""

from math import prod

import pytest
import torch

from hybrid.networks import models
from hybrid.networks.partition.split import split

pytestmark = pytest.mark.skipif(
    [*map(int, torch.__version__.split(".")[:2])] < [2, 12],
    reason="before torch 2.12 its own pipelines received only tensors in the default layout",
)

PIPELINES = ("gpipe", "1f1b", "interleaved-zero-bubble")


@pytest.fixture(scope="module")
def facts(world):
    """What both ranks found."""
    return world.run(2, "tests.hybrid.bench.baselines_program:facts")


def test_the_plain_loop_equals_one_written_by_hand_bit_for_bit_on_rank_0_alone(facts):
    plain, elsewhere = (rank["plain"] for rank in facts)
    # several threads while it trains, and then as before
    assert plain == {"equal": True, "spent": (0.0, 0.0), "threads": [1, 2, 1]}
    assert elsewhere == {"equal": None, "spent": (0.0, 0.0), "threads": [1, 1]}


@pytest.mark.parametrize("row", ["data parallel", *PIPELINES])
def test_parts_of_a_batch_add_up_to_the_plain_loop(facts, row):
    # a gradient that is 1/4 too large or small is off by about 0.2
    assert facts[0][row]["off"] < 1e-3
    # one micro-batch has the running statistics, too; a pass more to find the shapes moves them
    assert facts[0]["exact"]["off"] < 1e-6


def test_data_parallel_ranks_send_a_ring_all_reduce_a_step(facts):
    count = sum(p.numel() for p in models.build("resnet8", 10, 1, 8).parameters())
    assert [rank["data parallel"]["sent"] for rank in facts] == [4 * count * 2] * 2


@pytest.mark.parametrize("row", PIPELINES)
def test_pipeline_bytes_are_what_crosses_the_cuts(facts, row):
    stages = 4 if row == "interleaved-zero-bubble" else 2
    blocks = split(models.build("resnet8", 10, 1, 8), stages, inside=False)
    cuts = [4 * 64 * prod(shape) for shape in blocks.cut_shapes(torch.zeros(1, 1, 8, 8))]
    # an activation down and a gradient up at every cut, and all of them are between the two ranks
    assert [rank[row]["sent"] for rank in facts] == [sum(cuts)] * 2
