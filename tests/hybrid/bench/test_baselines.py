"""What others would use, on two ranks: one program that checks many things."""

from math import prod

import pytest
import torch

from hybrid.networks import models
from hybrid.networks.partition import split

pytestmark = pytest.mark.skipif(
    [*map(int, torch.__version__.split(".")[:2])] < [2, 12],
    reason="before torch 2.12 its own pipelines received only tensors in the default layout",
)

PIPELINES = ("gpipe", "1f1b", "interleaved-zero-bubble")


@pytest.fixture(scope="module")
def facts(world):
    """What both ranks found."""
    return world.run(2, "baselines_program:facts")


def test_the_plain_loop_equals_one_written_by_hand_bit_for_bit_on_rank_0_alone(facts):
    assert [rank["plain"]["equal"] for rank in facts] == [True, None]
    assert [rank["plain"]["sent"] for rank in facts] == [0, 0]
    assert facts[1]["plain"]["waited"] == 0
    assert [rank["rank"] for rank in facts] == [[0, 2], [1, 2]]
    # several threads while it trains, and then as before
    assert facts[0]["plain"]["threads"] == [1, 2, 1]


@pytest.mark.parametrize("row", ["data parallel", "replicas", *PIPELINES])
def test_parts_of_a_batch_add_up_to_the_plain_loop(facts, row):
    # a gradient that is 1/4 too large or small is off by about 0.2
    assert facts[0][row]["off"] < 1e-3
    assert facts[1][row]["off"] is None
    # one micro-batch has the running statistics, too; a pass more to find the shapes moves them
    assert facts[0]["exact"]["off"] < 1e-6


@pytest.mark.parametrize("row", ["data parallel", "replicas", "exact", *PIPELINES])
def test_the_state_has_the_model_s_names_and_is_the_model_s_before_training(facts, row):
    assert [rank[row]["untouched"] for rank in facts] == [True, None]
    # the first stage alone makes images, the last labels; data parallel ranks their own part
    shared = row in ("data parallel", "replicas")
    made = [[32, 32]] * 2 if shared else [[64, 0], [0, 64]]
    assert [rank[row]["made"] for rank in facts] == made


def test_data_parallel_ranks_send_a_ring_all_reduce_a_step_and_wait_for_the_slower_one(facts):
    sizes = [p.numel() for p in models.build("resnet8", 10, 1, 8).parameters()]
    count = sum(sizes)
    assert [rank["data parallel"]["sent"] for rank in facts] == [4 * count * 2] * 2
    # SampleNorm has no statistics to average; a number a parameter tells whether it is used, and
    # gradients begin at multiples of 64 bytes
    aligned = sum(-(-size // 16) * 16 for size in sizes)
    assert [rank["replicas"]["sent"] for rank in facts] == [4 * (aligned + len(sizes)) * 2] * 2
    # rank 0 takes 0.3 seconds for the images of each of two steps; the second begins for both alike
    assert facts[1]["data parallel"]["waited"] > 0.15


@pytest.mark.parametrize("row", PIPELINES)
def test_pipeline_bytes_are_what_crosses_the_cuts(facts, row):
    stages = 4 if row == "interleaved-zero-bubble" else 2
    blocks = split(models.build("resnet8", 10, 1, 8), stages, balance="operations")
    cuts = [4 * 64 * prod(shape) for shape in blocks.cut_shapes(torch.zeros(1, 1, 8, 8))]
    # an activation down and a gradient up at every cut, and all of them are between the two ranks
    assert [rank[row]["sent"] for rank in facts] == [sum(cuts)] * 2
