"""The promises of a run: the same result everywhere and always, resume, what it reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from trainings import (
    BATCH,
    Data,
    assert_same,
    digits,
    interrupted,
    lines,
    network,
    refused,
    summary,
    trainer,
)

from hybrid import Trainer, data, models, split
from hybrid.settings.config import LinkSettings, OptimiserSettings, ScheduleSettings, TrainSettings
from solvers import AugmentedLagrangian, AuxNet, Backprop, Penalty, Solver
from solvers.passes.exact import PassSettings
from solvers.passes.pipeline import Gaps, fit

ONCE: dict[str, Any] = {"train": {"epochs": 1}}


@pytest.fixture(scope="module")
def few() -> Data:
    return digits(5)


@pytest.fixture(scope="module")
def many() -> Data:
    return digits()


def filled(blocks: int, out: Path | None = None, **settings: Any) -> Trainer:
    """A run whose only local work is in the gaps of a pipeline of four micro-batches."""
    pipeline = {"correction": PassSettings(micro_batches=4), "fill": True}
    return trainer(AugmentedLagrangian(), out, blocks, **pipeline, **settings)


@pytest.mark.parametrize(
    ("solver", "settings"),
    [
        (Backprop(), {}),
        (AugmentedLagrangian(momentum=0.5), {"window": 3}),
        (Penalty(), {"window": 3}),
        (AuxNet(), {"window": 3}),
        (AugmentedLagrangian(), {"fill": True, "fill_step": "own"}),
    ],
    ids=["serial", "windows", "penalty", "auxnet", "gaps"],
)
def test_a_resumed_run_equals_an_undisturbed_one(solver, settings, few, tmp_path) -> None:
    run = tmp_path / "run"
    whole = trainer(solver, run, **settings)
    expected, told = whole.fit(*few), lines(run)
    interrupted(run, after=1)
    resumed = trainer(solver, run, resume=True, **settings)
    assert resumed.fit(*few)["test_accuracy"] == expected["test_accuracy"]
    assert_same(resumed.blocks.model.state_dict(), whole.blocks.model.state_dict())
    assert lines(run) == told


def test_a_run_of_two_blocks_trains_on_with_four_and_with_one(many, tmp_path) -> None:
    settings = {"window": 4, "train": {"batch_size": 96}}
    trainer(AugmentedLagrangian(), tmp_path / "run", **settings).fit(*many)
    for blocks in (4, 1):
        interrupted(tmp_path / "run", after=1)
        made = trainer(AugmentedLagrangian(), tmp_path / "run", blocks, resume=True, **settings)
        assert made.fit(*many)["test_accuracy"] > 0.8


def test_no_bytes_are_sent_in_the_parallel_phase_of_one_sweep(few) -> None:
    hybrid = trainer(AugmentedLagrangian(), window=5, **ONCE).fit(*few)
    assert hybrid["bytes_sent"] == trainer(Backprop(), **ONCE).fit(*few)["bytes_sent"]


def test_the_summary_has_what_scripts_depend_on(few, tmp_path) -> None:
    run = tmp_path / "run"
    found = trainer(AugmentedLagrangian(), run, 4, **ONCE).fit(*few)
    assert summary(run) == found
    per_rank = ("idle_share", "bytes_sent", "peak_memory_bytes")
    assert all(len(found[key]) == 4 for key in per_rank)
    assert len(found["residual"]) == 3
    scalars = "solver model data blocks replicas epochs seed test_accuracy train_seconds"
    scalars += " images_per_second serial_seconds parallel_seconds"
    assert all(key in found for key in scalars.split())
    assert all(0 <= share <= 1 for share in found["idle_share"])
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert list((run / "events").iterdir())


def test_un_augmented_storage_records_other_images_than_it_trains_on() -> None:
    train, test = data.load("synthetic", limit=64)
    seen: list[bool] = []
    batch = data.Dataset.batch

    class Watched(data.Dataset):
        def batch(self, ids: Tensor, seed: int, epoch: int, augment: bool = True) -> Tensor:
            seen.append(augment)
            return batch(self, ids, seed, epoch, augment)

    augmentation = data.Augmentation(pad=4, flip=True)
    train = Watched(train.images, train.labels, train.classes, train.mean, train.std, augmentation)
    cut = split(models.build("resnet8", 10, 3, 32), 2, balance="even")
    settings = TrainSettings(epochs=1, batch_size=32, threads=1)
    made = Trainer(cut, AugmentedLagrangian(), window="all", train=settings, quiet=True)
    made.fit(train, test.take(10))
    trained, observed, swept = seen[:2], seen[2:4], seen[4:6]
    assert trained == [True, True]
    assert observed == swept == [False, False]


@pytest.mark.parametrize(
    ("solver", "settings"),
    [
        (AugmentedLagrangian(), {"optimiser": OptimiserSettings(decay_all=True)}),
        (
            AugmentedLagrangian(),
            {
                "optimiser": OptimiserSettings(name="adamw", lr=3e-3),
                "schedule": ScheduleSettings(name="cosine"),
            },
        ),
        (Backprop(micro_batches=4), {"schedule": ScheduleSettings(name="step")}),
    ],
    ids=["sgd", "adamw", "pipeline"],
)
def test_training_reaches_an_accuracy(solver: Solver, settings: dict[str, Any], many) -> None:
    made = trainer(solver, train={"batch_size": 96}, **settings)
    assert made.fit(*many)["test_accuracy"] > 0.7


def test_the_residual_of_a_harmful_parallel_phase_returns_training_to_serial(many) -> None:
    harmful = AugmentedLagrangian(local_lr=3.0, return_ratio=1.05)
    made = trainer(harmful, window=4, train={"epochs": 4, "batch_size": 96})
    assert made.fit(*many)["returns_to_serial"] > 0


def test_a_run_folders_settings_give_the_gaps_of_its_run() -> None:
    balanced = filled(3)
    cut = filled(3)
    cut.blocks = split(network(), cuts=balanced.blocks.cuts)
    train, _ = digits(5)
    gaps = balanced.setup(train).method.gaps
    assert any(sum(gap) for gap in gaps)
    assert list(gaps) == fit(balanced.blocks.block_costs(), BATCH, 4)
    assert cut.setup(train).method.gaps == gaps


def test_local_work_is_reported_as_a_parallel_phase(few, tmp_path) -> None:
    filled(2, tmp_path / "run", gaps=[Gaps(BATCH, 0), Gaps(0, BATCH)]).fit(*few)
    parallel = [line for line in lines(tmp_path / "run") if line["phase"] == "parallel"]
    # no record is left over from the epoch before
    assert [line["samples"] for line in parallel] == [4 * BATCH] * 2


@pytest.mark.parametrize("number", [1, 3])
def test_gaps_of_another_number_of_blocks_are_refused(number: int, few) -> None:
    said = refused(filled(2, gaps=[Gaps(8, 8)] * number), few)
    assert said.startswith(f"rounds.gaps has {number} pairs for 2 blocks: give one [middle, turn]")


def test_virtual_links_under_mpirun_are_refused(few) -> None:
    made = trainer(Backprop(), links=LinkSettings(kind="virtual"))
    with pytest.raises(ValueError, match=r"^links.kind is 'virtual'.* 2 MPI ranks: start it .+$"):
        made.setup(few[0], ranks=2)
