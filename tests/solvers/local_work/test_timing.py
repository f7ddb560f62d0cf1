"""What passes and messages of a pipeline take, timed before training."""

import pytest
import torch
from torch import nn

from hybrid import split
from hybrid.links import LinkSpeed, run_virtual
from hybrid.rounds.one_rank import OneRank
from hybrid.solvers.block import Block
from hybrid.solvers.local_work import timing
from hybrid.solvers.local_work.timing import measure_pipeline, time_one_rank
from hybrid.solvers.wire import Wire

RATE, LATENCY, SAMPLES = 1000.0, 0.01, 8
WIDTHS = 6, 2
"""Of the two cuts."""


@pytest.mark.parametrize(("number_format", "size"), [("float32", 4), ("bfloat16", 2)])
def test_each_cut_has_the_time_of_its_own_message_one_way(number_format, size):
    layers = nn.Linear(4, WIDTHS[0]), nn.Linear(*WIDTHS), nn.Linear(WIDTHS[1], 3)
    blocks, inputs = split(nn.Sequential(*layers), cuts=["1", "2"]), torch.randn(SAMPLES, 4)

    def program(links):
        links.ignore_machine_time(0.0)
        block = Block(blocks.module(links.rank), links.rank, 3, {})
        return measure_pipeline(links, block, inputs, Wire(number_format))

    first, *others = run_virtual(3, program, LinkSpeed(RATE, LATENCY))
    assert others == [first, first]
    on_wire = [SAMPLES * width * size / RATE for width in WIDTHS]
    assert first.messages == pytest.approx([seconds + LATENCY for seconds in on_wire])
    assert first.occupied == pytest.approx(on_wire)
    assert (first.passes, first.fixed, first.packing) == ([0.0] * 3,) * 3


def test_one_rank_passes_a_whole_mini_batch_at_the_cost_of_one_pass_a_block(monkeypatch):
    """Passes take 3 s, and 2 s a sample on block 0, 1 s on block 1; 8 of 64 samples are timed."""
    blocks = split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), cuts=["1"])

    def timed(links, block, lam):
        return 3.0 + (2.0 - block.index) * len(lam), lam

    monkeypatch.setattr(timing, "_time_passes", timed)

    def program(links):
        block = Block(blocks.module(links.rank), links.rank, 2, {})
        return time_one_rank(links, block, torch.randn(SAMPLES, 4), 64)

    assert run_virtual(2, program) == pytest.approx([3 + 128 + 3 + 64] * 2)


def totals(samples, seconds):
    return {"images": samples, "serial_seconds": 0.0, "parallel_seconds": seconds}


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        ([(100, 3.0)], [True]),  # 33 samples/s for 40
        ([(115, 3.0)], [False]),  # 38 for 40: not clearly behind
        ([(1, 1.0), (100, 3.0), (100, 3.0)], [False, True, False]),  # once, and not while cold
        ([(1, 1.0), (50, 1.5), (50, 1.5)], [False, False, True]),  # short epochs count together
        ([(1, 1.0)], [False]),
    ],
    ids=str,
)
def test_a_run_says_once_and_from_enough_seconds_that_one_rank_is_faster(epochs, said):
    one, now, found = OneRank(0.1, 4), totals(7, 5.0), []
    for samples, seconds in epochs:
        before = dict(now)
        now["images"] += samples
        now["parallel_seconds"] += seconds
        found.append(one.compare(before, now).startswith("one rank would be faster: "))
    assert found == said
    assert not OneRank(0.0, 4).compare(totals(0, 0.0), totals(1, 100.0))
