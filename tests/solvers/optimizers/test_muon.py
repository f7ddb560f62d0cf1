"""Muon against its formula, against torch's, and its other rules against torch's own."""

import pytest
import torch
from answers import refusal
from torch import nn

from hybrid.solvers.optimizers.muon import Muon

SHAPES = (6, 4), (4, 9), (5, 5)


def matrices(dtype=torch.float32, shapes=SHAPES):
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=dtype)) for shape in shapes]


def steps(parameters, optimizer, count=4):
    random = torch.Generator().manual_seed(1)
    for _ in range(count):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=random, dtype=p.dtype)
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("more", [{}, {"nesterov": False}], ids=str)
def test_in_bfloat16_it_is_torchs_muon_bit_for_bit(more):
    mine, theirs = matrices(), matrices()
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, **more}
    found = steps(mine, Muon(mine, ns_dtype="bfloat16", **settings))
    assert all(map(torch.equal, found, steps(theirs, torch.optim.Muon(theirs, **settings))))


def test_it_is_its_formula_in_float64():
    lr, mu, wd, (w,) = 0.02, 0.9, 0.1, matrices(torch.float64, [(8, 3, 2)])
    expected, b = w.detach().clone(), torch.zeros(8, 6, dtype=torch.float64)
    optimizer = Muon([w], lr=lr, momentum=mu, weight_decay=wd)
    random = torch.Generator().manual_seed(2)
    for _ in range(5):
        w.grad = torch.randn(w.shape, generator=random, dtype=w.dtype)
        g = w.grad.reshape(8, 6)
        b = mu * b + g
        x = g + mu * b
        x = x / x.square().sum().sqrt()
        # an odd polynomial of the matrix is that polynomial of its singular values
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        move = (u * s) @ v
        expected = (1 - lr * wd) * expected - lr * (8 / 6) ** 0.5 * move.reshape(w.shape)
        optimizer.step()
    torch.testing.assert_close(w.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "torchs"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
        ("adamw", lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.01)),
    ],
)
def test_another_rule_is_torchs_own_bit_for_bit(rule, torchs):
    shapes = [(3,), (2, 2)]
    mine, theirs, beside = matrices(shapes=shapes), matrices(shapes=shapes), matrices()
    group = {"params": mine, "rule": rule, "lr": 0.1, "weight_decay": 0.01}
    found = steps(mine, Muon([{"params": beside}, group], momentum=0.9))
    assert all(map(torch.equal, found, steps(theirs, torchs(theirs))))


def test_vectors_in_a_group_of_muons_and_an_unknown_format_are_refused():
    said = refusal(Muon, [nn.Parameter(torch.zeros(3))])
    assert 'was given a parameter of shape (3,): put it into a group with "rule"' in said
    assert "ns_dtype is 'x'; choose one of " in refusal(Muon, matrices(), ns_dtype="x")
