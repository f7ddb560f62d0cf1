"""Local updates: which gradients cross which cut, and nothing of the heads in the network."""

from __future__ import annotations

from copy import deepcopy
from time import sleep
from typing import Any

import pytest
import torch
from problems import Problem, make_problem
from torch import Tensor, nn

from hybrid.links import run_threads
from hybrid.rounds.optimisers import make
from hybrid.settings.config import OptimiserSettings
from solvers import LocalUpdates
from solvers.layers.heads import Head
from solvers.local_updates import AHEAD

STYLES = {
    "greedy": LocalUpdates(),
    "overlapping": LocalUpdates(style="overlapping", head="mlp:5"),
    "chunked": LocalUpdates(style="chunked", chunks=2),
}


def four_blocks(batches: int = 1) -> Problem:
    return make_problem(3, units=3, cuts=[1, 2, 3], batch=4, batches=batches)


def gradients(solver: LocalUpdates, problem: Problem) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """Every block's gradients of one mini-batch, and the heads."""

    def program(block, links):
        found: dict[str, Tensor] = {}
        mine = deepcopy(solver)
        mine.prepare(block, 0, False)

        def keep(kind: str, rate: float) -> None:
            found.update({n: p.grad.clone() for n, p in block.module.named_parameters()})

        block.step = keep
        mine._begin(block, links, problem.batches[0])
        heads = deepcopy(mine._head.module) if mine._head else None
        mine.train(block, links, problem.window())
        return found, heads

    ranks = problem.on_every_block(program)
    return [found for found, _ in ranks], [heads for _, heads in ranks]


def local_losses(problem: Problem, heads: list[Any], detached: list[int]) -> list[Tensor]:
    """Each block's loss where it has one, the chain cut before the blocks of `detached`."""
    batch = problem.batches[0]
    x, losses = batch.images(), []
    for k in range(4):
        x = problem.blocks.module(k).train()(x.detach() if k in detached else x)
        out = x if k == 3 else x.mean((2, 3))
        if k == 3 or heads[k] is not None:
            out = out if k == 3 else heads[k](out)
            losses.append(nn.functional.cross_entropy(out, batch.labels()))
        else:
            losses.append(torch.zeros(()))
    return losses


def expected(problem: Problem, losses: list[Tensor], k: int) -> list[Tensor]:
    parameters = list(problem.blocks.module(k).parameters())
    total = sum(losses, torch.zeros((), dtype=torch.float64))
    return list(torch.autograd.grad(total, parameters, retain_graph=True))


def test_greedy_gradients_cross_no_cut() -> None:
    problem = four_blocks()
    found, heads = gradients(STYLES["greedy"], problem)
    assert [head is None for head in heads] == [False, False, False, True]
    losses = local_losses(problem, heads, detached=[1, 2, 3])
    for k in range(4):
        torch.testing.assert_close(list(found[k].values()), expected(problem, [losses[k]], k))


def test_chunked_gradients_cross_the_cuts_inside_a_chunk() -> None:
    problem = four_blocks()
    found, heads = gradients(STYLES["chunked"], problem)
    assert [head is None for head in heads] == [True, False, True, True]
    losses = local_losses(problem, heads, detached=[2])
    for k in range(4):
        end = 1 if k < 2 else 3
        torch.testing.assert_close(list(found[k].values()), expected(problem, [losses[end]], k))


def test_overlapping_gradients_cross_one_cut() -> None:
    problem = four_blocks()
    found, heads = gradients(STYLES["overlapping"], problem)
    assert [head is None for head in heads] == [True, False, False, True]
    for k in range(4):
        # the chain is cut before this block and behind the next
        losses = local_losses(problem, heads, detached=[k, k + 2])
        wanted = expected(problem, losses[k : k + 2], k)
        torch.testing.assert_close(list(found[k].values()), wanted)


def test_one_chunk_is_back_propagation() -> None:
    problem = four_blocks()
    found, _ = gradients(LocalUpdates(style="chunked", chunks=1), problem)
    wanted = problem.plain_gradients(problem.batches[0])
    for k in range(4):
        module = problem.blocks.module(k)
        for name, gradient in found[k].items():
            torch.testing.assert_close(gradient, wanted[module.global_name(name)])


