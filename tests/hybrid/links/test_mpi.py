"""Links between MPI ranks: one program that checks many things, and one that fails."""

import sys
from pathlib import Path
from time import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.links.mpi import _is_dense, _memory

PROGRAM = Path(__file__).parents[2] / "support" / "mpi_program.py"


@pytest.fixture(scope="module")
def facts(world):
    """What every rank of three found."""
    return world.run(3, "mpi_program:facts")


def test_any_tensor_arrives_equal_and_with_equal_strides(facts):
    _, *receivers = facts
    for rank in receivers:
        assert rank["wrong"] == []
        assert rank["checked"] > 100


def test_a_tensor_that_is_not_dense_arrives_as_a_contiguous_copy(facts):
    assert [rank["slices"] for rank in facts[1:]] == [[True] * 3] * 2


def test_a_format_is_announced_once_and_each_tensor_is_then_one_message(facts):
    # two formats of five tensors each in both directions: 2 announcements + 10 tensors a link
    assert [rank["messages"] for rank in facts] == [12, 24, 12]


def test_many_outstanding_sends_in_both_directions_do_not_deadlock(facts):
    assert [rank["crossed"] for rank in facts] == [True] * 3


def test_what_is_still_being_copied_is_sent_later_and_in_order(facts):
    assert [rank["copied late"] for rank in facts] == [True] * 3


def test_flush_leaves_no_send_behind(facts):
    assert [rank["pending"] for rank in facts] == [0] * 3


def test_bytes_are_counted_exactly(facts):
    assert [rank["bytes"] for rank in facts] == [
        {"next": 24 + 4, "previous": 0},
        {"next": 24 + 4, "previous": 3},
        {"next": 0, "previous": 3},
    ]


def test_waiting_time_is_counted(facts):
    assert facts[0]["waited"] < 0.2 < facts[1]["waited"]


def test_all_gather_is_in_rank_order(facts):
    assert [rank["gathered"] for rank in facts] == [[0, 10, 20]] * 3


def test_a_failed_agreement_raises_the_same_error_on_every_rank(facts):
    assert [rank["agreed"] for rank in facts] == ["rank 1 is unwell"] * 3


def test_a_failing_rank_ends_the_job_at_once_and_its_reason_is_printed_once(mpirun):
    ended = mpirun(2, sys.executable, PROGRAM)
    assert time() - float(ended.stdout) < 10
    assert ended.returncode != 0
    assert ended.stderr.count("the disk is on fire") == 1
    assert "hybrid: error: rank 1: the disk is on fire" in ended.stderr
    assert "Traceback" not in ended.stderr


sizes = st.lists(st.integers(0, 4), max_size=4)


@given(sizes=sizes, order=st.randoms(), offset=st.integers(0, 3))
def test_the_memory_of_any_permuted_tensor_is_sent_without_a_copy(sizes, order, offset):
    axes = list(range(len(sizes)))
    order.shuffle(axes)
    store = torch.arange(offset + torch.Size(sizes).numel(), dtype=torch.int32)
    tensor = store[offset:].view(sizes).permute(axes)
    if tensor.numel():
        assert _is_dense(tensor)
        assert _memory(tensor).ctypes.data == tensor.data_ptr()
    assert _memory(tensor).nbytes == tensor.numel() * 4


def test_channels_last_is_sent_without_a_copy():
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert _is_dense(tensor)
    assert _memory(tensor).ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(4, 6)[:, :3], torch.zeros(1, 3).expand(4, 3)],
    ids=["strided", "narrow", "expanded"],
)
def test_a_tensor_with_gaps_or_overlaps_is_not_dense(tensor):
    assert not _is_dense(tensor)
