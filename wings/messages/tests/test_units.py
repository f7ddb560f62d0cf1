"""Units of a block: odd chains, layers that draw, and steps of some parameters alone."""

from dataclasses import replace

import pytest
import torch
from problems import Fixed, Problem
from torch import nn
from trainings import assert_same
from unit_steps import SGD, trained, unit_problem

from hybrid import split
from hybrid.solvers import Batch
from hybrid.solvers.numerics.draws import Draws
from hybrid.solvers.numerics.optimizer_state import Average
from hybrid_messages import PDASGD
from hybrid_messages.by_unit.unit_passes import unit_slices


def chain(make):
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(24, 1, 6, 6, dtype=torch.float64)
    source, every = Fixed(x, torch.randint(0, 4, (24,))), torch.arange(24).split(4)
    return Problem(
        split(model, 1, sample=x[:4]), [Batch(i, 0.05, source, t) for t, i in enumerate(every)]
    )


class Shared(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 3, 3, padding=1)


class Bent(nn.Module):
    """A function, then a layer that may be another's, too."""

    def __init__(self, bend, layer):
        super().__init__()
        self.bend, self.layer = bend, layer

    def forward(self, x):
        return self.layer(self.bend(x))


def shared():
    """A chain of which two units have one layer, with another between them."""

    def make():
        same, other = Shared(), nn.Conv2d(3, 3, 3, padding=1)
        ends = nn.Flatten(), nn.Linear(48, 4)
        bent = Bent(torch.relu, same), other, Bent(torch.tanh, same)
        return nn.Sequential(nn.Conv2d(1, 3, 3), *bent, *ends)

    return chain(make)


def in_place():
    def make():
        body = nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3, padding=1), Writes(), nn.Tanh()
        return nn.Sequential(nn.Conv2d(1, 3, 3), *body, nn.Flatten(), nn.Linear(48, 4))

    return chain(make)


class Writes(nn.Module):
    """Changes what it is given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.mul_(2.0) * self.scale


class Two(nn.Module):
    """One tensor to two, or a layer on the second of two; the first goes by."""

    def __init__(self, begins=False):
        super().__init__()
        self.begins, self.layer = begins, nn.Linear(36, 36)

    def forward(self, x):
        past, now = (x.flatten(1), x.flatten(1)) if self.begins else x
        return past, torch.tanh(self.layer(now)) + past


class Joins(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 4)

    def forward(self, x):
        return self.layer(x[0] + x[1])


def several_tensors():
    return chain(lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), Two(True), Two(), Joins()))


@pytest.mark.parametrize("make", [shared, in_place, several_tensors])
def test_odd_chains_are_trained_like_any_other(make):
    assert_same(trained(make(), SGD), make().plain_loop())
    found = trained(make(), PDASGD())
    assert_same(trained(make(), PDASGD(), at=3), found)


@pytest.mark.parametrize(("make", "count"), [(shared, 3), (in_place, 4)])
def test_parts_that_share_a_layer_are_one_unit(make, count):
    assert len(unit_slices(make().blocks.module(0))) == count


def test_random_layers_draw_the_same_after_a_resume():
    def dropping():
        hidden = nn.Conv2d(1, 3, 3), nn.Dropout(), nn.Conv2d(3, 3, 3), nn.Dropout(), nn.Flatten()
        return nn.Sequential(*hidden, nn.Linear(12, 4))

    def drawing():
        problem = chain(dropping)
        (units,) = problem.blocks.find_random_modules(problem.batches[0].images())
        build = problem.build
        assert len(units) == 2
        problem.build = lambda *arguments: replace(build(*arguments), draws=Draws(3, units))
        return problem

    found = trained(drawing(), PDASGD())
    assert_same(trained(drawing(), PDASGD(), at=3), found)


def test_a_step_of_a_unit_moves_that_unit_s_weights_and_averages_alone():
    """With what any optimizer keeps, and an average of the weights."""

    def kinds(parameters):
        yield torch.optim.AdamW(parameters, lr=0.1)
        yield torch.optim.SGD([{"params": parameters[:3]}, {"params": parameters[3:]}], 0.1, 0.9)

    for i in range(2):
        one, other = (unit_problem().build(0) for _ in range(2))
        for block in (one, other):
            own = [*block.module.parameters()]
            block.optimizers["local"] = [*kinds(own)][i]
            block.optimizers["ema"] = Average(own, 0.5)
        for step in range(3):
            for block in (one, other):
                torch.manual_seed(step)
                for p in block.module.parameters():
                    p.grad = torch.randn_like(p)
            one.step("local", 0.1 / (step + 1))
            parameters = [*other.module.parameters()]
            for some in (parameters[4:], parameters[:1], parameters[1:4]):
                before = [p.clone() for p in parameters]
                other.step("local", 0.1 / (step + 1), only=some)
                moved = [not torch.equal(b, p) for b, p in zip(before, parameters, strict=True)]
                assert moved == [any(p is q for q in some) for p in parameters]
        assert_same(dict(other.module.state_dict()), dict(one.module.state_dict()))
        averages = [
            [block.average.state[p]["average"] for p in block.module.parameters()]
            for block in (one, other)
        ]
        assert all(map(torch.equal, *averages))
