"""What units draw is a function of the pass's key and of their number, whoever else draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybrid.solvers.layers.branches import Reversible
from hybrid.solvers.numerics import draws as module_of_draws
from hybrid.solvers.numerics.draws import Draws, find_random_parts


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


def attention(x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


UNITS: dict[str, nn.Module] = {
    **{type(m).__name__: m for m in (nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.RReLU())},
    "nested": nn.Sequential(nn.Identity(), nn.Sequential(nn.Dropout())),
    "attention": Layer(attention),
    "rand": Layer(lambda x: x * torch.rand(len(x), 1, 1, 1)),
    "rand into": Layer(lambda x: x * torch.rand(x.shape, out=torch.empty_like(x))),
    "rand_like": Layer(lambda x: x * torch.rand_like(x)),
    "randn": Layer(lambda x: x + torch.randn(x.shape)),
    "normal": Layer(lambda x: x + torch.normal(0.0, 1.0, x.shape)),
    "randint": Layer(lambda x: x + torch.randint(9, x.shape)),
    "randint from": Layer(lambda x: x + torch.randint(3, 9, x.shape)),
    "randperm": Layer(lambda x: x.flatten()[torch.randperm(x.numel())].view_as(x)),
    "multinomial": Layer(lambda x: x + torch.multinomial(torch.ones(4, 999), 1).view(4, 1, 1, 1)),
    "bernoulli_": Layer(lambda x: x * torch.empty_like(x).bernoulli_(0.5)),
    "twice": Layer(lambda x: x + torch.randn(x.shape) - torch.randn(x.shape)),
}


@pytest.fixture
def x():
    return torch.randn(4, 4, 5, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def drawn(x):
    """`drawn(module, key, unit)` runs the module on x, with gradients like autograd's own."""
    installed = []

    def run(module, key, unit=0):
        for draws in installed:
            draws.remove()
        installed.append(Draws(7, {module: (unit,)}))
        installed[-1].draw_for(key)
        return module.train()(x)

    yield run
    installed[-1].remove()


@pytest.mark.parametrize("name", UNITS)
def test_the_same_key_and_unit_draw_the_same_and_others_something_else(name, x, drawn):
    unit = UNITS[name]
    before = torch.get_rng_state()
    first = drawn(unit, (1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    assert torch.equal(drawn(unit, (1, 2)), first)
    others = [drawn(unit, (1, 3)), drawn(unit, (2, 2)), drawn(unit, (1, 2), 1)]
    assert not any(torch.equal(other, first) for other in others)
    if name != "twice":
        assert not torch.equal(first, x)


def test_a_reversible_unit_draws_the_same_where_its_branch_is_run_alone(x, drawn):
    unit = Reversible(nn.Dropout())
    x1, x2 = x.chunk(2, dim=1)
    assert torch.equal(drawn(unit, (1,)), torch.cat((x2 + unit.residual(x1), x1), dim=1))


def test_parts_that_draw_are_found_and_hooks_do_not_stay(x):
    parts = [nn.Identity(), UNITS["nested"], nn.ReLU(), UNITS["rand"]]
    found, out = find_random_parts(nn.Sequential(*parts), parts, x)
    assert found == [parts[1], parts[3]]
    assert out.shape == x.shape
    draws = Draws(0, dict.fromkeys(parts, (0,)))
    assert not any(part._forward_hooks for part in parts)
    draws.draw_for(())
    assert all(part._forward_hooks for part in parts)
    draws.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def test_what_no_generator_fixes_is_refused_in_one_line(x):
    tags = (torch.Tag.nondeterministic_seeded,)
    torch.library.define("tests::noise", "(Tensor x) -> Tensor", tags=tags)
    torch.library.impl("tests::noise", "CPU", torch.rand_like)
    layer = Layer(torch.ops.tests.noise)
    with pytest.raises(ValueError, match=r"^tests\.noise[^\n]* no generator fixes[^\n]*$"):
        find_random_parts(layer, [layer], x)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_takes_no_generator_draws_from_torchs_seeded_for_it(device, drawn, monkeypatch):
    """Fused attention with dropout on a GPU; on the CPU torch.rand, as if it took none."""
    q = torch.randn(2, 4, 16, 8, device=device, requires_grad=True)

    def attend():
        if device == "cpu":
            return q * torch.rand(q.shape)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    if device == "cpu":
        monkeypatch.setattr(module_of_draws, "_with_generator", lambda func: None)
    layer = Layer(lambda x: attend() + attend())
    torch.manual_seed(3)
    expected = torch.rand(5, device=device)
    torch.manual_seed(3)
    found = [drawn(layer, key, unit) for key, unit in (((1,), 0), ((1,), 0), ((2,), 0), ((1,), 1))]
    assert torch.equal(torch.rand(5, device=device), expected)  # that of the user's code goes on
    gradients = [torch.autograd.grad(y.sum(), q)[0] for y in found]
    for values in (found, gradients):
        assert torch.equal(values[0], values[1])
        assert not torch.equal(values[0], values[2])
        assert not torch.equal(values[0], values[3])
    once = drawn(Layer(lambda x: attend()), (1,))
    assert not torch.equal(found[0], 2 * once)
