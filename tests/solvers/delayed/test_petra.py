"""PETRA: inverses to rounding, exact gradients while weights stand still, and what it keeps."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import Fixed, Problem, exact_pass
from torch import nn

from hybrid import split
from hybrid.networks import models
from hybrid.networks.models.residual import Residual
from hybrid.solvers import Batch, Petra
from hybrid.solvers.layers.branches import Reversible
from hybrid.solvers.state import Tensors


def problem(cut, batches, lr=0.05):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(batches * 4, 1, 8, 8, generator=random, dtype=torch.float64)
    source = Fixed(x, torch.randint(0, 4, (batches * 4,), generator=random))
    return Problem(cut, [Batch(ids, lr, source) for ids in torch.arange(batches * 4).split(4)])


def revnet(cuts, depth=14):
    torch.manual_seed(0)
    model = models.revnet(depth, classes=4, channels=1, image_size=8).double()
    return split(model, cuts) if isinstance(cuts, int) else split(model, cuts=cuts)


def trained(made, solver, watch=lambda block: None, after=lambda program: None):
    """Train and drain on every block; `after(program)` between the two."""

    def program(block, links):
        step = block.step

        def watched(*arguments):
            watch(block)
            step(*arguments)

        block.step = watched
        mine = solver.start(block, links, made.setup(window=0))
        mine.train(made.window())
        found = after(mine)
        mine.drain()
        return found

    return made.on_every_block(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 999), width=st.integers(1, 5), bottleneck=st.booleans())
def test_the_inverse_is_the_input_to_rounding(dtype, seed, width, bottleneck):
    torch.manual_seed(seed)
    unit = Reversible(Residual(4 * width, 4 * width, 1, bottleneck)).to(dtype).train()
    x = torch.randn(3, 8 * width, 5, 5, dtype=dtype)
    eps = torch.finfo(dtype).eps
    with torch.no_grad():
        y = unit(x)
        found, _ = unit.reverse(y, torch.zeros_like(y), lambda x1, out, p_out: p_out)
        assert (found - x).abs().max() <= 4 * eps * (1 + y.abs().max())


@pytest.mark.parametrize(
    "cuts",
    [["layer1.1", "layer2.0", "layer3.0"], ["layer1.0", "layer2.1", "layer3.1"]],
)
def test_while_weights_stand_still_gradients_are_those_of_back_propagation(cuts):
    assert_gradients_of_back_propagation(revnet(cuts))


def test_repeated_modules_and_modules_that_work_in_place_are_run_like_any_other():
    torch.manual_seed(0)
    tanh = nn.Tanh()
    unit = Reversible(Residual(2, 2))
    layers = [nn.Conv2d(1, 4, 3), tanh, nn.Conv2d(4, 4, 3), tanh, unit, nn.ReLU(inplace=True)]
    head = [nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 4)]
    model = nn.Sequential(*layers, *head).double()
    assert_gradients_of_back_propagation(split(model, cuts=["6"]))


def assert_gradients_of_back_propagation(cut):
    made = problem(cut, 7, lr=0.0)
    found: dict[int, list[Tensors]] = {k: [] for k in range(len(cut))}

    def keep(block):
        kept = {n: p.grad.clone() for n, p in block.module.named_parameters()}
        found[block.index].append(kept)

    trained(made, Petra(micro_batches=1), keep)
    delayed, found = found, {k: [] for k in range(len(cut))}

    def exact(block, links):
        step = block.step
        block.step = lambda *arguments: (keep(block), step(*arguments))
        exact_pass(block, links).train(made.window())

    made.on_every_block(exact)
    for k in found:
        assert len(delayed[k]) == len(found[k]) == 7
        torch.testing.assert_close(delayed[k], found[k], rtol=1e-7, atol=1e-9)


def test_gradients_are_averaged_over_micro_batches_and_each_moves_the_statistics_once():
    steps = [0, 0]

    def count(block):
        steps[block.index] += 1

    made = problem(revnet(["layer2.0"]), 8)
    trained(made, Petra(micro_batches=2), count)
    assert steps == [8, 8]
    norms = [m for m in made.blocks.model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {int(norm.num_batches_tracked) for norm in norms} == {16}

    once, again = problem(revnet(1), 1), problem(revnet(1), 1)
    (batch,) = again.batches
    again.batches = [replace(batch, ids=batch.ids.repeat(3))]
    trained(once, Petra(micro_batches=1))
    trained(again, Petra(micro_batches=3))
    weights = [dict(made.blocks.model.named_parameters()) for made in (once, again)]
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("depth", [14, 44])
def test_what_a_block_keeps_does_not_grow_with_its_reversible_units(depth):
    """Between ticks: the queue of the stem's inputs alone."""
    kept = trained(
        problem(revnet(["layer2.0"], depth), 6),
        Petra(micro_batches=1),
        after=lambda mine: sum(t.numel() for f in mine._flights.values() for t in f.stash.values()),
    )
    assert kept == [2 * 4 * 64, 0]


@pytest.mark.parametrize("name", ["revnet18", "revnet34", "revnet50", "revnet20"])
def test_revnets_have_about_the_weights_of_their_resnets(name):
    with torch.device("meta"):
        mine = models.build(name, 10, 3, 32)
        resnet = models.build(name.replace("revnet", "resnet"), 10, 3, 32)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (mine, resnet)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.06)
    units = [m for m in mine.modules() if isinstance(m, Reversible)]
    assert len(units) >= 4
