"""float16: each block has a loss scale of its own, which no gradient shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from solvers.base import Block


def block(precision: torch.dtype = torch.float16, width: int = 4) -> Block:
    torch.manual_seed(0)
    module = nn.Linear(width, width)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    return Block(module, 0, 2, {"exact": sgd, "local": sgd}, precision=precision)


def test_other_formats_have_no_scale() -> None:
    for precision in (torch.float32, torch.bfloat16):
        made = block(precision)
        assert made.loss_scale == 1.0
        lam = torch.randn(3, 4, requires_grad=True)
        out = made.forward(lam)
        made.backward(out, torch.ones_like(out))
        assert made.input_adjoint(lam) is lam.grad


def test_the_scale_is_in_the_gradients_until_they_are_used_and_never_in_adjoints() -> None:
    made, plain = block(), block(torch.float32)
    x = torch.randn(3, 4)
    # too small for float16 without a scale: its least positive number is 6e-8
    p = torch.full((3, 4), 1e-8)
    adjoints = []
    for one in (made, plain):
        lam = x.clone().requires_grad_()
        out = one.forward(lam)
        one.backward(out, p)
        adjoints.append(one.input_adjoint(lam))
    scaled, exact = made.module.weight.grad, plain.module.weight.grad
    torch.testing.assert_close(scaled / made.loss_scale, exact, rtol=2e-3, atol=1e-12)
    torch.testing.assert_close(*adjoints, rtol=2e-3, atol=1e-12)
    made.unscale("local")
    torch.testing.assert_close(made.module.weight.grad, exact, rtol=2e-3, atol=1e-12)
    for one in (made, plain):
        one.step("local", 1e6)
    torch.testing.assert_close(made.module.weight, plain.module.weight, rtol=1e-3, atol=1e-5)


def test_an_overflow_leaves_out_the_step_and_halves_the_scale() -> None:
    made = block()
    before = made.module.weight.detach().clone()
    scale = made.loss_scale
    lam = torch.randn(3, 4, requires_grad=True)
    out = made.forward(lam)
    made.backward(out, torch.full_like(out, 1e4))
    assert made.sample_adjoint(lam).isfinite().all()
    made.step("exact", 0.1)
    assert torch.equal(made.module.weight, before)
    assert made.loss_scale == scale / 2
    assert made.module.weight.grad is None


@pytest.mark.parametrize("kind", ["exact", "local"])
def test_a_step_without_gradients_is_none(kind: str) -> None:
    made = block()
    made.step(kind, 0.1)
    assert made.loss_scale == 2.0**16
