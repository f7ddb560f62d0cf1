"""Delayed gradients equal their formulas, written down a second time, bit for bit."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trainings import assert_same
from unit_steps import trained, unit_problem
from versions_table import Table

from hybrid.solvers import DDG, FDG, FeaturesReplay
from hybrid.solvers.engine.engine import Engine

METHODS = {"ddg": DDG(), "features-replay": FeaturesReplay(), "fdg": FDG(gradient_shrinking=0.7)}


def made(K, batch, batches=6):
    return unit_problem(K, batches, batch, units=7)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=4, deadline=None)
@given(
    K=st.sampled_from([1, 2, 3, 5]),
    m=st.integers(1, 9),
    batch=st.integers(1, 11),
    at=st.none() | st.integers(1, 5),
)
@example(K=4, m=4, batch=9, at=None)
@example(K=8, m=1, batch=9, at=None)
@example(K=4, m=3, batch=8, at=2)
def test_trained_blocks_equal_a_table_of_versions_bit_for_bit_also_resumed(name, K, m, batch, at):
    solver = replace(METHODS[name], micro_batches=m)
    table = Table(made(K, batch), name, m)
    assert_same(trained(made(K, batch), solver, at), table.run())
    if name != "features-replay" and m <= batch:
        formula = [solver.versions(k, K, batch) for k in range(K)]
        assert table.oldest == [min(v, len(table.batches) - 1) for v in formula]


@pytest.mark.parametrize(("name", "m"), [("ddg", 4), ("fdg", 2)])
def test_micro_batches_that_met_the_same_weights_share_one_version(name, m, monkeypatch):
    solver, most = replace(METHODS[name], micro_batches=m), [0.0] * 4
    backward = Engine._backward

    def watched(self, flight, keep):
        k, own = self.block.index, list(self.block.module.parameters())
        flying = [flight, *self._flights.values()]
        met = {w.untyped_storage().data_ptr() for f in flying for w in (f.weights or {}).values()}
        met -= {p.untyped_storage().data_ptr() for p in own}
        most[k] = max(most[k], len(met) / len(own))
        return backward(self, flight, keep)

    monkeypatch.setattr(Engine, "_backward", watched)
    trained(made(4, 8, batches=15), solver)
    assert most == [solver.versions(k, 4, 8) for k in range(4)]


@pytest.mark.parametrize("name", ["ddg", "fdg"])
def test_a_graph_that_is_made_again_has_the_same_bits_and_is_kept_by_no_flight(name, monkeypatch):
    backward, graphs = Engine._backward, []

    def watched(self, flight, keep):
        graphs.append(sum(f.out is not None for f in self._flights.values()))
        return backward(self, flight, keep)

    monkeypatch.setattr(Engine, "_backward", watched)
    solver = replace(METHODS[name], micro_batches=4)
    expected = trained(made(4, 8, batches=5), solver)
    assert max(graphs) > 0
    graphs.clear()
    found = trained(made(4, 8, batches=5), replace(solver, recompute=True))
    assert max(graphs) == 0
    assert_same(found, expected)


def test_messages_in_fewer_bits_arrive_and_are_counted():
    sent = {}
    for messages in ("float32", "bfloat16", "int8"):
        problem = made(2, 8).single_precision()
        solver = DDG(micro_batches=4, messages=messages)

        def program(block, links, solver=solver, problem=problem):
            mine = solver.start(block, links, problem.setup(window=0))
            mine.train(problem.window())
            mine.drain()
            return links.traffic.total_bytes

        sent[messages] = sum(problem.on_every_block(program))
        assert all(t.isfinite().all() for t in problem.tensors().values())
    assert sent["bfloat16"] / sent["float32"] == 0.5
    assert sent["int8"] < 0.4 * sent["float32"]  # scales of 6 x 6 pixels weigh more than of 32 x 32


def test_what_is_under_way_goes_on_in_the_formats_it_was_made_in():
    problem = made(2, 8).single_precision()

    def program(block, links):
        mine = DDG(micro_batches=4, messages="int8").start(block, links, problem.setup(window=0))
        mine.train(problem.window(1, 0, 2))
        state = mine.state()
        other = DDG(micro_batches=4).start(block, links, problem.setup(window=0))
        with pytest.raises(ValueError, match=r"messages is 'float32', and 'int8' for what is und"):
            other.load_state(state)
        with mock.patch.object(block, "precision", torch.bfloat16):
            other = mine.solver.start(block, links, problem.setup(window=0))
            with pytest.raises(ValueError, match=r"precision is 'bfloat16', and 'float32' for wh"):
                other.load_state(state)
        mine.drain()

    problem.on_every_block(program)


@given(st.sampled_from([DDG(), FDG(), FeaturesReplay()]), st.integers(1, 40), st.integers(1, 2000))
def test_micro_batches_are_as_few_as_half_a_step_of_delay_and_16_samples_allow(solver, K, size):
    m, delay = solver.num_micro_batches(size, K), solver.delay(0, K)
    assert m & (m - 1) == 0
    assert m == 1 or (size / m >= 16 and delay / (m / 2) > 0.5)
    assert delay / m <= 0.5 or size / (2 * m) < 16
