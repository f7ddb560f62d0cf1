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
from solvers.kernels import pool, upsample
from solvers.passes.wire import Wire


def exact_gradients(problem: Problem, solver: Backprop) -> dict[str, Tensor]:
    def program(block: Block, links: RankLinks) -> dict[str, Tensor]:
        batch, stats = problem.batches[0], PhaseStats()
        solver.gradient(block, links, batch, slice(0, len(batch)), None, stats)
        return gradients(block)

    problem.blocks.model.zero_grad()
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


def trained(problem: Problem, solver: Backprop) -> dict[str, Tensor]:
    """All tensors of the network after training on the window."""
    problem.on_every_block(lambda block, links: solver.train(block, links, problem.window()))
    return problem.blocks.model.state_dict()


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative Euclidean distance of two gradients of the whole network."""
    assert found.keys() == exact.keys()
    error = torch.stack([(found[name] - exact[name]).square().sum() for name in exact]).sum()
    return float((error / torch.stack([g.square().sum() for g in exact.values()]).sum()).sqrt())


@pytest.mark.parametrize("cuts", [[], [1, 3]])
@pytest.mark.parametrize("m", [1, 3])
def test_recomputing_gives_the_same_weights_and_running_statistics_bit_for_bit(
    cuts: list[int], m: int
) -> None:
    kept, again = (make_problem(seed=8, units=3, cuts=cuts, batch=6, batches=3) for _ in range(2))
    expected = trained(kept, Backprop(micro_batches=m))
    found = trained(again, Backprop(micro_batches=m, recompute=True))
    assert any("running" in name for name in expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_recomputing_runs_every_block_forward_twice_and_keeps_the_statistics_on() -> None:
    problem = make_problem(seed=8, units=3, cuts=[1, 3], batch=6)
    norms = [m for m in problem.blocks.model.modules() if isinstance(m, nn.BatchNorm2d)]
    calls = []
    for norm in norms:
        norm.register_forward_hook(lambda *_: calls.append(1))
    exact_gradients(problem, Backprop(micro_batches=2, recompute=True))
    assert len(calls) == 2 * 2 * len(norms)
    assert all(norm.track_running_stats for norm in norms)
    assert all(int(norm.num_batches_tracked) == 2 for norm in norms)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(
    ("messages", "tolerance"), [("bfloat16", 0.02), ("float16", 0.002), ("int8", 0.03)]
)
def test_rounded_messages_give_a_gradient_near_the_exact_one(
    messages: str, tolerance: float, m: int
) -> None:
    problem = make_problem(seed=9, units=4, cuts=[1, 2, 4], batch=12, width=6)
    exact = exact_gradients(problem, Backprop(micro_batches=m))
    rounded = exact_gradients(problem, Backprop(micro_batches=m, messages=messages))
    assert 0 < distance(rounded, exact) < tolerance


@pytest.mark.parametrize("m", [1, 4])
def test_float16_does_not_lose_the_tiny_adjoints_of_a_large_mini_batch(m: int) -> None:
    problem = make_problem(seed=9, units=2, cuts=[2], batch=256)
    with torch.no_grad():
        # per-sample adjoints of about 1e-5: over the 256 of the mean, half of float16's least
        problem.blocks.model[-1].weight.mul_(1e-3)
    exact = exact_gradients(problem, Backprop(micro_batches=m))
    rounded = exact_gradients(problem, Backprop(micro_batches=m, messages="float16"))
    head = {"5.weight", "5.bias"}
    first = [{k: v for k, v in g.items() if k not in head} for g in (rounded, exact)]
    assert 0 < distance(*first) < 0.01


@pytest.mark.parametrize("messages", ["float32", "bfloat16", "float16", "int8"])
def test_records_of_rounded_passes_stay_in_per_sample_scale(messages: str) -> None:
    problem = make_problem(seed=4, units=2, cuts=[2], batch=5)
    adjoints: dict[int, Tensor] = {}

    def program(block: Block, links: RankLinks) -> None:
        class Recorder:
            def record(self, rows, lam, p_in, out, p_out) -> None:
                adjoints[block.index] = p_out if p_in is None else p_in

        window = problem.window()
        window.recorder = Recorder()
        Backprop(messages=messages).observe(block, links, window)

    problem.on_every_block(program)
    torch.testing.assert_close(adjoints[0], adjoints[1], rtol=0.02, atol=0.02 * adjoints[1].max())


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_filtered_pass_has_the_gradient_of_the_network_with_the_filter_at_its_cuts(
    factor: int, recompute: bool
) -> None:
    problem = make_problem(seed=3, units=3, cuts=[1, 3, 4], batch=5)
    batch = problem.batches[0]
    x = batch.images()
    for k in range(3):
        x = upsample(pool(problem.blocks.module(k)(x), factor), factor)
    nn.functional.cross_entropy(problem.blocks.module(3)(x), batch.labels()).backward()
    expected = {name: p.grad.clone() for name, p in problem.blocks.model.named_parameters()}
    found = exact_gradients(problem, Backprop(filter=factor, recompute=recompute))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("messages", "factor"), [("float32", 1), ("float16", 2), ("int8", 2)])
def test_a_pass_sends_the_bytes_of_the_wire_over_every_cut_both_ways(
    messages: str, factor: int
) -> None:
    problem = make_problem(seed=3, units=2, cuts=[1, 2], batch=6).single_precision()

    def program(block: Block, links: RankLinks) -> dict[str, int]:
        solver = Backprop(micro_batches=3, messages=messages, filter=factor)
        solver.gradient(block, links, problem.batches[0], slice(0, 6), None, PhaseStats())
        return links.traffic.bytes_sent

    # int8 sends the scales of a sample's channels once a sample, however samples are grouped
    cut = 6 * Wire(messages, factor).bytes_per_sample((3, 6, 6))
    assert problem.on_every_block(program) == [
        {"next": cut, "previous": 0},
        {"next": cut, "previous": cut},
        {"next": 0, "previous": cut},
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("micro_batches", 0), ("clip_norm", -1.0), ("filter", 0), ("messages", "'float64'")],
)
def test_impossible_settings_name_the_value(name: str, value: object) -> None:
    given_value = value.strip("'") if isinstance(value, str) else value
    with pytest.raises(ValueError, match=f"^{name} is {value}; .+$") as caught:
        Backprop(**{name: given_value})
    assert len(str(caught.value).splitlines()) == 1
