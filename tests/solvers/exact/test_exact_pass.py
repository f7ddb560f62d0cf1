"""The exact pass: bit for bit the plain loop, pipelined, recorded."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import exact_pass, gradients, make_problem, problems, without_batch_norm
from torch import nn
from trainings import assert_same

from hybrid.solvers import PhaseStats, Record


def exact_gradients(problem, **given_):
    def program(block, links):
        batch = problem.batches[0]
        run = exact_pass(block, links, **given_)
        run.gradient(batch, slice(0, len(batch)), None, PhaseStats())
        return gradients(block)

    problem.blocks.model.zero_grad()
    return {k: v for part in problem.on_every_block(program) for k, v in part.items()}


def trained(problem, **given_):
    """All tensors of the network after training on the window."""
    problem.on_every_block(
        lambda block, links: exact_pass(block, links, **given_).train(problem.window())
    )
    return problem.tensors()


class AuxiliaryStore:
    """A recorder that keeps its records."""

    def __init__(self):
        self.records: list[Record] = []

    def record(self, record):
        self.records.append(record)


def observed(problem, **given_):
    """What is recorded on each rank."""

    def program(block, links):
        kept = AuxiliaryStore()
        exact_pass(block, links, **given_).observe(problem.window(), kept)
        return kept.records

    return problem.on_every_block(program)


@given(problems(min_blocks=1))
def test_one_micro_batch_gives_the_plain_gradients_bit_for_bit(problem):
    plain = problem.plain_gradients(problem.batches[0])
    assert_same(exact_gradients(problem), plain)


@given(problems(min_blocks=1), st.integers(1, 9))
def test_any_number_of_micro_batches_gives_the_gradient_of_the_batch_mean(problem, m):
    problem = without_batch_norm(problem)
    plain = problem.plain_gradients(problem.batches[0])
    found = exact_gradients(problem, micro_batches=m)
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e3])
def test_clipping_equals_torch_bit_for_bit_over_any_number_of_blocks(max_norm):
    split, plain = (make_problem(seed=7, units=3, cuts=[1, 3], batch=6) for _ in range(2))
    model, batch = plain.blocks.model, plain.batches[0]
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    nn.functional.cross_entropy(model(batch.images()), batch.labels()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    sgd.step()
    found = trained(split, clip_norm=max_norm)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_observing_records_without_moving_weights_or_statistics():
    problem = make_problem(seed=2, units=3, cuts=[2], batch=5, batches=2)
    before = problem.tensors()
    ranks = observed(problem)
    for kept, held in zip(ranks, ({"out", "p_out"}, {"lam", "p_in"}), strict=True):
        for r in kept:
            assert {n for n in ("lam", "p_in", "out", "p_out") if getattr(r, n) is not None} == held
    assert [[r.rows for r in kept] for kept in ranks] == [[slice(0, 5), slice(5, 10)]] * 2
    assert_same(problem.tensors(), before)
    assert all(p.grad is None for p in problem.blocks.model.parameters())


@pytest.mark.parametrize(
    ("messages", "close"),
    [("float32", 1e-7), *((m, 0.02) for m in ("bfloat16", "float16", "int8"))],
)
def test_records_are_in_per_sample_scale(messages, close):
    problem = make_problem(seed=4, units=2, cuts=[2], batch=5)
    model, batch = problem.blocks.model, problem.batches[0]
    inner = model[:2](batch.images()).detach().requires_grad_()
    nn.functional.cross_entropy(model[2:](inner), batch.labels(), reduction="sum").backward()
    ((below,), (above,)) = observed(problem, messages=messages)
    assert inner.grad is not None
    for p in (below.p_out, above.p_in):
        torch.testing.assert_close(p, inner.grad, rtol=close, atol=close * float(inner.grad.max()))


def distance(found, exact):
    """Relative Euclidean distance of two gradients of the whole network."""
    assert found.keys() == exact.keys()
    error = torch.stack([(found[name] - exact[name]).square().sum() for name in exact]).sum()
    return float((error / torch.stack([g.square().sum() for g in exact.values()]).sum()).sqrt())


@pytest.mark.parametrize(("cuts", "m"), [([1], 3), ([1, 3], 1), ([1, 3], 3)])
def test_recomputing_runs_all_blocks_but_the_last_twice_and_gives_the_same_bits(cuts, m):
    kept, again = (make_problem(seed=8, units=3, cuts=cuts, batch=6, batches=3) for _ in range(2))
    expected, calls = trained(kept, micro_batches=m), []
    assert any("running" in name for name in expected)
    parts = [again.blocks.module(k) for k in range(len(cuts) + 1)]
    norms = [[m for m in part.modules() if isinstance(m, nn.BatchNorm2d)] for part in parts]
    for norm in chain(*norms):
        norm.register_forward_hook(lambda *_: calls.append(1))
    assert_same(trained(again, micro_batches=m, recompute=True), expected)
    assert len(calls) == 3 * m * (2 * sum(map(len, norms)) - len(norms[-1]))
    assert all(norm.track_running_stats for norm in chain(*norms))


@pytest.mark.parametrize("m", [1, 4])
def test_float16_does_not_lose_the_tiny_adjoints_of_a_large_mini_batch(m):
    problem = make_problem(seed=9, units=2, cuts=[2], batch=256)
    with torch.no_grad():
        # per-sample adjoints of about 1e-5: over the 256 of the mean, half of float16's least
        problem.blocks.model[-1].weight.mul_(1e-3)
    exact = exact_gradients(problem, micro_batches=m)
    rounded = exact_gradients(problem, micro_batches=m, messages="float16")
    head = {"5.weight", "5.bias"}
    first = [{k: v for k, v in g.items() if k not in head} for g in (rounded, exact)]
    assert 0 < distance(*first) < 0.01


@pytest.mark.parametrize(
    ("messages", "sample"), [("float32", 4 * 108), ("float16", 2 * 108), ("int8", 108 + 3 * 4)]
)
def test_a_pass_sends_the_bytes_of_the_wire_over_every_cut_both_ways(messages, sample):
    """Of 3 x 6 x 6 numbers a sample; int8 has the scale of each channel, too."""
    problem = make_problem(seed=3, units=2, cuts=[1, 2], batch=6).single_precision()

    def program(block, links):
        run = exact_pass(block, links, micro_batches=3, messages=messages)
        run.gradient(problem.batches[0], slice(0, 6), None, PhaseStats())
        return links.traffic.bytes_sent

    cut = 6 * sample
    assert problem.on_every_block(program) == [
        {"next": cut, "previous": 0, "peers": 0},
        {"next": cut, "previous": cut, "peers": 0},
        {"next": 0, "previous": cut, "peers": 0},
    ]
