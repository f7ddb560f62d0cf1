"""Local steps in the gaps of a pipelined pass, against the same in one process."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import assert_same, exact_pass, handed_over, make_problem, without_batch_norm
from torch import Tensor, nn

from hybrid.solvers import AugmentedLagrangian
from hybrid.solvers.base import Setup
from hybrid.solvers.exact.filling import BubbleFill, stored_batches
from hybrid.solvers.exact.gaps import Gaps
from hybrid.solvers.exact.pipeline import Kind

KINDS = pytest.mark.parametrize("kind", ["added", "own"])
SOLVER = AugmentedLagrangian(beta=0.3, local_lr=0.7)
THREE = [Gaps(5, 0), Gaps(3, 4), Gaps(0, 6)]
BATCH = 6


def small(cuts, seed=1, batches=5, batch_norm=True):
    """Mini-batches of 6 with a learning rate each of their own."""
    problem = make_problem(seed=seed, units=3, cuts=cuts, batch=BATCH, batches=batches)
    problem = problem if batch_norm else without_batch_norm(problem)
    rates = [0.1 / (1 + i) for i in range(batches)]
    numbered = zip(problem.batches, rates, strict=True)
    return replace(problem, batches=[replace(b, learning_rate=r) for b, r in numbered])


def fill_of(problem, solver, gaps, kind, block, links=None):
    """Local work with a store of the records it needs."""
    setup = Setup(problem.shapes, BATCH, stored_batches(gaps, BATCH), fills=True)
    return BubbleFill(solver.start(block, links, setup), gaps, BATCH, kind)


def filled(problem, gaps, m, kind="added", solver=SOLVER, rates=None):
    """All tensors of the network after a pass a mini-batch; gaps None: without local work."""

    def program(block, links):
        block.rates |= rates or {}
        fill = None
        if gaps is not None:
            fill = fill_of(problem, solver, gaps[block.index], kind, block, links)
        exact_pass(block, links, micro_batches=m).train(problem.window(), None, fill)

    problem.on_every_block(program)
    return problem.tensors()


def simulated(problem, gaps, m, kind, solver):
    """The parameters after the same passes, by hand; for networks without BatchNorm."""
    K = len(problem.blocks)
    blocks = [problem.build(k) for k in range(K)]
    if solver.momentum is not None:
        for block in blocks:
            block.optimizers["local"] = torch.optim.SGD(
                block.module.parameters(), momentum=solver.momentum, nesterov=solver.momentum > 0
            )
    records: list[dict[str, list[Tensor]]] = []
    for batch in problem.batches:
        x, outs = batch.images(), []
        for block in blocks:
            x = block.module(x)
            x.retain_grad()
            outs.append(x)
        loss = nn.functional.cross_entropy(x, batch.labels())
        loss.backward()
        for k, block in enumerate(blocks):
            parameters = list(block.module.parameters())
            exact = [p.grad.clone() for p in parameters]
            local = local_gradient(block, records, sum(gaps[k]), solver)
            rate = batch.learning_rate
            count = min(sum(gaps[k]), len(records) * len(batch))
            c = solver.local_lr * min(1, count / len(batch))
            if local is None:
                step(block, exact, rate)
            elif kind == "added":
                scaled = [g + c * l for g, l in zip(exact, local, strict=True)]
                step(block, scaled, rate)
            else:
                step(block, exact, rate)
                step(block, local, rate * c, "local")
        inputs = [batch.images(), *outs[:-1]]
        p = [t.grad * len(batch) for t in outs]
        kept = {"lam": inputs, "x": outs, "p": p, "y": [batch.labels()] * K}
        records.insert(0, {name: [t.detach() for t in held] for name, held in kept.items()})
    return {name: p.detach() for name, p in problem.blocks.model.named_parameters()}


def local_gradient(block, records, n, solver):
    """Of the mean local loss of the first n samples of the records, the newest record first."""
    if not records or not n:
        return None

    def recorded(name):
        return torch.cat([record[name][block.index] for record in records])[:n]

    x = block.module(recorded("lam"))
    if block.last:
        loss = nn.functional.cross_entropy(x, recorded("y"))
    else:
        r = recorded("x") - x
        loss = (solver.beta * r.square() - recorded("p") * r).sum() / len(x)
    gradients = list(torch.autograd.grad(loss, list(block.module.parameters())))
    if solver.clip_norm:
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        gradients = [g * min(1.0, solver.clip_norm / float(norm)) for g in gradients]
    return gradients


def step(block, gradients, rate, kind="exact"):
    for p, gradient in zip(block.module.parameters(), gradients, strict=True):
        p.grad = gradient
    block.step(kind, rate)


@KINDS
def test_without_gaps_training_is_plain_back_propagation_bit_for_bit(kind):
    expected = filled(small([1, 2]), None, 3)
    found = filled(small([1, 2]), [Gaps()] * 3, 3, kind)
    assert_same(found, expected)


# torch's clipping divides by the norm plus 1e-6
CLIPPED = {"clip_norm": 1e-2}, {"rtol": 1e-5, "atol": 1e-6}
EXACT = {"rtol": 1e-9, "atol": 1e-12}


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 1000),
    m=st.integers(2, 4),
    cuts=st.sampled_from([[2], [1, 3]]),
    # up to three mini-batches of work: older records are drawn on
    shares=st.lists(st.integers(0, BATCH) | st.integers(0, 3 * BATCH), min_size=5, max_size=5),
)
@pytest.mark.parametrize(
    ("kind", "more", "close"),
    [
        *((kind, *how) for kind in ("added", "own") for how in (({}, EXACT), CLIPPED)),
        *(("own", {"momentum": momentum}, EXACT) for momentum in (0.0, 0.5)),
    ],
)
def test_filled_passes_equal_those_of_one_process(kind, more, close, seed, m, cuts, shares):
    solver = replace(SOLVER, **more)
    gaps = [Gaps(shares[0], shares[1]), Gaps(shares[2], shares[3]), Gaps(0, shares[4])]
    gaps = gaps[-1 - len(cuts) :]
    found = filled(small(cuts, seed, batch_norm=False), gaps, m, kind, solver)
    expected = simulated(small(cuts, seed, batch_norm=False), gaps, m, kind, solver)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **close)


@KINDS
def test_after_roll_backs_a_local_step_is_as_small_as_its_factor_says(kind):
    """Of the second, 1/4 of its size, be it a step of its own or a part of the exact one."""
    found = filled(small([1, 3]), THREE, 2, kind, rates={"exact": 0.5, "local": 0.25})
    slower = small([1, 3])
    halved = [replace(b, learning_rate=b.learning_rate / 2) for b in slower.batches]
    solver = replace(SOLVER, local_lr=SOLVER.local_lr / 2)
    assert_same(found, filled(replace(slower, batches=halved), THREE, 2, kind, solver))


@KINDS
def test_local_work_leaves_statistics_weights_and_the_exact_gradient_alone(kind, monkeypatch):
    worked: list[Kind] = []
    work = BubbleFill.work

    def watched(fill, kind):
        module = fill.block.module
        before = {name: value.clone() for name, value in module.state_dict().items()}
        gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        samples = fill.stats.samples
        work(fill, kind)
        assert_same(module.state_dict(), before)
        for p, gradient in zip(module.parameters(), gradients, strict=True):
            assert (p.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(p.grad, gradient)
        if fill.stats.samples > samples:
            worked.append(kind)

    monkeypatch.setattr(BubbleFill, "work", watched)
    filled(small([1, 3]), THREE, 2, kind)
    assert {Kind.MIDDLE, Kind.TURN} == set(worked)


def test_an_unknown_step_is_refused_with_the_known_ones():
    problem = small([2])
    with pytest.raises(ValueError, match=r"^fill_step is 'late'; choose one of added, own$"):
        fill_of(problem, SOLVER, Gaps(1, 1), "late", problem.build(0))


def lay_out(problem):
    """As in training: what a checkpoint gives back is laid out like this."""
    problem.blocks.model.to(memory_format=torch.channels_last)
    return problem


@pytest.mark.parametrize(("kind", "at"), [("added", 1), ("own", 3)])
def test_a_run_goes_on_with_the_records_of_the_latest_mini_batches(kind, at):
    whole, parts = small([1, 3]), small([1, 3])
    for problem in (whole, parts):
        lay_out(problem)
    solver = replace(SOLVER, momentum=0.5 if kind == "own" else None)

    def program(block, links):
        gaps = THREE[block.index]
        fill = fill_of(parts, solver, gaps, kind, block, links)
        exact = exact_pass(block, links, micro_batches=2)
        exact.train(parts.window(1, 0, at), None, fill)
        state, local = handed_over(links, fill), block.optimizers["local"].state_dict()
        fill = fill_of(parts, solver, gaps, kind, block, links)
        block.optimizers["local"].load_state_dict(local)
        fill.latest = parts.batches[:at][::-1]
        fill.load_state(state)
        exact.train(parts.window(1, at), None, fill)

    parts.on_every_block(program)
    assert_same(parts.tensors(), filled(whole, THREE, 2, kind, solver))


def test_records_that_a_rest_has_ended_are_not_taken_for_those_of_the_latest_mini_batches():
    gaps = [Gaps(2 * BATCH, 0), Gaps(0, 2 * BATCH)]

    def trained(moves):
        problem = lay_out(small([2]))

        def program(block, links):
            fill = fill_of(problem, SOLVER, gaps[block.index], "added", block, links)
            exact = exact_pass(block, links, micro_batches=2)
            exact.train(problem.window(1, 0, 2), None, fill)
            fill.begin()
            exact.train(problem.window(1, 2, 3), None, fill)
            if moves:
                state = handed_over(links, fill)
                fill = fill_of(problem, SOLVER, gaps[block.index], "added", block, links)
                fill.latest = problem.batches[2::-1]
                fill.load_state(state)
            exact.train(problem.window(1, 3), None, fill)

        problem.on_every_block(program)
        return problem.tensors()

    assert_same(trained(True), trained(False))
