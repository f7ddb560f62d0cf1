"""Delayed gradients equal their formulas, written down a second time, and plain SGD at K = 1."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem, make_problem
from torch import Tensor, nn
from torch.func import functional_call

from hybrid.links import run_threads, run_virtual
from solvers import DDG, FDG, Backprop, FeaturesReplay
from solvers.delayed import Delayed

LR, MOMENTUM = 0.1, 0.9
METHODS = {
    "ddg": DDG(),
    "features-replay": FeaturesReplay(),
    "fdg": FDG(gradient_shrinking=0.7),
}


def trained(problem: Problem, solver: Delayed, run: Any = run_threads) -> dict[str, Tensor]:
    """The weights after all mini-batches, the pipeline drained."""

    def program(links: Any) -> dict[str, Tensor]:
        block = problem.build(links.rank, LR, MOMENTUM)
        mine = deepcopy(solver)
        mine.prepare(block, 0, False)
        mine.train(block, links, problem.window())
        mine.drain(block, links)
        module = block.module
        return {module.global_name(n): p.detach().clone() for n, p in module.named_parameters()}

    ranks = run(len(problem.blocks), program)
    return {name: tensor for rank in ranks for name, tensor in rank.items()}


class Simulation:
    """All blocks in one process, from the formulas alone: every version of every weight is kept."""

    def __init__(self, problem: Problem, solver: Delayed) -> None:
        self.problem, self.solver = problem, solver
        self.K = len(problem.blocks)
        self.modules = [problem.blocks.module(k).train() for k in range(self.K)]
        self.w = [[dict(m.named_parameters())] for m in self.modules]
        self.w = [[{n: p.detach().clone() for n, p in v[0].items()}] for v in self.w]
        self.v: list[dict[str, Tensor]] = [{} for _ in range(self.K)]
        self.inputs: list[dict[int, Tensor]] = [{} for _ in range(self.K)]
        self.adjoints: list[dict[int, Tensor]] = [{} for _ in range(self.K + 1)]

    def run(self) -> dict[str, Tensor]:
        T = len(self.problem.batches)
        for n in range(T + 2 * self.K):
            if n < T:
                x = self.problem.batches[n].images()
                for k in range(self.K):
                    self.inputs[k][n] = x
                    x = functional_call(self.modules[k], self.w[k][n], (x,)).detach()
            for k in reversed(range(self.K)):
                i = n - self.solver.delay(k, self.K)
                if 0 <= i < T:
                    self.w[k].append(self.stepped(k, n, i))
                elif n < T:
                    self.w[k].append(self.w[k][-1])
        return {
            self.modules[k].global_name(name): tensor
            for k in range(self.K)
            for name, tensor in self.w[k][-1].items()
        }

    def stepped(self, k: int, n: int, i: int) -> dict[str, Tensor]:
        """w_k after its step on mini-batch i at tick n."""
        at = self.w[k][i if isinstance(self.solver, DDG) else -1]
        w = {name: tensor.clone().requires_grad_() for name, tensor in at.items()}
        lam = self.inputs[k][i].clone().requires_grad_()
        out = functional_call(self.modules[k], w, (lam,))
        if k == self.K - 1:
            batch = self.problem.batches[i]
            out = nn.functional.cross_entropy(out, batch.labels())
            wanted = torch.autograd.grad(out, [lam, *w.values()])
        else:
            wanted = torch.autograd.grad(out, [lam, *w.values()], self.adjoints[k + 1][i])
        p, *gradients = wanted
        b = self.solver.gradient_shrinking if isinstance(self.solver, FDG) else 1.0
        self.adjoints[k][i] = b * p
        new = {}
        for (name, value), g in zip(self.w[k][-1].items(), gradients, strict=True):
            v = self.v[k][name] = MOMENTUM * self.v[k].get(name, torch.zeros_like(g)) + g
            new[name] = value - LR * (g + MOMENTUM * v)
        return new


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cuts", [[2], [1, 2, 3]], ids=["K = 2", "K = 4"])
def test_fifty_steps_equal_a_simulation_from_the_formulas(name: str, cuts: list[int]) -> None:
    def problem() -> Problem:
        return make_problem(5, units=3, cuts=cuts, batch=4, batches=50)

    wanted = Simulation(problem(), METHODS[name]).run()
    found = trained(problem(), METHODS[name])
    assert found.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", METHODS)
def test_one_block_is_plain_sgd_bit_for_bit(name: str) -> None:
    def problem() -> Problem:
        return make_problem(1, units=2, cuts=[], batch=4, batches=8)

    plain = problem()
    model = plain.blocks.model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
    for batch in plain.batches:
        nn.functional.cross_entropy(model(batch.images()), batch.labels()).backward()
        sgd.step()
        sgd.zero_grad()
    found = trained(problem(), METHODS[name])
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", METHODS)
def test_virtual_clocks_do_not_change_a_bit(name: str) -> None:
    def problem() -> Problem:
        return make_problem(2, units=3, cuts=[1, 3], batch=4, batches=9)

    threads, virtual = (
        trained(problem(), METHODS[name], run) for run in (run_threads, run_virtual)
    )
    assert all(torch.equal(threads[key], virtual[key]) for key in threads)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(list(METHODS)), st.integers(0, 10), st.integers(2, 4), st.booleans())
def test_a_run_goes_on_with_what_was_under_way(name, stop, blocks, replaced) -> None:
    """Half a window here, the state into new blocks, the rest there: the same bits."""
    cuts, batches = [1, 2, 3][: blocks - 1], 10

    def problem() -> Problem:
        return make_problem(stop, units=3, cuts=cuts, batch=3, batches=batches)

    whole = trained(problem(), METHODS[name])
    halves = problem()

    def program(links: Any) -> dict[str, Tensor]:
        block = halves.build(links.rank, LR, MOMENTUM)
        first, second = halves.window(), halves.window()
        first.batches, second.batches = halves.batches[:stop], halves.batches[stop:]
        mine = deepcopy(METHODS[name])
        mine.prepare(block, 0, False)
        mine.train(block, links, first)
        state = {k: v.clone() for k, v in mine.flight_state(block, links).items()}
        if replaced:
            mine = deepcopy(METHODS[name])
            mine.prepare(block, 0, False)
            mine.load_flight_state(block, state)
        mine.train(block, links, second)
        mine.drain(block, links)
        module = block.module
        return {module.global_name(n): p.detach().clone() for n, p in module.named_parameters()}

    found = {k: v for rank in run_threads(blocks, program) for k, v in rank.items()}
    assert all(torch.equal(found[key], whole[key]) for key in whole)


@pytest.mark.parametrize("name", METHODS)
def test_a_drained_pipeline_has_trained_every_mini_batch_on_every_block(name: str) -> None:
    problem = make_problem(0, units=3, cuts=[1, 2, 3], batch=3, batches=2)

    def program(block, links):
        steps = 0
        step = block.step

        def counting(kind: str, rate: float) -> None:
            nonlocal steps
            steps += 1
            step(kind, rate)

        block.step = counting
        mine = deepcopy(METHODS[name])
        mine.prepare(block, 0, False)
        mine.train(block, links, problem.window())
        mine.drain(block, links)
        assert mine.flight_state(block, links) == {}
        norms = [m for m in block.module.modules() if isinstance(m, nn.BatchNorm2d)]
        assert all(int(norm.num_batches_tracked) == 2 for norm in norms)
        return steps

    assert problem.on_every_block(program) == [2] * 4


def test_a_serial_pass_after_a_drain_is_exact() -> None:
    """What the switch leaves behind is weights and momenta, and nothing else."""
    problem = make_problem(4, units=3, cuts=[2], batch=4, batches=6)

    def program(block, links):
        mine = DDG()
        mine.prepare(block, 0, False)
        mine.train(block, links, problem.window())
        mine.drain(block, links)
        state = (
            deepcopy(block.module.state_dict()),
            deepcopy(block.optimisers["exact"].state_dict()),
        )
        Backprop().train(block, links, problem.window())
        after = {k: v.clone() for k, v in block.module.state_dict().items()}
        fresh = problem.build(links.rank, LR, MOMENTUM)
        fresh.module.load_state_dict(state[0])
        fresh.optimisers["exact"].load_state_dict(state[1])
        Backprop().train(fresh, links, problem.window())
        return all(torch.equal(after[k], v) for k, v in fresh.module.state_dict().items())

    assert problem.on_every_block(program) == [True, True]


@pytest.mark.parametrize("value", [0.0, 1.5, -1.0])
def test_a_shrinking_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"gradient_shrinking is .* it must lie in \(0, 1\]"):
        FDG(gradient_shrinking=value)
