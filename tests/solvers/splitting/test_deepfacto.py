"""A factorization layer as a constraint of block-ADMM: its visits, and both sides of its cut."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from problems import buffers, make_problem, recorded
from torch import nn

from hybrid.networks.partition import split
from hybrid.solvers import BlockADMM
from hybrid.solvers.layers.projection import EPSILON, Factorization
from hybrid.solvers.splitting.factors import FactorCut
from hybrid.solvers.splitting.variables import Store

RHO, RHO_M, RANK = 0.5, 0.25, 2
ORDERS = pytest.mark.parametrize("order", ["jacobi", "gauss-seidel"])
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rows_of(z):
    """(N, C, H, W) -> (N H W, C)."""
    return z.permute(0, 2, 3, 1).reshape(-1, z.shape[1]) if z.dim() == 4 else z


def shaped(rows, like):
    """(N H W, c) -> (N, c, H, W)."""
    if like.dim() == 2:
        return rows
    N, _, H, W = like.shape
    return rows.reshape(N, H, W, -1).permute(0, 3, 1, 2)


class Factors:
    """M, S, V and the averages of one cut, stepped by the class docstring's formulas."""

    def __init__(self, M, S, averages):
        self.M, self.S, (self.cross, self.gram) = M.clone(), S.clone(), averages
        self.V = torch.zeros(len(M), S.shape[1], dtype=S.dtype)

    @property
    def composed(self):
        return self.M @ self.S

    def update(self, z, memory=0.9):
        T, S = (z + self.V).clamp_min(0), self.S
        M = self.M * (T @ S.T) / (self.M @ S @ S.T + EPSILON)
        self.cross = memory * self.cross + (1 - memory) * (M.T @ T) / len(T)
        self.gram = memory * self.gram + (1 - memory) * (M.T @ M) / len(T)
        self.M, self.S = M, S * self.cross / (self.gram @ S + EPSILON)

    def step(self, anchor, p_in):
        z = (RHO * anchor + RHO_M * (self.composed - self.V) - p_in) / (RHO + RHO_M)
        self.V = self.V + z - self.composed
        return z


def cut_of(z):
    torch.manual_seed(0)
    store = Store(len(z), "float32")
    cut = FactorCut(Factorization(z.shape[1], RANK).double(), store)
    cut.record(slice(0, len(z)), z)
    return cut, store


def factors_of(cut, store, rows):
    state = cut.state()
    averages = state["factors.cross"].clone(), state["factors.gram"].clone()
    return Factors(rows_of(store.get("codes", rows)), cut.layer.dictionary, averages)


SHAPES = pytest.mark.parametrize("shape", [(4, 5, 3, 2), (6, 5)], ids=["images", "vectors"])


def normal(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@SHAPES
def test_a_record_starts_with_an_optimal_dictionary_and_no_dual(shape):
    M, S = normal(shape[0] * 6, RANK).abs(), normal(RANK, shape[1], seed=2).abs()
    like = torch.empty(shape)
    z = shaped((M @ S)[: rows_of(like).shape[0]], like)
    cut, store = cut_of(z)
    rows = slice(0, shape[0])
    relative = (cut.input(rows) - z).norm() / z.norm()
    assert float(relative) < 0.15
    assert not store.get("factor_dual", rows).any()


def factored(units=2, cut=1, batches=2, extra=()):
    """A problem whose block behind `cut` starts with a factorization layer."""
    problem = make_problem(seed=3, units=units, cuts=[str(cut)], batch=4, batches=batches)
    torch.manual_seed(0)
    children = list(problem.blocks.model)
    children.insert(cut, Factorization(3, RANK).double())
    # as in training: what a checkpoint gives back is laid out like this
    model = nn.Sequential(*children).to(memory_format=torch.channels_last)
    return replace(problem, blocks=split(model, cuts=[str(cut), *extra]))


def admm(**settings):
    return BlockADMM(**({"rho": RHO, "factor_rho": RHO_M} | settings))


@ORDERS
@pytest.mark.parametrize(("kept", "extra"), [(False, ("3",)), (True, ())], ids=["windowed", "kept"])
def test_both_sides_of_the_cut_agree_on_z_and_u(order, kept, extra):
    problem = factored(units=3, extra=extra)

    def program(block, links):
        mine = recorded(problem, admm(order=order), block, links, sweeps=2, carried=kept)
        before = buffers(block, mine, problem.samples)
        mine.train(problem.window(1 if kept else 2))
        return buffers(block, mine, problem.samples) | {"was": before.get("lam")}

    below, above = problem.on_every_block(program)[:2]
    assert torch.equal(below["target"], above["lam"])
    assert torch.equal(below["kappa_out"], above["kappa_in"])
    assert not torch.equal(above["lam"], above["was"])
    assert bool((above["lam"] < 0).any()), "Z itself is free: only M S is non-negative"


def test_a_visit_of_both_blocks_is_that_of_the_formulas():
    problem = factored(batches=1)
    (batch,) = problem.batches
    N, rows = len(batch), slice(0, len(batch))
    blocks = [deepcopy(problem.blocks.module(k)).train() for k in range(2)]
    solver = admm(local_lr=0.5, order="jacobi")

    def program(block, links):
        mine = recorded(problem, solver, block, links, carried=True)
        found = {}
        if block.last:
            factors, z = (
                factors_of(mine._factors, mine.store, rows),
                mine.variables.lam(rows).clone(),
            )
            found = {"factors": factors, "z": z, "kappa": mine.store.get("kappa_in", rows).clone()}
        mine.train(problem.window())
        if block.last:
            found |= {
                "new_z": mine.variables.lam(rows).clone(),
                "new_kappa": mine.store.get("kappa_in", rows).clone(),
                "V": rows_of(mine.store.get("factor_dual", rows)),
            }
        return found

    _, got = problem.on_every_block(program, momentum=0.0)
    factors, z, U = got["factors"], got["z"], got["kappa"] / RHO
    factors.update(rows_of(z))
    x = blocks[0](batch.images())
    seen = shaped(factors.composed, z).requires_grad_()
    head = nn.Sequential(*list(blocks[1])[1:])
    phi = nn.functional.cross_entropy(head(seen), batch.labels())
    below = RHO / 2 * (z - x + U).square().sum() / N
    p_in = N * torch.autograd.grad(phi, seen, retain_graph=True)[0]
    with torch.no_grad():
        for module, loss in ((blocks[0], below), (head, phi)):
            weights = list(module.parameters())
            gradients = torch.autograd.grad(loss, weights, retain_graph=True)
            for w, g in zip(weights, gradients, strict=True):
                w -= 0.5 * batch.learning_rate * g
    new = factors.step(rows_of((x - U).detach()), rows_of(p_in))
    torch.testing.assert_close(got["new_z"], shaped(new, z), **CLOSE)
    torch.testing.assert_close(got["V"], factors.V, **CLOSE)
    dual = RHO * (U + shaped(new, z) - x.detach())
    torch.testing.assert_close(got["new_kappa"], dual, **CLOSE)
    torch.testing.assert_close(problem.blocks.module(1)[0].dictionary, factors.S, **CLOSE)
    for k, module in enumerate(blocks):
        for ours, theirs in zip(
            problem.blocks.module(k).parameters(), module.parameters(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, **CLOSE)
