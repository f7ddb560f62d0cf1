"""The exact pass: bit for bit the plain loop, pipelined, recorded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem, gradients, make_problem, problems
from torch import Tensor, nn

from hybrid.links import RankLinks
from solvers import Backprop, Block, PhaseStats
from solvers.backprop import _Pass


def exact_gradients(problem: Problem, solver: Backprop) -> dict[str, Tensor]:
    def program(block: Block, links: RankLinks) -> dict[str, Tensor]:
        batch, stats = problem.batches[0], PhaseStats()
        solver.gradient(block, links, batch, slice(0, len(batch)), None, stats)
        return gradients(block)

    return {k: v for part in problem.on_every_block(program) for k, v in part.items()}


def without_batch_norm(problem: Problem) -> Problem:
    for module in problem.blocks.model.modules():
        if hasattr(module, "bn"):
            module.bn = nn.Identity()
    return problem


@given(problems(min_blocks=1))
@settings(max_examples=20, deadline=None)
def test_one_micro_batch_gives_the_plain_gradients_bit_for_bit(problem: Problem) -> None:
    plain = problem.plain_gradients(problem.batches[0])
    found = exact_gradients(problem, Backprop())
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@given(problems(min_blocks=1), st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_any_number_of_micro_batches_gives_the_gradient_of_the_batch_mean(
    problem: Problem, m: int
) -> None:
    problem = without_batch_norm(problem)
    plain = problem.plain_gradients(problem.batches[0])
    found = exact_gradients(problem, Backprop(micro_batches=m))
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 3]])
def test_training_equals_a_plain_loop_bit_for_bit(cuts: list[int]) -> None:
    split, plain = (make_problem(seed=5, units=3, cuts=cuts, batch=6, batches=4) for _ in range(2))
    model = plain.blocks.model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for batch in plain.batches:
        nn.functional.cross_entropy(model(batch.images()), batch.labels()).backward()
        sgd.step()
        sgd.zero_grad()
    split.blocks.model.train()
    split.on_every_block(lambda block, links: Backprop().train(block, links, split.window()))
    expected = model.state_dict()
    for name, value in split.blocks.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e3])
def test_clipping_equals_torch_bit_for_bit_over_any_number_of_blocks(max_norm: float) -> None:
    split, plain = (make_problem(seed=7, units=3, cuts=[1, 3], batch=6) for _ in range(2))
    model, batch = plain.blocks.model, plain.batches[0]
    nn.functional.cross_entropy(model(batch.images()), batch.labels()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    expected = {name: p.grad for name, p in model.named_parameters()}

    def program(block: Block, links: RankLinks) -> dict[str, Tensor]:
        solver, stats = Backprop(clip_norm=max_norm), PhaseStats()
        solver.gradient(block, links, split.batches[0], slice(0, 6), None, stats)
        solver._clip(block, links)
        return gradients(block)

    for part in split.on_every_block(program):
        for name, gradient in part.items():
            assert torch.equal(gradient, expected[name]), name


def test_block_k_holds_at_most_K_minus_k_graphs(monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    problem = make_problem(seed=1, units=4, cuts=[1, 2, 3], batch=8)
    most = [0] * 4
    forward = _Pass.forward

    def watched(run: _Pass) -> None:
        forward(run)
        most[run.block.index] = max(most[run.block.index], len(run.graphs))

    monkeypatch.setattr(_Pass, "forward", watched)
    exact_gradients(problem, Backprop(micro_batches=8))
    assert most == [4, 3, 2, 1]


def test_observing_records_without_moving_weights_or_statistics() -> None:
    problem = make_problem(seed=2, units=3, cuts=[2], batch=5, batches=2)
    before = {k: v.clone() for k, v in problem.blocks.model.state_dict().items()}
    kept: dict[int, list[str]] = {0: [], 1: []}

    def program(block: Block, links: RankLinks) -> None:
        class Recorder:
            def record(self, rows, lam, p_in, out, p_out) -> None:
                parts = {"lam": lam, "p_in": p_in, "out": out, "p_out": p_out}
                kept[block.index] += [name for name, part in parts.items() if part is not None]

        window = problem.window()
        window.recorder = Recorder()
        Backprop().observe(block, links, window)

    problem.on_every_block(program)
    assert kept == {0: ["out", "p_out"] * 2, 1: ["lam", "p_in"] * 2}
    after = problem.blocks.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in problem.blocks.model.parameters())


def test_records_are_in_per_sample_scale() -> None:
    problem = make_problem(seed=4, units=2, cuts=[2], batch=5)
    model, batch = problem.blocks.model, problem.batches[0]
    inner = model[:2](batch.images()).detach().requires_grad_()
    nn.functional.cross_entropy(model[2:](inner), batch.labels(), reduction="sum").backward()
    records: list[Tensor] = []

    def program(block: Block, links: RankLinks) -> None:
        class Recorder:
            def record(self, rows, lam, p_in, out, p_out) -> None:
                records.append(p_in if p_in is not None else p_out)

        window = problem.window()
        window.recorder = Recorder()
        Backprop().observe(block, links, window)

    problem.on_every_block(program)
    for p in records:
        torch.testing.assert_close(p, inner.grad)


def test_the_last_block_counts_right_answers_and_every_step_has_a_loss() -> None:
    problem = make_problem(seed=6, units=2, cuts=[1], batch=4, batches=3)
    stats = problem.on_every_block(
        lambda block, links: Backprop(micro_batches=2).train(block, links, problem.window())
    )
    assert [s.samples for s in stats] == [12, 12]
    assert len(stats[1].per_step_losses()) == 3
    assert not stats[0].losses
    assert 0 <= sum(int(c) for c in stats[1].correct) <= 12


@pytest.mark.parametrize(("name", "value"), [("micro_batches", 0), ("clip_norm", -1.0)])
def test_impossible_settings_name_the_value(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Backprop(**{name: value})
