"""Texts of other lengths in every mini-batch train as in a plain loop, bit for bit."""

import pytest
import torch
from answers import refusal
from texts import network, plain_loop, sentences
from texts_program import BATCH, KIND, LENGTHS, PADDED, prepared, trained
from trainings import OFTEN, assert_same, stopped
from zoo_packages import installed

from hybrid.data.sampling import epoch_order
from hybrid.solvers import DDG, AugmentedLagrangian, Backprop, FeaturesReplay
from hybrid_messages import PDASGD

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs transformers")


def test_back_propagation_is_the_plain_loop():
    batches = epoch_order(0, 0, len(LENGTHS)).split(BATCH)
    assert len({max(LENGTHS[i] for i in ids) for ids in batches}) == len(batches)
    items = sentences(KIND, LENGTHS)
    expected = plain_loop(network(KIND, False), items, batches)
    assert_same(trained(Backprop(), double=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [FeaturesReplay(), PDASGD(micro_batches=2)],
    ids=lambda solver: solver.name,
)
def test_other_methods_train_as_on_texts_of_one_length(solver):
    found, expected = trained(solver), trained(solver, make=PADDED)
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [Backprop(micro_batches=2), DDG()], ids=lambda s: s.name)
def test_ranks_of_mpi_have_the_bits_of_threads(solver, world):
    expected = trained(solver, model=network(KIND, False, 0.1))
    found = world.run(2, "texts_program:on_ranks", solver, 0.1)
    assert_same({k: torch.from_numpy(x) for k, x in (found[0] | found[1]).items()}, expected)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_flights_of_other_lengths(tmp_path):
    def run(folder, resume=False):
        more = {"out": tmp_path / folder, "checkpoint": OFTEN, "resume": resume}
        return trained(DDG(), train={"report_every": 1}, **more)

    expected = run("run")
    stopped(tmp_path / "run", 2)
    assert_same(run("run", True), expected)
    assert_same(trained(DDG(), links="virtual"), expected)


def test_lengths_that_no_sample_tells_are_refused_where_they_come():
    lengths = [9] * len(LENGTHS)
    lengths[2] = 12
    trainer, texts = prepared(AugmentedLagrangian(), lengths=lengths)
    said = refusal(trainer.fit, texts)
    assert "an input has 36 numbers in a sample, and 27 in the first ones: pad all to a" in said
    trained(Backprop(), lengths=lengths)


def test_what_needs_one_length_is_refused():
    for solver, train in ((AugmentedLagrangian(), {}), (Backprop(), {"compile": True})):
        trainer, data = prepared(solver, train=train)
        said = refusal(trainer.fit, data, data)
        assert said.startswith("samples have several lengths, and ")
        assert "padding='max_length'" in said
