"""Delayed gradients equal their formulas, written down a second time."""

import pytest
import torch
from problems import make_problem
from torch import Tensor, nn
from torch.func import functional_call

from solvers import DDG, FDG, FeaturesReplay
from solvers.state import Tensors

LR, MOMENTUM = 0.1, 0.9
METHODS = {"ddg": DDG(), "features-replay": FeaturesReplay(), "fdg": FDG(gradient_shrinking=0.7)}


class Simulation:
    """All blocks in one process, from the formulas alone: every version of every weight is kept."""

    def __init__(self, problem, solver):
        self.problem, self.solver = problem, solver
        self.K = len(problem.blocks)
        self.modules = [problem.blocks.module(k).train() for k in range(self.K)]
        self.w = [[dict(m.named_parameters())] for m in self.modules]
        self.w = [[{n: p.detach().clone() for n, p in v[0].items()}] for v in self.w]
        self.v: list[Tensors] = [{} for _ in range(self.K)]
        self.inputs: list[dict[int, Tensor]] = [{} for _ in range(self.K)]
        self.adjoints: list[dict[int, Tensor]] = [{} for _ in range(self.K + 1)]

    def run(self):
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

    def stepped(self, k, n, i):
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
def test_fifty_steps_equal_a_simulation_from_the_formulas(name, cuts):
    def problem():
        return make_problem(5, units=3, cuts=cuts, batch=4, batches=50)

    wanted = Simulation(problem(), METHODS[name]).run()
    found = problem()

    def program(block, links):
        mine = METHODS[name].start(block, links, found.setup(window=0))
        mine.train(found.window())
        mine.drain()
        assert mine.state().flight == {}

    found.on_every_block(program, MOMENTUM)
    for key, parameter in found.blocks.model.named_parameters():
        torch.testing.assert_close(parameter, wanted[key], rtol=1e-9, atol=1e-11)
    norms = [m for m in found.blocks.model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {int(norm.num_batches_tracked) for norm in norms} == {50}
