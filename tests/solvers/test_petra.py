"""PETRA: inverses to rounding, exact gradients while weights stand still, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Fixed
from torch import Tensor, nn

from hybrid import models, split
from hybrid.cuts.partition import Blocks
from hybrid.links import run_threads
from hybrid.models.reversible import Residual
from solvers import Backprop, Batch, Block, Petra, Window
from solvers.layers.reversible import Reversible


def blocks(cuts: list[str] | int, depth: int = 14, dtype: torch.dtype = torch.float64) -> Blocks:
    torch.manual_seed(0)
    model = models.revnet(depth, classes=4, channels=1, image_size=8).to(dtype)
    return split(model, cuts) if isinstance(cuts, int) else split(model, cuts=cuts)


def batches(count: int, dtype: torch.dtype = torch.float64, lr: float = 0.05) -> list[Batch]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(count * 4, 1, 8, 8, generator=random).to(dtype)
    source = Fixed(x, torch.randint(0, 4, (count * 4,), generator=random))
    return [Batch(ids, lr, source) for ids in torch.arange(count * 4).split(4)]


def block_of(cut: Blocks, index: int) -> Block:
    module = cut.module(index).train()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return Block(module, index, len(cut), {"exact": sgd, "local": sgd})


def run(cut: Blocks, program: Callable[[Block, Any], Any]) -> list[Any]:
    return run_threads(len(cut), lambda links: program(block_of(cut, links.rank), links))


def weights(cut: Blocks) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in cut.model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), width=st.integers(1, 5), bottleneck=st.booleans())
def test_the_inverse_is_the_input_to_rounding(dtype, seed, width, bottleneck) -> None:
    torch.manual_seed(seed)
    unit = Reversible(Residual(4 * width, 4 * width, 1, bottleneck)).to(dtype).train()
    x = torch.randn(3, 8 * width, 5, 5, dtype=dtype)
    eps = torch.finfo(dtype).eps
    with torch.no_grad():
        y = unit(x)
        assert (unit.inverse(y) - x).abs().max() <= 4 * eps * (1 + y.abs().max())


def test_reversing_a_unit_gives_autograds_gradients() -> None:
    torch.manual_seed(0)
    unit = Reversible(Residual(3, 3)).double().train()
    x = torch.randn(4, 6, 5, 5, dtype=torch.float64, requires_grad=True)
    p = torch.randn(4, 6, 5, 5, dtype=torch.float64)
    y = unit(x)
    wanted = torch.autograd.grad(y, [x, *unit.parameters()], p)

    def backward(x1: Tensor, out: Tensor, p_out: Tensor) -> Tensor:
        out.backward(p_out)
        assert x1.grad is not None
        return x1.grad

    found, p_in = unit.reverse(y.detach(), p, backward)
    torch.testing.assert_close(found, x.detach())
    mine = [p_in, *(parameter.grad for parameter in unit.parameters())]
    torch.testing.assert_close(mine, list(wanted))


CUTS = [
    ["layer2.0"],
    ["layer1.1", "layer2.0", "layer3.0"],
    ["layer1.0", "layer2.1", "layer3.1"],
]


@pytest.mark.parametrize("cuts", CUTS)
def test_while_weights_stand_still_gradients_are_those_of_back_propagation(cuts) -> None:
    assert_gradients_of_back_propagation(blocks(cuts))


def test_repeated_modules_and_modules_that_work_in_place_are_run_like_any_other() -> None:
    torch.manual_seed(0)
    tanh = nn.Tanh()
    unit = Reversible(Residual(2, 2))
    layers = [nn.Conv2d(1, 4, 3), tanh, nn.Conv2d(4, 4, 3), tanh, unit, nn.ReLU(inplace=True)]
    head = [nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 4)]
    model = nn.Sequential(*layers, *head).double()
    assert_gradients_of_back_propagation(split(model, cuts=["6"]))


def assert_gradients_of_back_propagation(cut: Blocks) -> None:
    given_ = batches(7, lr=0.0)

    def program(block: Block, links: Any) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = []
        step = block.step

        def keep(kind: str, rate: float) -> None:
            found.append({n: p.grad.clone() for n, p in block.module.named_parameters()})
            step(kind, rate)

        block.step = keep
        petra = Petra()
        petra.prepare(block, 0, False)
        petra.train(block, links, Window(given_))
        petra.drain(block, links)
        delayed, found = found, []
        Backprop().train(block, links, Window(given_))
        assert len(delayed) == len(found) == 7
        for mine, exact in zip(delayed, found, strict=True):
            for name in exact:
                torch.testing.assert_close(mine[name], exact[name], rtol=1e-7, atol=1e-9)
        return found

    run(cut, program)


def test_one_block_is_plain_sgd_bit_for_bit() -> None:
    plain, mine = blocks(1), blocks(1)
    sgd = torch.optim.SGD(plain.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    plain.model.train()
    for batch in batches(5):
        nn.functional.cross_entropy(plain.model(batch.images()), batch.labels()).backward()
        sgd.step()
        sgd.zero_grad()

    def program(block: Block, links: Any) -> None:
        petra = Petra()
        petra.prepare(block, 0, False)
        petra.train(block, links, Window(batches(5)))

    run(mine, program)
    found, wanted = mine.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_gradients_are_averaged_over_the_mini_batches_of_a_step() -> None:
    cut = blocks(["layer2.0"])
    steps = run(cut, lambda block, links: _steps(block, links, Petra(accumulate=3), 8))
    assert steps == [3, 3]  # 3 + 3 and, at the drain, 2

    one, four = blocks(1), blocks(1)
    for made, number in ((one, 1), (four, 4)):
        same = [batches(1)[0]] * number

        def program(block: Block, links: Any, same=same, number=number) -> None:
            petra = Petra(accumulate=number)
            petra.prepare(block, 0, False)
            petra.train(block, links, Window(same))

        run(made, program)
    torch.testing.assert_close(weights(one), weights(four), rtol=1e-12, atol=1e-14)


def _steps(block: Block, links: Any, petra: Petra, count: int) -> int:
    steps, step = 0, block.step

    def counting(kind: str, rate: float) -> None:
        nonlocal steps
        steps += 1
        step(kind, rate)

    block.step = counting
    petra.prepare(block, 0, False)
    petra.train(block, links, Window(batches(count)))
    petra.drain(block, links)
    return steps


def test_running_statistics_move_once_a_mini_batch() -> None:
    cut = blocks(["layer1.1", "layer2.0"])

    def program(block: Block, links: Any) -> set[int]:
        petra = Petra()
        petra.prepare(block, 0, False)
        petra.train(block, links, Window(batches(6)))
        petra.drain(block, links)
        norms = [m for m in block.module.modules() if isinstance(m, nn.BatchNorm2d)]
        return {int(norm.num_batches_tracked) for norm in norms}

    assert all(counts in ({6}, set()) for counts in run(cut, program))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 8), st.sampled_from(CUTS), st.integers(1, 3))
def test_a_run_goes_on_with_what_was_under_way(stop, cuts, accumulate) -> None:
    def trained(resumed: bool) -> dict[str, Tensor]:
        cut, given_ = blocks(cuts, 14), batches(8)

        def program(block: Block, links: Any) -> None:
            petra = Petra(accumulate=accumulate)
            petra.prepare(block, 0, False)
            petra.train(block, links, Window(given_[:stop]))
            if resumed:
                state = {k: t.clone() for k, t in petra.flight_state(block, links).items()}
                block.module.zero_grad()
                petra = Petra(accumulate=accumulate)
                petra.prepare(block, 0, False)
                petra.load_flight_state(block, state)
            petra.train(block, links, Window(given_[stop:]))
            petra.drain(block, links)

        run(cut, program)
        return weights(cut)

    whole, resumed = trained(False), trained(True)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("depth", [14, 26, 44])
def test_what_a_block_keeps_does_not_grow_with_its_reversible_units(depth: int) -> None:
    """Between ticks: the queue of the stem's inputs alone."""
    torch.manual_seed(0)
    network = models.revnet(depth, classes=4, channels=1, image_size=8)
    cut = split(network.double(), cuts=["layer2.0"])

    def program(block: Block, links: Any) -> int:
        petra = Petra()
        petra.prepare(block, 0, False)
        petra.train(block, links, Window(batches(6)))
        kept = sum(t.numel() for flight in petra._flights for t in flight.kept.values())
        petra.drain(block, links)
        return kept

    assert run(cut, program) == [2 * 4 * 64, 0]


@pytest.mark.parametrize("name", ["revnet18", "revnet34", "revnet50", "revnet20"])
def test_revnets_have_about_the_weights_of_their_resnets(name: str) -> None:
    with torch.device("meta"):
        mine = models.build(name, 10, 3, 32)
        resnet = models.build(name.replace("revnet", "resnet"), 10, 3, 32)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (mine, resnet)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.06)
    units = [m for m in mine.modules() if isinstance(m, Reversible)]
    assert len(units) >= 4


def test_a_step_takes_one_mini_batch_at_least() -> None:
    with pytest.raises(ValueError, match="accumulate is 0; it must be at least 1"):
        Petra(accumulate=0)
