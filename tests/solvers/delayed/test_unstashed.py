"""Backward passes at the newest weights against their formula, written out layer by layer."""

import pytest
import torch
from problems import Fixed, Problem
from torch import nn
from trainings import assert_same
from unit_steps import MOMENTUM, trained, unit_problem

from hybrid import split
from hybrid.solvers import DDG, FDG, Batch
from hybrid.solvers.engine.unstashed import activations_kept, activations_replaced

WIDTH, SAMPLES = 5, 8


def layers(K, batches=7):
    """2 K - 1 layers of tanh(x W^T + b) and a linear one, two in each block."""
    torch.manual_seed(1)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * K - 1)]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH)).double()
    x = torch.randn(batches * SAMPLES, WIDTH, dtype=torch.float64)
    source = Fixed(x, torch.randint(WIDTH, (len(x),)))
    ids = torch.arange(len(x)).split(SAMPLES)
    rates = [0.3 / (t + 1) for t in range(batches)]
    return Problem(
        split(model, cuts=[f"{2 * k}.0" for k in range(1, K)]),
        [Batch(i, rate, source, t) for t, (i, rate) in enumerate(zip(ids, rates, strict=True))],
    )


class Newest:
    """One process with one version of the weights: a micro-batch keeps inputs and outputs only."""

    def __init__(self, problem, hops, m):
        self.K, self.hops, self.m, self.batches = len(problem.blocks), hops, m, problem.batches
        linear = [x for x in problem.blocks.model.modules() if isinstance(x, nn.Linear)]
        self.w = [[x.weight.detach().clone(), x.bias.detach().clone()] for x in linear]
        self.v = [[torch.zeros_like(x) for x in pair] for pair in self.w]
        self.g = [[torch.zeros_like(x) for x in pair] for pair in self.w]
        self.parts = [
            (batch, rows)
            for batch in problem.batches
            for rows in torch.arange(SAMPLES).tensor_split(m)
        ]
        self.x, self.p = {}, {}

    def run(self):
        N = len(self.parts)
        for n in range(N + self.hops * (self.K - 1)):
            if n < N:
                batch, rows = self.parts[n]
                self.x[n] = [batch.images()[rows]]
                for i, (w, b) in enumerate(self.w):
                    x = self.x[n][-1] @ w.T + b
                    self.x[n].append(x if i == len(self.w) - 1 else torch.tanh(x))
            for k in reversed(range(self.K)):
                i = n - self.hops * (self.K - 1 - k)
                if 0 <= i < N:
                    self.backward(k, i, self.parts[i][0].learning_rate)
        return self.w

    def backward(self, k, n, rate):
        batch, rows = self.parts[n]
        if k == self.K - 1:
            y = nn.functional.one_hot(batch.labels()[rows], WIDTH)
            self.p[n] = (self.x[n][-1].softmax(1) - y) / SAMPLES
        for i in (2 * k + 1, 2 * k):
            p, x = self.p[n], self.x[n]
            p = p if i == len(self.w) - 1 else p * (1 - x[i + 1] ** 2)
            self.g[i][0] += p.T @ x[i]
            self.g[i][1] += p.sum(0)
            self.p[n] = p @ self.w[i][0]  # as they are at this tick
        if n % self.m == self.m - 1:
            for i in (2 * k, 2 * k + 1):
                for w, v, g in zip(self.w[i], self.v[i], self.g[i], strict=True):
                    v.mul_(MOMENTUM).add_(g)
                    w.sub_(rate * (g + MOMENTUM * v))
                    g.zero_()


@pytest.mark.parametrize(
    ("solver", "K", "m"),
    [(DDG, 3, 1), (DDG, 4, 2), (DDG, 2, 4), (FDG, 3, 2)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_backward_pass_takes_the_newest_weights_and_the_activations_of_its_forward_pass(
    solver, K, m
):
    expected = Newest(layers(K), 2 if solver is FDG else 1, m).run()
    found = trained(layers(K), solver(micro_batches=m, stash=False))
    for pair, names in zip(expected, zip(*[iter(found)] * 2, strict=True), strict=True):
        for value, name in zip(pair, names, strict=True):
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("at", [1, 3])
def test_what_is_under_way_goes_on_after_a_checkpoint_with_the_same_bits(at):
    solver = DDG(micro_batches=2, stash=False)
    expected = trained(unit_problem(4, 6, 8), solver)
    assert_same(trained(unit_problem(4, 6, 8), solver, at), expected)
    other = trained(unit_problem(4, 6, 8), DDG(micro_batches=2))
    assert any(not torch.equal(other[name], tensor) for name, tensor in expected.items())


def test_with_weights_that_do_not_move_it_is_the_same_as_with_a_stash():
    stashed = trained(unit_problem(4).frozen(), DDG(micro_batches=2))
    assert_same(trained(unit_problem(4).frozen(), DDG(micro_batches=2, stash=False)), stashed)


def test_activations_of_another_pass_are_refused():
    module, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    for kept in ({}, {"activation 00000": torch.ones(2, 4)}, dict.fromkeys("abc", x)):
        with (
            pytest.raises(ValueError, match="other activations under way"),
            activations_replaced(module, kept),
        ):
            module(x).tanh()


def test_an_activation_that_is_changed_in_place_is_an_error_as_it_is_of_autograds():
    module, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    with activations_kept(module, {}):
        out = module(x).sigmoid()
    out.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"an activation \(2, 3\) that the backward pass needs"):
        out.sum().backward()
