"""Steps on slices of large parameters: the bits and the state of whole steps, and less memory."""

import pytest
import torch
from torch import nn, optim

from hybrid.solvers.numerics import sliced_steps

SLICE = 1 << 10
CASES = [
    (optim.AdamW, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
]


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(sliced_steps, "SLICE", SLICE)


def parameters(dtype):
    random = torch.Generator().manual_seed(0)
    shapes = [(3, SLICE), (2 * SLICE + 77,), (5, 3), (SLICE + 1,)]
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_three_steps_have_the_bits_and_the_state_of_whole_steps(
    kind, settings, dtype, small_slices
):
    some, others = parameters(dtype), parameters(dtype)
    whole, sliced = (kind(each, lr=0.1, **settings) for each in (some, others))
    for _ in range(3):
        for p, q in zip(some, others, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        whole.step()
        sliced_steps.step(sliced)
    for p, q in zip(some, others, strict=True):
        assert torch.equal(p, q)
        assert whole.state[p].keys() == sliced.state[q].keys()
        for slot, x in whole.state[p].items():
            other = sliced.state[q][slot]
            assert (x is None and other is None) or torch.equal(torch.as_tensor(x), other)


def test_an_optimizer_that_is_not_known_to_step_by_place_steps_as_a_whole(small_slices):
    class OwnAdam(optim.Adam):
        sizes: list = []  # noqa: RUF012

        def step(self, closure=None):
            self.sizes.append([p.numel() for g in self.param_groups for p in g["params"]])

    (p, *_) = parameters(torch.float32)
    p.grad = torch.ones_like(p)
    sliced_steps.step(OwnAdam([p]))
    assert OwnAdam.sizes == [[3 * SLICE]]


def test_no_temporary_tensor_is_larger_than_a_slice(small_slices):
    from hybrid.solvers.numerics.draws import DispatchMode

    largest = 0

    class Sizes(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                largest = max(largest, out.numel() if out is not args[0] else 0)
            return out

    (p, *_) = parameters(torch.float32)
    optimizer = optim.AdamW([p])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        largest = 0
        with Sizes():
            sliced_steps.step(optimizer)
    assert largest == SLICE
