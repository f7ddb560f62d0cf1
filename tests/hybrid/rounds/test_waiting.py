"""What messages between blocks take, on clocks that count nothing else."""

import pytest
import torch
from torch import nn

from hybrid import split
from hybrid.links import Network, run_virtual
from hybrid.rounds.waiting import measure_waits
from hybrid.solvers.block import Block
from hybrid.solvers.exact.pipeline import Wire

RATE, LATENCY, SAMPLES = 1000.0, 0.01, 8
WIDTHS = 6, 2
"""Of the two cuts."""


@pytest.mark.parametrize(("number_format", "size"), [("float32", 4), ("bfloat16", 2)])
def test_each_cut_has_the_time_of_its_own_message_one_way(number_format, size):
    layers = nn.Linear(4, WIDTHS[0]), nn.Linear(*WIDTHS), nn.Linear(WIDTHS[1], 3)
    blocks, inputs = split(nn.Sequential(*layers), cuts=["1", "2"]), torch.randn(SAMPLES, 4)

    def program(links):
        links.count_nothing_here(0.0)
        block = Block(blocks.module(links.rank), links.rank, 3, {})
        return measure_waits(links, block, inputs, Wire(number_format))

    first, *others = run_virtual(3, program, Network(RATE, LATENCY))
    assert others == [first, first]
    on_wire = [SAMPLES * width * size / RATE for width in WIDTHS]
    assert first.messages == pytest.approx([seconds + LATENCY for seconds in on_wire])
    assert first.occupied == pytest.approx(on_wire)
    assert (first.passes, first.fixed, first.packing) == ([0.0] * 3,) * 3
