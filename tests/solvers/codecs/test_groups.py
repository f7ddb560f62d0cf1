"""2 to 6 bits in groups: the definition in float64, what rounding keeps, and odd shapes."""

from math import prod

import pytest
import torch

from hybrid.solvers.wire import codec

SHAPES = [(6, 3, 8, 4), (3, 5, 7, 3), (2, 40, 64), (3, 7, 9), (70, 5), (5, 3), (1, 1), (9,)]
GROUP = 16


def values(shape, dtype=torch.float64):
    """Channels differ in mean and range."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    channels = (1, -1, *[1] * (x.dim() - 2)) if x.dim() > 3 else (-1,)
    own = torch.randn(shape[1] if x.dim() > 3 else shape[-1], generator=generator)
    return (x * own.exp().view(channels) + 3 * own.view(channels)).to(dtype)


def across(each, x, key=(1, 2, 3), dtype=None):
    return each.decode(each.encode(x, key), dtype or x.dtype, key)


def groups_of(x, adjoint):
    """The columns whose rows are in groups: those of channels, or all numbers in one."""
    rows = x.movedim(1, -1) if x.dim() > 3 else x
    columns = rows.reshape(-1, num_columns(x.shape, adjoint))
    return [group for column in columns.unbind(1) for group in column.split(GROUP)]


def num_columns(shape, adjoint):
    """Channels, if there are rows for at least one group, and there is no other reason."""
    channels = shape[1] if len(shape) > 3 else shape[-1]
    return 1 if adjoint or prod(shape) // channels < GROUP else channels


def ranges(group, bits):
    """l and s of the definition."""
    low = (group.min() - group.min().abs() / 256).bfloat16().double()
    return low, ((group.max() - low) * (129 / 128) / (2**bits - 1)).bfloat16().double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "bits"), [("int6", 6), ("int3", 3)])
def test_an_activation_is_rounded_to_the_nearest_level_of_its_group(name, bits, shape):
    x = values(shape)
    arrived = groups_of(across(codec(f"{name}:{GROUP}"), x), adjoint=False)
    for group, found in zip(groups_of(x, adjoint=False), arrived, strict=True):
        low, scale = ranges(group, bits)
        q = ((group - low) / scale + 0.5).floor() if scale else torch.zeros_like(group)
        assert 0 <= q.min() <= q.max() < 2**bits
        torch.testing.assert_close(found, low + scale * q, rtol=1e-12, atol=0)
        assert ((found - group).abs() <= scale / 2 * (1 + 1e-9)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "bits"), [("int4", 4), ("int3", 3)])
def test_an_adjoint_s_error_is_uniform_around_zero_whatever_its_value(name, bits, shape):
    p, each = values(shape), codec(f"{name}:{GROUP}", adjoint=True)
    draws = torch.stack([across(each, p, (7, n)) for n in range(400)])
    arrived = zip(*(groups_of(draw, adjoint=True) for draw in draws), strict=True)
    for group, found in zip(groups_of(p, adjoint=True), map(torch.stack, arrived), strict=True):
        _, scale = ranges(group, bits)
        errors = (found - group) / scale.clamp_min(1e-300)
        assert errors.abs().max() <= 0.5 + 1e-6
        # of 400 draws with variance 1/12, six standard deviations; u is in steps of 1/256
        assert errors.mean(0).abs().max() <= 6 * (1 / 12 / 400) ** 0.5 + 1 / 512
        assert (errors.square().mean(0) - 1 / 12).abs().max() <= 6 * (1 / 180 / 400) ** 0.5 + 0.002


def test_an_adjoint_s_random_numbers_are_a_function_of_its_key():
    p, each = values((70, 5), torch.float32), codec("int3", adjoint=True)
    before = torch.get_rng_state()
    first, again, other = (across(each, p, key) for key in ((1, 2), (1, 2), (1, 3)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize(("name", "bits"), [("int4", 4), ("int3", 3)])
def test_numbers_and_ranges_fill_the_bytes_of_a_message(name, bits, adjoint, shape):
    message = codec(f"{name}:{GROUP}", adjoint).encode(values(shape, torch.float32), (0,))
    columns = num_columns(shape, adjoint)
    last = shape[1] if len(shape) > 3 else shape[-1]
    together = 8 // (bits & -bits)  # so many numbers fill whole bytes
    packed = prod(shape) // last * -(-last // together) * together * bits // 8
    assert sum(x.nbytes for x in message) == packed + 4 * columns * -(
        -prod(shape) // columns // GROUP
    )


@pytest.mark.parametrize("adjoint", [False, True])
def test_the_extremes_of_float32_are_no_reason_to_overflow(adjoint):
    each = codec("int4", adjoint)
    for size in (1e-44, 1e-38, 1e30):
        x = size * values((70, 5), torch.float32)
        error = (across(each, x) - x).abs().max()
        assert error <= 0.1 * x.abs().max() + 1e-37
    x = values((70, 5), torch.float32)
    x[3, 2] = torch.nan
    assert across(each, x).isnan().any()
    assert not across(each, torch.zeros(70, 5)).any()


def test_zeros_behind_a_relu_and_the_format_that_is_asked_for_are_kept():
    x = values((4, 8, 8, 8), torch.bfloat16).relu().contiguous(memory_format=torch.channels_last)
    found = across(codec("int3"), x, dtype=torch.float32)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert not found[x == 0].any()
    assert (found >= 0).all()
