"""Links between processes, over MPI and torch.distributed, and sums over replicas."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import ALLOWED

from hybrid.links import run_threads, run_virtual
from hybrid.links.staging import is_dense, memory_of
from tests.hybrid.links.torch_program import LINKS, steps


@pytest.fixture(scope="module", params=LINKS)
def facts(world, request):
    """What every rank of three found."""
    return world.run(3, "tests.hybrid.links.torch_program:facts", request.param)


def test_any_tensor_arrives_equal_and_with_equal_strides(facts):
    _, *receivers = facts
    for rank in receivers:
        assert rank["wrong"] == []
        assert rank["checked"] > 100
        assert rank["slices"] == [True] * 3, "a tensor with gaps arrives as a contiguous copy"


FOUND = {
    "many sends in both directions do not deadlock": ("crossed", [True] * 3),
    "they are counted": ("sent back", [0, 30 << 20, 30 << 20]),
    "flush leaves no send behind": ("pending", [0] * 3),
    "all_gather is in rank order": ("gathered", [[0, 10, 20]] * 3),
    "a failed agreement is the same error everywhere": ("agreed", ["rank 1 is unwell"] * 3),
    "links that close leave neither groups nor threads": ("left", [[False, []]] * 3),
}


@pytest.mark.parametrize(("fact", "expected"), FOUND.values(), ids=FOUND.keys())
def test_every_rank_finds(facts, fact, expected):
    assert [rank[fact] for rank in facts] == expected


def test_messages_and_bytes_are_as_few_as_they_can_be(world):
    found = world.run(3, "tests.hybrid.links.mpi_program:facts")

    def every(fact):
        return [rank[fact] for rank in found]

    # two formats of five tensors each in both directions: 2 announcements + 10 tensors a link
    assert every("messages") == [12, 24, 12]
    assert every("copied late") == [True] * 3
    assert every("many lengths") == [16] * 3, "few receives wait at once"
    sides = ("next", "previous", "peers")
    counts = (28, 0, 0), (28, 3, 0), (0, 3, 0)
    assert every("bytes") == [dict(zip(sides, each, strict=True)) for each in counts]
    assert every("freed") == [[True] * 4] * 3
    assert found[0]["waited"] < 0.2 < found[1]["waited"]


def test_ranks_that_fail_together_leave_no_thread_inside_gloo(world):
    """Which would abort the process that ends."""
    assert world.run(2, "tests.hybrid.links.torch_program:threads_after_failure") == [[], []]


def test_ranks_of_one_host_listen_to_no_other(world):
    assert world.run(2, "tests.hybrid.links.torch_program:ports") == [{"127.0.0.1"}] * 2


def test_a_pickle_of_another_rank_is_refused_and_not_run(world, tmp_path):
    errors, _ = world.run(2, "tests.hybrid.links.torch_program:attacked", str(tmp_path / "ran"))
    assert len(errors) == 2
    assert all("bytes that are no value" in error for error in errors)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", LINKS)
def test_an_engine_sums_with_equal_bits_in_one_call(world, kind):
    found = world.run(4, "tests.hybrid.links.torch_program:sums", kind)
    for rank in found:
        assert rank["close"]
        assert rank["twice"]
        assert rank["exchanged"]
    assert len({rank["bits"] for rank in found}) == 1
    if kind == "mpi":
        _assert_counted(found)


def _assert_counted(found):
    """Bytes are those that MPI itself counts: of a small sum, by a tree, in the ranks' mean."""
    counted, sent = (sum(each) for each in zip(*(rank["sent"] for rank in found), strict=True))
    assert [rank["sent of 1 MiB"] for rank in found] == [(3 << 19, 3 << 19)] * 4
    assert counted == sent


@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_an_engine_holds_no_sum_of_an_earlier_step(world, kind):
    for pending, grown in world.run(2, "tests.hybrid.links.torch_program:held", kind):
        assert pending == 0
        assert grown < 16  # the sums of 250 steps have 64 MB


@pytest.mark.parametrize("run", [run_threads, run_virtual])
def test_of_nine_replicas_no_sum_of_an_earlier_step_is_held(run):
    def program(links):
        steps(links, 20)
        links.all_gather_grid(None)
        return len(links._team._sums)

    assert run(1, program, replicas=9) == [0] * 9


@pytest.mark.parametrize("run", [run_threads, run_virtual])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_threads_sum_by_pairs(run, replicas):
    each = torch.randn(replicas, 7)

    def program(links):
        first = links.peers.sum(each[links.place.replica])
        second = links.peers.sum(2 * each[links.place.replica])
        return second.finish(), first.finish()

    found = run(1, program, replicas=replicas)
    for second, first in found:
        assert torch.equal(first, found[0][1])
        assert torch.equal(second, 2 * first)
    assert torch.allclose(found[0][1], each.sum(0), atol=1e-5)


def test_the_virtual_clock_counts_a_sum_of_many_by_its_bytes():
    def program(links):
        links.ignore_machine_time(0.0)
        links.peers.sum(torch.zeros(1 << 20)).finish()
        return links.now()

    # 4 MiB at 10 Gb/s are 3.4 ms, and twice that goes round; 64 messages one by one: 420 ms
    assert max(run_virtual(1, program, replicas=64)) < 0.01


def test_torchrun_trains_with_the_bits_of_threads(hybrid, tmp_path):
    """Two processes start, which takes six seconds."""
    words = ["train", "--epochs", "1", "--solver", "ddg", "--set", "data.limit=256", "--out"]
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--nproc-per-node=2", "--standalone", "-m", "hybrid", *words]
    done = subprocess.run(
        [*map(str, command), str(tmp_path / "torchrun")],
        env=os.environ | ALLOWED,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert hybrid(*words, tmp_path / "threads", "--blocks", 2)[0] == 0
    for run in ("torchrun", "threads"):
        assert hybrid("export", tmp_path / run, tmp_path / f"{run}.safetensors")[0] == 0
    one, other = ((tmp_path / f"{run}.safetensors").read_bytes() for run in ("torchrun", "threads"))
    assert one == other


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
