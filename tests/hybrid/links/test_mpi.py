"""Links between MPI ranks: one program that checks many things, and one that fails."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.links.staging import is_dense, memory_of


@pytest.fixture(scope="module")
def facts(world):
    """What every rank of three found."""
    return world.run(3, "mpi_program:facts")


def test_any_tensor_arrives_equal_and_with_equal_strides(facts):
    _, *receivers = facts
    for rank in receivers:
        assert rank["wrong"] == []
        assert rank["checked"] > 100


FOUND = {
    "what is not dense arrives as a contiguous copy": ("slices", [[], [True] * 3, [True] * 3]),
    # two formats of five tensors each in both directions: 2 announcements + 10 tensors a link
    "a format is announced once, then a tensor is one message": ("messages", [12, 24, 12]),
    "many sends in both directions do not deadlock": ("crossed", [True] * 3),
    "what is still being copied is sent later, in order": ("copied late", [True] * 3),
    "flush leaves no send behind": ("pending", [0] * 3),
    "few receives wait at once, however many formats there are": ("many lengths", [16] * 3),
    "bytes are counted exactly": (
        "bytes",
        [
            {"next": 28, "previous": 0, "peers": 0},
            {"next": 28, "previous": 3, "peers": 0},
            {"next": 0, "previous": 3, "peers": 0},
        ],
    ),
    "all_gather is in rank order": ("gathered", [[0, 10, 20]] * 3),
    "communicators of a grid are given back": ("freed", [[True] * 4] * 3),
    "a failed agreement is the same error everywhere": ("agreed", ["rank 1 is unwell"] * 3),
}


@pytest.mark.parametrize(("fact", "expected"), FOUND.values(), ids=FOUND.keys())
def test_every_rank_finds(facts, fact, expected):
    assert [rank.get(fact) for rank in facts] == expected


def test_waiting_time_is_counted(facts):
    assert facts[0]["waited"] < 0.2 < facts[1]["waited"]


@given(sizes=st.lists(st.integers(0, 4), max_size=4), order=st.randoms(), offset=st.integers(0, 3))
def test_the_memory_of_any_permuted_tensor_is_sent_without_a_copy(sizes, order, offset):
    axes = list(range(len(sizes)))
    order.shuffle(axes)
    store = torch.arange(offset + torch.Size(sizes).numel(), dtype=torch.int32)
    tensor = store[offset:].view(sizes).permute(axes)
    if tensor.numel():
        assert is_dense(tensor)
        assert memory_of(tensor).data_ptr() == tensor.data_ptr()
    assert len(memory_of(tensor)) == tensor.numel() * 4


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(4, 6)[:, :3], torch.zeros(1, 3).expand(4, 3)],
    ids=["strided", "narrow", "expanded"],
)
def test_a_tensor_with_gaps_or_overlaps_is_not_dense(tensor):
    assert not is_dense(tensor)
