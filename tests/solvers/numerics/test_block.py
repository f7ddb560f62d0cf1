"""A block's step: replicas, clipping, optimizers; float16's loss scale, which no gradient shows."""

import pytest
import torch
from torch import nn

from hybrid.links import run_threads
from hybrid.solvers import Block
from hybrid.solvers.numerics.clipping import gradient_norms, total_norm
from hybrid.solvers.numerics.optimizer_state import with_momentum


def block(precision=torch.float16, optimizer=torch.optim.SGD, **settings):
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    exact = optimizer(module.parameters(), lr=0.1, **settings)
    return Block(module, 0, 2, {"exact": exact, "local": exact}, precision=precision)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("optimizer", "given", "momentum", "changed"),
    [
        (SGD, {"momentum": 0.9, "nesterov": True}, 0.5, {"momentum": 0.5}),
        (SGD, {"momentum": 0.9, "nesterov": True}, 0.0, {"momentum": 0.0, "nesterov": False}),
        (SGD, {"momentum": 0.9}, 0.5, {"momentum": 0.5}),
        (ADAMW, {"betas": (0.9, 0.999)}, 0.5, {"betas": (0.5, 0.999)}),
        (torch.optim.NAdam, {"betas": (0.9, 0.8)}, 0.5, {"betas": (0.5, 0.8)}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 0.5, {"momentum": 0.5}),
    ],
)
def test_an_own_optimizer_is_like_the_exact_one_but_for_its_momentum(
    optimizer, given, momentum, changed
):
    made = block(torch.float32, optimizer, weight_decay=0.01, **given)
    made.optimizers["local"] = with_momentum(made.optimizers["exact"], momentum)
    own, exact = made.optimizers["local"], made.optimizers["exact"]
    assert type(own) is optimizer
    marked = changed | {"separate_momentum": True}  # which a schedule does not move
    assert own.param_groups == [exact.param_groups[0] | marked]
    made.module(torch.ones(1, 4)).sum().backward()
    made.step("local", 0.1)
    assert len(own.state) == (2 if momentum else 0)
    assert not exact.state


@pytest.mark.parametrize("clip_norm", [0.0, 1e-8])
def test_the_scale_is_in_the_gradients_until_they_are_used_and_never_in_adjoints(clip_norm):
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
    for one in (made, plain):
        one.step("local", 1e6, clip_norm)
    torch.testing.assert_close(made.module.weight, plain.module.weight, rtol=1e-3, atol=1e-5)


def test_an_overflow_leaves_out_the_step_and_halves_the_scale():
    made = block()
    before = made.module.weight.detach().clone()
    scale = made.loss_scale
    lam = torch.randn(3, 4, requires_grad=True)
    out = made.forward(lam)
    made.backward(out, torch.full_like(out, 1e4))
    assert made.sample_adjoint(lam, len(lam)).isfinite().all()
    made.step("exact", 0.1)
    assert torch.equal(made.module.weight, before)
    assert made.loss_scale == scale / 2
    assert made.module.weight.grad is None


@pytest.mark.parametrize("theirs", [float("nan"), float("inf")])
def test_an_overflow_in_another_block_spoils_no_clipped_step(theirs):
    """Its norms count as 0, as its step is none."""
    blocks = [block() for _ in range(4)]

    def program(links):
        made = blocks[links.size + links.rank]
        x = torch.ones(3, 4, requires_grad=True)
        spoilt = theirs if links.rank == 0 and links.size == 2 else 1.0
        made.backward(made.forward(x), torch.full((3, 4), 0.1 * spoilt))
        made.step("exact", 0.1, 0.5, links)
        return made.module.weight.detach()

    [alone], (spoilt, made) = run_threads(1, program), run_threads(2, program)
    untouched = block().module.weight
    assert torch.equal(made, alone)
    assert made.isfinite().all()
    assert not torch.equal(made, untouched)
    assert torch.equal(spoilt, untouched)


def test_the_norm_over_a_chain_is_that_of_one_network_though_its_first_block_has_no_gradient():
    """A block alone sends nothing, and one without a gradient an empty message."""
    gradients = [torch.randn(n, dtype=torch.float64) for n in (3, 5, 7)]
    parts = {1: [gradients], 3: [[], gradients[:1], gradients[1:]]}

    def program(links):
        norms = gradient_norms(parts[links.size][links.rank], torch.device("cpu"))
        return total_norm(norms, links), links.traffic.total_bytes

    whole = nn.utils.get_total_norm(gradients)
    for blocks in (1, 3):
        found = run_threads(blocks, program)
        assert all(norm.dtype == whole.dtype and torch.equal(norm, whole) for norm, _ in found)
        assert [sent > 0 for _, sent in found] == [False, True, True][:blocks]


@pytest.mark.parametrize("kind", ["exact", "local"])
def test_a_step_without_gradients_is_none(kind):
    made = block()
    made.step(kind, 0.1)
    assert made.loss_scale == 2.0**16