@pytest.mark.parametrize("name", STYLES)
def test_one_block_is_plain_sgd_bit_for_bit(name: str) -> None:
    def problem() -> Problem:
        return make_problem(1, units=2, cuts=[], batch=4, batches=8)

    plain = problem()
    model = plain.blocks.model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for batch in plain.batches:
        nn.functional.cross_entropy(model(batch.images()), batch.labels()).backward()
        sgd.step()
        sgd.zero_grad()
    mine = problem()

    def program(links: Any) -> None:
        block = mine.build(0)
        solver = deepcopy(STYLES[name])
        if solver.style == "chunked":
            solver.chunks = 1
        solver.prepare(block, 0, False)
        solver.train(block, links, mine.window())

    run_threads(1, program)
    found = dict(mine.blocks.model.named_parameters())
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", STYLES)
def test_a_run_goes_on_with_its_heads(name: str) -> None:
    def weights(resumed: bool) -> dict[str, Tensor]:
        problem = four_blocks(6)

        def program(links: Any) -> dict[str, Tensor]:
            block = problem.build(links.rank)
            first, second = problem.window(), problem.window()
            first.batches, second.batches = problem.batches[:3], problem.batches[3:]
            mine = deepcopy(STYLES[name])
            mine.prepare(block, 0, False)
            mine.train(block, links, first)
            if resumed:
                state = {k: t.clone() for k, t in mine.flight_state(block, links).items()}
                mine = deepcopy(STYLES[name])
                mine.prepare(block, 0, False)
                mine.load_flight_state(block, state)
            mine.train(block, links, second)
            mine.drain(block, links)
            return {k: t.clone() for k, t in block.module.state_dict().items()}

        ranks = run_threads(4, program)
        return {f"{k}.{n}": t for k, rank in enumerate(ranks) for n, t in rank.items()}

    whole, resumed = weights(False), weights(True)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("style", ["greedy", "chunked"])
def test_a_fast_block_waits_for_a_slow_one(style: str) -> None:
    problem = four_blocks(8 * AHEAD)
    done = [0] * 4
    ahead = []

    def program(links: Any) -> None:
        block = problem.build(links.rank)
        mine = LocalUpdates(style=style)  # type: ignore[arg-type]
        mine.prepare(block, 0, False)
        stepped = block.step

        def step(kind: str, rate: float) -> None:
            if links.rank == 2:
                sleep(0.002)
            stepped(kind, rate)
            done[links.rank] += 1
            ahead.append(done[1] - done[2])

        block.step = step
        mine.train(block, links, problem.window())
        mine.drain(block, links)

    run_threads(4, program)
    assert AHEAD < max(ahead) <= 2 * AHEAD + 1
    assert done == [8 * AHEAD] * 4


def test_heads_of_another_style_are_refused() -> None:
    problem = four_blocks()

    def program(links: Any) -> None:
        block = problem.build(links.rank)
        mine, other = LocalUpdates(style="chunked"), LocalUpdates(style="greedy")
        for solver in (mine, other):
            solver.prepare(block, 0, False)
        mine.train(block, links, problem.window())
        state = mine.flight_state(block, links)
        if links.rank in (0, 2):
            with pytest.raises(ValueError, match="resume with the style and chunks it was made"):
                other.load_flight_state(block, state)
        else:
            other.load_flight_state(block, state)

    run_threads(4, program)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_heads_step_with_the_settings_of_their_block(name: str) -> None:
    settings = OptimiserSettings(name=name, lr=0.2, momentum=0.8, weight_decay=0.01)
    block = four_blocks().build(0)
    block.optimisers["exact"] = make(block.module, settings)
    head = Head("mlp:3", block, 4, 10)
    exact = block.optimisers["exact"]
    assert type(head.optimiser) is type(exact)
    assert [g["weight_decay"] for g in head.optimiser.param_groups] == [0.01, 0.0]
    given, found = exact.param_groups[0], head.optimiser.param_groups[0]
    changing = ("params", "weight_decay")
    assert {k: v for k, v in found.items() if k not in changing} == {
        k: v for k, v in given.items() if k not in changing
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"style": "lazy"}, "style is 'lazy'; choose one of greedy, overlapping, chunked"),
        ({"chunks": 0}, "chunks is 0; it must be at least 1"),
        ({"head": "mlp:0"}, "head is 'mlp:0'; write linear, or mlp:WIDTH"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LocalUpdates(**settings)
