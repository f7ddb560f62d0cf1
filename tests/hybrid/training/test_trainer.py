"""The promises of a run: exact serial training, the same result everywhere, resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid import Trainer, data, models, split
from hybrid.cuts.partition import Blocks
from hybrid.data.sampling import epoch_order
from hybrid.folder import checkpoint
from hybrid.settings.config import (
    CheckpointSettings,
    LinkSettings,
    OptimiserSettings,
    ScheduleSettings,
    TrainSettings,
)
from solvers import (
    FDG,
    AugmentedLagrangian,
    AuxNet,
    Backprop,
    LocalUpdates,
    Penalty,
    Petra,
    Solver,
)
from solvers.passes.pipeline import Gaps, fit

EPOCHS, BATCH = 2, 96
FLAGS = ("--epochs", EPOCHS, "--batch-size", BATCH, "--set", "train.threads=1")


@pytest.fixture(scope="module")
def digits() -> tuple[data.Dataset, data.Dataset]:
    return data.load("digits")


def network() -> models.Chain:
    torch.manual_seed(0)
    return models.build("resnet8", classes=10, channels=1, image_size=8)


def plain_loop(train: data.Dataset) -> dict[str, Tensor]:
    """Train by hand: BatchNorm, nesterov momentum, weight decay, warm-up, linear decay."""
    torch.set_num_threads(1)
    model = network().to(memory_format=torch.channels_last).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    free = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": free, "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    per_epoch = len(train) // BATCH
    step = 0
    for epoch in range(EPOCHS):
        for ids in epoch_order(0, epoch, len(train)).split(BATCH)[:per_epoch]:
            warm = step < per_epoch
            rate = (step + 1) / per_epoch if warm else 1 - (step - per_epoch) / per_epoch
            for group in sgd.param_groups:
                group["lr"] = 0.1 * rate
            loss = nn.functional.cross_entropy(model(train.batch(ids, 0, epoch)), train.labels[ids])
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            step += 1
    return model.state_dict()


@pytest.fixture(scope="module")
def by_hand(digits: tuple[data.Dataset, data.Dataset]) -> dict[str, Tensor]:
    return plain_loop(digits[0])


def trainer(blocks: int, solver: Solver, out: Path | None = None, **settings: Any) -> Trainer:
    settings = {"train": TrainSettings(epochs=EPOCHS, batch_size=BATCH, threads=1)} | settings
    cut = split(network(), blocks, balance="operations")
    return Trainer(cut, solver, out=out, quiet=True, **settings)


def newest(run: Path) -> dict[str, Tensor]:
    folder = checkpoint.complete(run / "checkpoints")[-1]
    return checkpoint.load_model(folder, checkpoint.read_manifest(folder))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_serial_training_on_threads_equals_a_hand_written_loop(blocks, digits, by_hand) -> None:
    made = trainer(blocks, Backprop())
    made.fit(*digits)
    assert_same(made.blocks.model.state_dict(), by_hand)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_serial_training_under_mpirun_equals_a_hand_written_loop(
    ranks, world, tmp_path, by_hand
) -> None:
    out = tmp_path / "run"
    status, _, err = world.hybrid(ranks, "train", "--solver", "backprop", *FLAGS, "--out", out)
    assert status == 0, err
    assert_same(newest(out), by_hand)


@pytest.mark.parametrize(
    ("solver", "window", "sweeps"),
    [
        (AugmentedLagrangian(), 4, 1),
        (AugmentedLagrangian(), "all", 2),
        (AuxNet(), 4, 1),
        (FDG(), 4, 1),
        (LocalUpdates(), 4, 1),
        pytest.param(Petra(), 4, 1, marks=pytest.mark.slow),
    ],
    ids=["windows", "all", "auxnet", "fdg", "local-updates", "petra"],
)
def test_the_hybrid_under_mpirun_equals_the_hybrid_on_threads(
    solver, window, sweeps, world, tmp_path, digits
) -> None:
    out = tmp_path / "run"
    flags = ("--solver", solver.name, "--window", window, "--sweeps", sweeps)
    status, _, err = world.hybrid(2, "train", *FLAGS, *flags, "--out", out)
    assert status == 0, err
    made = trainer(2, solver, window=window, sweeps=sweeps)
    made.fit(*digits)
    assert_same(newest(out), made.blocks.model.state_dict())


def test_the_same_run_twice_gives_the_same_bits(digits) -> None:
    first, second = (trainer(4, AugmentedLagrangian(), window=2) for _ in range(2))
    first.fit(*digits)
    second.fit(*digits)
    assert_same(first.blocks.model.state_dict(), second.blocks.model.state_dict())


def interrupted(run: Path, after: int) -> None:
    """Leave what a run killed after its checkpoint number `after` leaves; 0 is from its start."""
    for folder in checkpoint.complete(run / "checkpoints")[after + 1 :]:
        shutil.rmtree(folder)
    (run / "summary.json").unlink()


@pytest.mark.parametrize(
    "solver",
    [Backprop(), AugmentedLagrangian(momentum=0.5), Penalty(), AuxNet()],
    ids=lambda s: s.name,
)
def test_a_resumed_run_equals_an_undisturbed_one(solver, digits, tmp_path) -> None:
    keep = {"checkpoint": CheckpointSettings(keep_last=0), "window": 3}
    whole = trainer(2, solver, tmp_path / "run", **keep)
    expected = whole.fit(*digits)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    interrupted(tmp_path / "run", after=1)
    resumed = trainer(2, solver, tmp_path / "run", resume=True, **keep)
    summary = resumed.fit(*digits)
    assert_same(resumed.blocks.model.state_dict(), whole.blocks.model.state_dict())
    assert summary["test_accuracy"] == expected["test_accuracy"]
    again = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    timeless = [
        [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in part]
        for part in (lines, again)
    ]
    assert timeless[0] == timeless[1]


def test_a_run_of_two_ranks_trains_on_with_three_and_with_one(world, tmp_path, by_hand) -> None:
    out = tmp_path / "run"
    serial = ("train", "--solver", "backprop", *FLAGS, "--set", "checkpoint.keep_last=0")
    assert world.hybrid(2, *serial, "--out", out)[0] == 0
    for ranks in (3, 1):
        interrupted(out, after=1)
        status, _, err = world.hybrid(ranks, "train", "--resume", "--out", out)
        assert status == 0, err
        assert json.loads((out / "summary.json").read_text())["blocks"] == ranks
        assert_same(newest(out), by_hand)


def test_a_hybrid_run_of_two_threads_trains_on_with_four_and_with_one(digits, tmp_path) -> None:
    keep = {"checkpoint": CheckpointSettings(keep_last=0), "window": 4}
    trainer(2, AugmentedLagrangian(), tmp_path / "run", **keep).fit(*digits)
    for blocks in (4, 1):
        interrupted(tmp_path / "run", after=1)
        made = trainer(blocks, AugmentedLagrangian(), tmp_path / "run", resume=True, **keep)
        assert made.fit(*digits)["test_accuracy"] > 0.8


def test_no_bytes_are_sent_in_the_parallel_phase_of_one_sweep(digits, tmp_path) -> None:
    quick = {"window": 5, "train": TrainSettings(epochs=1, batch_size=BATCH, threads=1)}
    hybrid = trainer(2, AugmentedLagrangian(), **quick).fit(*digits)
    serial = trainer(2, Backprop(), **quick).fit(*digits)
    assert hybrid["bytes_sent"] == serial["bytes_sent"]


def test_the_summary_has_what_scripts_depend_on(digits, tmp_path) -> None:
    quick = {"train": TrainSettings(epochs=1, batch_size=BATCH, threads=1)}
    summary = trainer(4, AugmentedLagrangian(), tmp_path / "run", **quick).fit(*digits)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    per_rank = ("idle_share", "bytes_sent", "peak_memory_bytes")
    assert all(len(summary[key]) == 4 for key in per_rank)
    assert len(summary["residual"]) == 3
    scalars = "solver model data blocks replicas epochs seed test_accuracy train_seconds"
    scalars += " images_per_second serial_seconds parallel_seconds"
    assert all(key in summary for key in scalars.split())
    assert all(0 <= share <= 1 for share in summary["idle_share"])
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert list((tmp_path / "run" / "events").iterdir())


def test_a_store_over_the_memory_budget_is_refused_before_training(digits) -> None:
    with pytest.raises(
        ValueError, match=r"needs .* GB .* budget is 0.001 GB: take a window of \d+"
    ):
        trainer(2, AugmentedLagrangian(), window="all", memory_gb=0.001).fit(*digits)


def test_a_filter_that_does_not_divide_the_activations_is_refused(digits) -> None:
    with pytest.raises(ValueError, match="choose a filter that divides"):
        trainer(2, AugmentedLagrangian(filter=3)).fit(*digits)


def test_un_augmented_storage_records_other_images_than_it_trains_on() -> None:
    train, test = data.load("synthetic", limit=64)
    torch.manual_seed(0)
    model = models.build("resnet8", 10, 3, 32)
    seen: list[bool] = []
    batch = data.Dataset.batch

    class Watched(data.Dataset):
        def batch(self, ids: Tensor, seed: int, epoch: int, augment: bool = True) -> Tensor:
            seen.append(augment)
            return batch(self, ids, seed, epoch, augment)

    augmentation = data.Augmentation(pad=4, flip=True)
    train = Watched(train.images, train.labels, train.classes, train.mean, train.std, augmentation)
    settings = TrainSettings(epochs=1, batch_size=32, threads=1)
    cut: Blocks = split(model, 2, balance="even")
    Trainer(cut, AugmentedLagrangian(), window="all", train=settings, quiet=True).fit(
        train, test.take(10)
    )
    trained, observed, swept = seen[:2], seen[2:4], seen[4:6]
    assert trained == [True, True]
    assert observed == swept == [False, False]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "step", "constant"])
def test_every_optimiser_and_schedule_trains(name: str, schedule: str, digits) -> None:
    rate = 0.1 if name == "sgd" else 3e-3
    summary = trainer(
        2,
        AugmentedLagrangian(),
        optimiser=OptimiserSettings(name=name, lr=rate, decay_all=name == "sgd"),
        schedule=ScheduleSettings(name=schedule),
    ).fit(*digits)
    assert summary["test_accuracy"] > 0.7


def test_a_pipeline_of_micro_batches_trains(digits) -> None:
    summary = trainer(4, Backprop(micro_batches=4)).fit(*digits)
    assert summary["test_accuracy"] > 0.7


def test_the_residual_of_a_harmful_parallel_phase_returns_training_to_serial(digits) -> None:
    harmful = AugmentedLagrangian(local_lr=3.0, return_ratio=1.05)
    settings = TrainSettings(epochs=4, batch_size=BATCH, threads=1)
    summary = trainer(2, harmful, window=4, train=settings).fit(*digits)
    assert summary["returns_to_serial"] > 0


def filled(blocks: int, out: Path | None = None, **settings: Any) -> Trainer:
    """A run whose only local work is in the gaps of a pipeline of four micro-batches."""
    pipeline = {"correction": Backprop(micro_batches=4), "fill": True, "sweeps": 0}
    return trainer(blocks, AugmentedLagrangian(), out, **pipeline, **settings)


@pytest.fixture(scope="module")
def few() -> tuple[data.Dataset, data.Dataset]:
    train, test = data.load("digits", limit=4 * BATCH)
    return train, test.take(50)


@pytest.mark.parametrize("fill_step", ["added", "own"])
def test_a_filled_run_on_virtual_links_equals_the_one_on_threads(fill_step: str, few) -> None:
    threads = filled(3, fill_step=fill_step)
    virtual = filled(3, fill_step=fill_step, links=LinkSettings(kind="virtual"))
    expected, found = threads.fit(*few), virtual.fit(*few)
    assert_same(virtual.blocks.model.state_dict(), threads.blocks.model.state_dict())
    assert found["test_accuracy"] == expected["test_accuracy"]
    assert found["bytes_sent"] == expected["bytes_sent"]


def test_filling_the_gaps_changes_the_training(few) -> None:
    plain = trainer(3, Backprop(micro_batches=4))
    made = filled(3, gaps=[Gaps(48, 0), Gaps(24, 24), Gaps(0, 48)])
    plain.fit(*few)
    made.fit(*few)
    first = "conv1.weight"
    assert not torch.equal(
        made.blocks.model.state_dict()[first], plain.blocks.model.state_dict()[first]
    )


def test_a_resumed_run_with_filled_gaps_equals_an_undisturbed_one(few, tmp_path) -> None:
    keep = {"checkpoint": CheckpointSettings(keep_last=0), "fill_step": "own"}
    whole = filled(2, tmp_path / "run", **keep)
    whole.fit(*few)
    interrupted(tmp_path / "run", after=1)
    resumed = filled(2, tmp_path / "run", resume=True, **keep)
    resumed.fit(*few)
    assert_same(resumed.blocks.model.state_dict(), whole.blocks.model.state_dict())


def test_a_run_folders_settings_give_the_gaps_of_its_run(few, tmp_path) -> None:
    balanced = filled(3, tmp_path / "a")
    cut = Trainer(
        split(network(), cuts=balanced.blocks.cuts),
        correction=Backprop(micro_batches=4),
        fill=True,
        sweeps=0,
        train=balanced.train,
        quiet=True,
    )
    balanced.fit(*few)
    cut.fit(*few)
    assert any(sum(gap) for gap in balanced.gaps)
    assert balanced.gaps == fit(balanced.blocks.block_costs(), BATCH, 4)
    assert cut.gaps == balanced.gaps


def test_local_work_is_reported_as_a_parallel_phase(few, tmp_path) -> None:
    filled(2, tmp_path / "run", gaps=[Gaps(BATCH, 0), Gaps(0, BATCH)]).fit(*few)
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    parallel = [line for line in lines if line["phase"] == "parallel"]
    # no record is left over from the epoch before
    assert [line["samples"] for line in parallel] == [3 * BATCH] * EPOCHS


@pytest.mark.parametrize("blocks", [1, 3])
def test_without_sweeps_and_without_fill_training_is_serial(blocks: int, few) -> None:
    serial, hybrid = trainer(blocks, Backprop()), trainer(blocks, AugmentedLagrangian(), sweeps=0)
    serial.fit(*few)
    summary = hybrid.fit(*few)
    assert_same(hybrid.blocks.model.state_dict(), serial.blocks.model.state_dict())
    assert summary["parallel_seconds"] == 0


def refused(made: Trainer, loaded: tuple[data.Dataset, data.Dataset]) -> str:
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        made.fit(*loaded)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("number", [1, 3])
def test_gaps_of_another_number_of_blocks_are_refused(number: int, few) -> None:
    said = refused(filled(2, gaps=[Gaps(8, 8)] * number), few)
    assert said.startswith(f"rounds.gaps has {number} pairs for 2 blocks: give one [middle, turn]")


def test_gaps_cannot_be_filled_by_a_solver_without_sub_problems(few) -> None:
    said = refused(trainer(2, Backprop(micro_batches=4), fill=True), few)
    assert said.startswith("rounds.fill needs sub-problems, which 'backprop' has none of: choose")


def test_virtual_links_under_mpirun_are_refused(few, monkeypatch) -> None:
    made = trainer(2, Backprop(), links=LinkSettings(kind="virtual"))
    with pytest.raises(ValueError, match=r"^links.kind is 'virtual'.* 2 MPI ranks: start it .+$"):
        made._check(*few, SimpleNamespace(size=2))


def test_a_filled_run_under_mpirun_equals_the_one_on_threads(world, tmp_path, few) -> None:
    out = tmp_path / "run"
    sets = ("rounds.fill=true", "rounds.sweeps=0", "correction.micro_batches=4")
    sets += (f"data.limit={4 * BATCH}", "train.threads=1")
    flags = [word for setting in sets for word in ("--set", setting)]
    flags += ["--epochs", 1, "--batch-size", BATCH, "--out", out]
    status, _, err = world.hybrid(2, "train", *flags)
    assert status == 0, err
    made = filled(2, train=TrainSettings(epochs=1, batch_size=BATCH, threads=1))
    made.fit(*few)
    assert_same(newest(out), made.blocks.model.state_dict())
