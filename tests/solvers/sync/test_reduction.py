"""Sums over replicas: the same bits on all of them, in their order."""

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from hybrid.links import run_threads
from hybrid.solvers.sync import reduction
from hybrid.solvers.sync.reduction import Reduction, decode, encode, memory, pack, unpack


def vectors(replicas, length, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=random) for _ in range(replicas)]


def summed(each, kind="float32", times=1):
    def program(links):
        made = Reduction(links.peers, kind)
        return [made.start(each[links.place.replica])() for _ in range(times)]

    return run_threads(1, program, replicas=len(each))


@given(replicas=some.integers(1, 5), length=some.integers(0, 40), bucket=some.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_a_sum_is_in_replica_order_whatever_the_buckets(replicas, length, bucket):
    each = vectors(replicas, length, seed=length)
    before, reduction.BUCKET_BYTES = reduction.BUCKET_BYTES, 4 * bucket
    try:
        found = summed(each)
    finally:
        reduction.BUCKET_BYTES = before
    expected = reduce(torch.add, each)
    assert all(torch.equal(mine, expected) for (mine,) in found)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_what_rounding_leaves_out_comes_later(kind):
    each, times = vectors(3, 200), 50
    found = summed(each, kind, times)
    for mine in zip(*found, strict=True):
        assert torch.equal(mine[0], mine[1])
        assert torch.equal(mine[0], mine[2])
    expected = reduce(torch.add, each)
    first, mean = found[0][0], torch.stack(found[0]).mean(0)
    assert (first - expected).norm() > 0
    assert (mean - expected).norm() < 0.1 * (first - expected).norm()


def test_exchanges_may_end_in_any_order():
    each = vectors(3, 7)

    def program(links):
        made = Reduction(links.peers)
        first, second = (made.start(k * each[links.place.replica]) for k in (1, 2))
        late = second()
        return first(), late

    for first, second in run_threads(1, program, replicas=3):
        assert torch.equal(first, reduce(torch.add, each))
        assert torch.equal(second, reduce(torch.add, [2 * x for x in each]))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1.0, -3.0, 0.5]])
def test_a_message_holds_what_its_format_can(kind, values):
    x = torch.tensor(values)
    found = decode(encode(x, kind), kind, torch.float32)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    bound = x.abs().max() / 127 if values else 0
    assert bool(((found - x).abs() <= bound).all())


def test_packed_tensors_come_back_in_their_own_memory_order():
    plain, last = torch.randn(2, 3), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    half = torch.randn(4, dtype=torch.bfloat16)
    tensors = [plain.clone(), last.clone(), half.clone()]
    vector = pack(tensors)
    assert vector.dtype == torch.float32
    assert len(vector) == 16 + 128 + 16  # each begins at a multiple of 64 bytes
    for tensor in tensors:
        tensor.zero_()
    unpack(vector, tensors)
    assert all(map(torch.equal, tensors, (plain, last, half)))
    with pytest.raises(ValueError, match="is not dense"):
        memory(torch.randn(4, 4)[:, ::2])
