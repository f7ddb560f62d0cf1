"""What crosses a cut in an exact pass: rounding, filtering, and bytes."""

from collections import deque
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.registry import CODECS
from hybrid.solvers.wire import Wire, codec

FORMATS = [name for name in CODECS if not codec(name).coarse]
SHAPES = [(3, 4, 8), (1, 2, 2), (5, 6, 4)]
SEEDS = st.integers(0, 10_000)


def across(wire, x, dtype=None):
    """What the other side makes of x."""
    sent: deque[Tensor] = deque()
    wire.send(sent.append, x)
    received = wire.receive(sent.popleft, dtype or x.dtype)
    assert not sent, "a part was not received"
    return received


def values(seed, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 3, 8, 6, generator=generator, dtype=dtype)


@pytest.mark.parametrize("number_format", FORMATS)
def test_of_several_tensors_each_large_one_is_rounded_alone_and_integers_arrive_as_they_are(
    number_format,
):
    x, y = (values(s, 10.0**s, torch.float32).repeat(1, 1, 2, 1) for s in (1, 2))
    places, sizes = torch.arange(4 * 9).view(4, 9), torch.rand(4, 2)
    bundle, wire = Bundle.of((x, places, y, sizes), 4, "here"), Wire(number_format)
    sent: deque[Tensor] = deque()
    wire.send(sent.append, bundle.divide((x, places, y, sizes)), bundle)
    assert len(sent) == wire.num_tensors(wire.up, bundle)
    received = bundle.join(wire.receive(sent.popleft, torch.float32, bundle))
    assert torch.equal(received[0], across(wire, x))
    assert torch.equal(received[2], across(wire, y))
    assert torch.equal(received[1], places)
    assert torch.equal(received[3], sizes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number_format", FORMATS)
def test_zeros_stay_zeros_and_the_receivers_precision_is_that_of_what_arrives(number_format, dtype):
    x = values(0, dtype=dtype)
    x[1] = 0
    x[2, 1] = 0
    received = across(Wire(number_format), x)
    assert received.dtype == dtype
    assert received.isfinite().all()
    assert not received[1].any()
    assert not received[2, 1].any()
    assert received[0].any()
    if number_format == "float32":
        assert torch.equal(received, x)
    else:
        assert across(Wire(number_format), x, torch.float64).dtype == torch.float64


@given(SEEDS, st.sampled_from([1e-3, 1.0, 1e3]))
@pytest.mark.parametrize(("number_format", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_a_short_float_errs_by_half_of_its_last_bit(number_format, bits, seed, scale):
    x = values(seed, scale)
    error = (across(Wire(number_format), x) - x).abs()
    smallest = 2.0**-25 if number_format == "float16" else 0.0
    assert (error <= x.abs() * 2.0**-bits + smallest).all()
    assert error.any()


@given(SEEDS, st.sampled_from([1e-20, 1.0, 1e20]))
def test_int8_errs_by_half_a_step_of_its_sample_and_channel(seed, scale):
    x = values(seed, scale)
    x[0, 0] *= 1e6
    x[1, 2] *= 1e-6
    step = x.abs().amax((2, 3), keepdim=True) / 127
    error = (across(Wire("int8"), x) - x).abs()
    assert (error <= 0.5 * step * (1 + 1e-9)).all()
    assert error.any()


@pytest.mark.parametrize("number_format", FORMATS)
def test_a_sample_arrives_the_same_whatever_it_travels_with(number_format):
    for x in (values(5), values(5).flatten(1)):
        together = across(Wire(number_format), x)
        alone = across(Wire(number_format), x[1:2])
        assert torch.equal(together[1:2], alone)


@pytest.mark.parametrize("shape", [*SHAPES, (4,), (1,), (5, 3)])
@pytest.mark.parametrize("number_format", FORMATS)
def test_the_bytes_of_a_sample_are_those_really_sent(number_format, shape):
    x = torch.randn(7, *shape)
    sent: list[Tensor] = []
    Wire(number_format).send(sent.append, x)
    values, channels = prod(shape), shape[0] if len(shape) > 1 else 1
    sizes = {"float32": 4 * values, "int8": values + 4 * channels}  # with a scale for each channel
    assert sum(t.nbytes for t in sent) == 7 * sizes.get(number_format, 2 * values)


def test_a_tensor_in_channels_last_arrives_in_channels_last():
    x = values(0, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    for number_format in FORMATS:
        received = across(Wire(number_format), x)
        assert received.is_contiguous(memory_format=torch.channels_last), number_format
