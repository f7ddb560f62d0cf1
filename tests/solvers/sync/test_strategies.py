"""Every strategy against its formulas, in float64, over threads."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.links import run_threads
from hybrid.solvers.block import Block
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD
from tests.solvers.sync.least_squares import LR, close, gradient, mean, problem, shares, trained


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_all_reduce_is_sgd_on_the_whole_mini_batch(replicas):
    batches, w = problem(5)
    found = trained(AllReduce(), replicas, 5)
    for step, (x, y) in enumerate(batches):
        w = w - LR * gradient(w, x, y)
        for weights in found:
            close(weights[step], w)
            assert torch.equal(weights[step], found[0][step])


@pytest.mark.parametrize("messages", ["bfloat16", "int8"])
@pytest.mark.parametrize(("strategy", "every"), [(AllReduce, 1), (partial(DiLoCo, steps=3), 3)])
def test_messages_of_fewer_bits_leave_all_replicas_equal_and_their_errors_for_later(
    strategy, every, messages
):
    narrow, whole = (trained(strategy(messages=kind), 2, 60) for kind in (messages, "float32"))
    for step in range(every - 1, 60, every):
        assert torch.equal(narrow[0][step], narrow[1][step])
    apart = [(a - b).norm() / b.norm() for a, b in zip(narrow[0], whole[0], strict=True)]
    assert 0 < max(apart) < 0.01


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("h", [1, 3, 8])
def test_local_sgd_averages_every_h_steps_and_at_the_end(replicas, h):
    batches, first = problem(7)
    w = [first] * replicas
    found = trained(LocalSGD(steps=h), replicas, 7)
    for step, (x, y) in enumerate(batches):
        parts = shares(x, y, replicas)
        w = [v - LR * gradient(v, *part) for v, part in zip(w, parts, strict=True)]
        if (step + 1) % h == 0:
            w = [mean(w, replicas)] * replicas
        for r in range(replicas):
            close(found[r][step], w[r])
    for r in range(replicas):
        close(found[r][-1], mean(w, replicas))
        assert torch.equal(found[r][-1], found[0][-1])


@pytest.mark.parametrize(("h", "lag"), [(3, 0), (3, 1), (3, 2), (20, 1)])
@pytest.mark.parametrize("replicas", [2, 4])
def test_diloco_takes_an_outer_step_after_h_steps_and_at_no_other_time(replicas, lag, h):
    """Following algorithm 1 of the paper; the evaluations between rounds leave no trace."""
    steps, eta, mu = 11, 0.6, 0.8
    batches, b = problem(steps)
    strategy = DiLoCo(steps=h, outer_lr=eta, outer_momentum=mu, lag=lag)
    found = trained(strategy, replicas, steps, seen_at=(4, 5))
    w, v, began, seen = [b] * replicas, torch.zeros(3, dtype=torch.float64), [], []
    for n, (x, y) in enumerate(batches, start=1):
        parts = shares(x, y, replicas)
        w = [u - LR * gradient(u, *part) for u, part in zip(w, parts, strict=True)]
        if n % h == 0:
            began = w
        if began and n % h == lag:
            outer_gradient = b - mean(began, replicas)
            v = mu * v + outer_gradient
            b = b - eta * (outer_gradient + mu * v)
            w, began = [b + (u - s) for u, s in zip(w, began, strict=True)], []
        for r in range(replicas):
            close(found[r][n - 1], w[r])
        if n in (5, 6):
            seen.append(mean(w, replicas))
    for r in range(replicas):
        for weights, wanted in zip(found[r][steps:], [mean(w, replicas), *seen], strict=True):
            close(weights, wanted)
        assert all(map(torch.equal, found[r][steps:], found[0][steps:]))


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (AllReduce, {"messages": "int4"}, "messages is 'int4'; choose one of float32"),
    (LocalSGD, {"steps": 0}, "steps is 0; it must be at least 1"),
    (DiLoCo, {"outer_momentum": 1.0}, r"outer_momentum is 1.0; it must lie in \[0, 1\)"),
    (DiLoCo, {"steps": 4, "lag": 4}, "lag is 4 of rounds of 4 steps: choose one below sync.steps"),
]


@pytest.mark.parametrize(("strategy", "given", "reason"), WRONG)
def test_settings_that_cannot_be_are_refused(strategy, given, reason):
    with pytest.raises(ValueError, match=reason):
        strategy(**given)


def test_buckets_leave_within_the_last_backward_pass_the_last_layers_first():
    """In the same order on all replicas, and the sums are those of one message at the end."""

    made = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))

    def program(links):
        module = copy.deepcopy(made)
        # as optimizers have them: weights, then biases
        groups = [[p for p in module.parameters() if (p.dim() > 1) == many] for many in (1, 0)]
        optimizer = torch.optim.SGD([{"params": group} for group in groups], LR)
        block = Block(module, 0, 1, {"exact": optimizer, "local": optimizer})
        block.sync = AllReduce().start(block, links.peers, 0.5)
        left, start, sent = [], links.peers.exchange, []
        links.peers.exchange = lambda pieces, expected=(): (
            sent.append(sum(map(len, pieces))),
            start(pieces, expected),
        )[1]
        hooks = [m.register_full_backward_hook(lambda *_: left.append(len(sent))) for m in module]
        loss = (
            module(torch.full((2, 300), links.place.replica + 1.0, requires_grad=True))
            .square()
            .sum()
        )
        with block.last_pass("exact"):
            loss.backward()
        assert len(hooks) == 4
        early = len(sent)
        block.step("exact", LR)
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        return left, early, [p.detach().clone() for p in module.parameters()]

    found = run_threads(1, program, replicas=2)
    assert found[0][:2] == found[1][:2]
    left, early, _ = found[0]
    assert left == sorted(left)
    assert left[-1] >= 2, "most buckets leave before the pass has ended"
    assert early == 4
    assert all(map(torch.equal, found[0][2], found[1][2]))


class Unlike(nn.Module):
    """Weights of several formats and memory orders, of odd sizes."""

    def __init__(self):
        super().__init__()
        filters = torch.zeros(3, 5, 2, 3).to(memory_format=torch.channels_last)
        self.filters, self.never = nn.Parameter(filters), nn.Parameter(torch.zeros(3))
        self.narrow = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.pairs = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))
        self.rare = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("order", ["replicas", "engine"])
def test_gradients_are_views_that_lie_in_memory_as_tensors_of_their_own(order):
    """In their weights' memory order, aligned for products; the next step leaves them alone."""
    weights = dict(Unlike().named_parameters())
    terms = [[{n: torch.randn_like(p) for n, p in weights.items()} for _ in "012"] for _ in "01"]

    def program(links):
        module, mine = Unlike(), links.place.replica
        block = Block(module, 0, 1, {"exact": torch.optim.SGD(module.parameters(), LR)})
        block.sync = AllReduce(order=order).start(block, links.peers, 1 / 3)
        found = []
        for step in terms:
            for name, p in module.named_parameters():
                unused = name == "never" or (name == "rare" and mine != 1)
                p.grad = None if unused else step[mine][name].detach().clone()
            block.sync.before_step("exact", LR)
            found.append({n: p.grad for n, p in module.named_parameters()})
        return found

    for steps in run_threads(1, program, replicas=3):
        for step, found in zip(terms, steps, strict=True):
            assert found.pop("never") is None
            assert torch.equal(found["rare"], step[1]["rare"])
            assert len({found[n].untyped_storage().data_ptr() for n in ("rare", "filters")}) == 1
            assert all(g.data_ptr() % 64 == 0 for g in found.values())
            assert found["filters"].is_contiguous(memory_format=torch.channels_last)
            for name in ("filters", "narrow", "pairs"):
                first, second, third = (own[name] for own in step)
                wide = torch.promote_types(first.dtype, torch.float32)
                wanted = (first.to(wide) + second.to(wide) + third.to(wide)).to(first.dtype)
                assert torch.equal(found[name], wanted)
