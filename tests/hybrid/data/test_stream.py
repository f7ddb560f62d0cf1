"""Streams: the same samples for all ranks, none kept for long, and a run that goes on."""

import pytest
import streams
import torch
from answers import refusal
from streams import BATCH, KINDS, SAMPLES, Plain, Sized, Streaming, X, Y, trained, trainer
from torch.utils.data import DataLoader
from trainings import assert_same, stopped

from hybrid.data import Mapped, Stream
from hybrid.settings.config import CheckpointSettings
from hybrid.solvers import DDG, AugmentedLagrangian

OFTEN = CheckpointSettings(keep_last=0, steps=1)


def ids(first, count=BATCH):
    return torch.arange(first, first + count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{"blocks": 2}, {"blocks": 2, "solver": DDG()}])
def test_blocks_on_threads_train_as_the_undivided_network_does(kind, how):
    if "solver" in how:
        assert_same(trained(KINDS[kind](), **how), trained(KINDS[kind](), **how))
    else:
        assert_same(trained(KINDS[kind](), **how), trained(KINDS[kind]()))


def test_an_epoch_of_a_sized_stream_is_a_pass_and_another_one_goes_on():
    sized, endless = Stream(Sized(20)), Stream(Plain(20), 16)
    assert len(sized) == 20
    assert torch.equal(sized.targets(ids(0), 0, 1), Y[:8])
    assert torch.equal(endless.targets(ids(0), 0, 1), Y[torch.arange(16, 24) % 20])


def test_a_pass_has_its_number():
    stream, expected = Streaming(10), []
    data = Stream(stream, 20)
    for epoch in range(2):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(epoch))
        expected += Y[order].tolist()
    assert data.targets(ids(0, 20)).tolist() == expected


def test_what_is_drawn_is_the_same_in_any_share_and_when_it_is_read_again():
    data, other = Stream(Sized()), Stream(Sized())
    whole = data.batch(ids(0, 16), 3, 1)
    assert torch.equal(other.batch(ids(8), 3, 1), whole[8:])
    assert torch.equal(other.batch(ids(0), 3, 1), whole[:8])
    assert not torch.equal(other.batch(ids(0), 4, 1), whole[:8])


def test_a_window_that_is_swept_is_read_once():
    stream = Plain()
    sweeping = {"window": 4, "sweeps": 2, "settings": {"epochs": 1, "report_every": 4}}
    trained(Stream(stream, SAMPLES), AugmentedLagrangian(), 2, **sweeping)
    assert stream.opened == 2, "once for a look at its form, and once to train"
    assert stream.given <= SAMPLES + 2


def test_what_nobody_asks_for_again_is_dropped():
    data = Stream(Plain(), SAMPLES)
    data.keep(2 * BATCH)
    for first in range(0, SAMPLES, BATCH):
        data.batch(ids(first), 0, 0)
    assert sum(chunk.end - chunk.first for chunk in data._chunks) == 2 * BATCH


def test_batches_of_another_size_are_cut_anew():
    data = Stream(streams.batches())
    assert data.batch_size == 10
    assert torch.equal(data.targets(ids(8)), Y[8:16])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_one_that_was_not_interrupted(kind, tmp_path):
    how = {"blocks": 2, "settings": {"report_every": 2}}
    in_folder = {"out": tmp_path / "run", "checkpoint": OFTEN, **how}
    whole = trained(KINDS[kind](), **in_folder)
    stopped(tmp_path / "run", 8)
    assert_same(trained(KINDS[kind](), resume=True, **in_folder), whole)


def test_a_resumed_run_refuses_a_stream_of_other_samples(tmp_path):
    folder = tmp_path / "run"
    trainer(out=folder, checkpoint=OFTEN).fit(Stream(Plain(), SAMPLES))
    stopped(folder, 6)
    other = Stream([(x + 1, int(y)) for x, y in zip(X, Y, strict=True)], SAMPLES)
    made = trainer(out=folder, checkpoint=OFTEN, resume=True)
    assert "begins with other samples than before" in refusal(made.fit, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_of_mpi_train_as_threads_do(world, kind, replicas):
    found = world.run(2, "streams:trained_on_rank", kind, replicas)
    grid = {"replicas": 2} if replicas > 1 else {}
    made = trainer(blocks=2 // replicas, **grid)
    made.fit(KINDS[kind]())
    blocks = made.blocks
    for rank, parameters in enumerate(found):
        module = blocks.module(rank % len(blocks))
        assert parameters == [p.tolist() for p in module.parameters()]


def test_a_rank_that_needs_no_samples_looks_at_their_form_alone(world):
    first, middle, _, last = world.run(4, "streams:opened_on_rank")
    assert middle == (1, 2)
    assert first[0] == last[0] == 1 + 2, "to look, and for a pass an epoch"


@pytest.mark.parametrize("of", ["streams", "loaders"])
def test_data_that_differ_between_ranks_are_refused(world, of):
    for said in world.run(2, f"{of}:refused_on_rank"):
        assert "other samples than the first rank" in said


REFUSED = {
    "no length": (lambda: Stream(Plain()), "does not say how many samples", "samples=50_000"),
    "no samples": (lambda: Stream(Plain(), 0), "0 samples an epoch"),
    "nothing in it": (lambda: Stream(Plain(0), 4), "is empty", "at least 1"),
    "a generator": (lambda: Stream((x for x in X), 4), "can be read once only", "begins anew"),
    "an item that fails": (
        lambda: Stream(map_of(lambda: 1 / 0), 4),
        *("sample 0 of the stream", "division by zero"),
    ),
    "collate of batches": (
        lambda: Stream(streams.batches(), collate=list),
        *("gives batches", "leave it out"),
    ),
    "items that are no batches": (
        lambda: Stream(Plain(), 4, batched=True),
        *("not tensors with a row a sample", "leave out batched"),
    ),
    "batches of no known number": (
        lambda: Stream(DataLoader(Sized(), batch_size=None), batched=True),
        *("how many samples an epoch has",),
    ),
}


def map_of(function):
    class Failing:
        def __iter__(self):
            yield function()

    return Failing()


@pytest.mark.parametrize("use", REFUSED)
def test_a_stream_that_cannot_be_is_refused(use):
    make, *parts = REFUSED[use]
    said = refusal(make)
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"window": "all", "solver": AugmentedLagrangian()}, "give a number of mini-batches"),
        ({"sampler": "selective-backprop"}, "set sampler.name=uniform"),
    ],
)
def test_what_needs_samples_in_any_order_is_refused(how, said):
    assert said in refusal(trainer(blocks=2, **how).fit, Stream(Plain(), SAMPLES))


def test_a_stream_is_tested_as_its_samples_by_number_are():
    made = trainer(blocks=2)
    by_number = Mapped([(X[i], int(Y[i])) for i in range(SAMPLES)])
    assert made.evaluate(Stream(Plain(), SAMPLES)) == made.evaluate(by_number)
