"""The promises of a run: what it reports, what it refuses, and its settings of numerics."""

from typing import Any

import pytest
import torch
from answers import refusal
from torch import nn
from trainings import (
    OFTEN,
    assert_same,
    digests,
    digits,
    interrupted,
    network,
    newest,
    refused,
    stopped,
    summary,
    trained_weights,
    trainer,
    trainer_of,
)

from hybrid.folder import checkpoint, traces
from hybrid.settings.config import LinkSettings
from hybrid.solvers import DDG, FDG, AugmentedLagrangian, Backprop, BlockADMM
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.solvers.local_work.budget import LocalBudget

ONCE: dict[str, Any] = {"train": {"epochs": 1}}


@pytest.fixture(scope="module")
def few():
    return digits(5)


@pytest.fixture(scope="module")
def many():
    return digits()


def filled(blocks, out=None, **settings):
    """A run whose ranks take local steps where they would wait."""
    return trainer(DDG(), out, blocks, fill="augmented-lagrangian", **settings)


def test_no_bytes_are_sent_in_the_parallel_phase_of_one_sweep(few):
    hybrid = trainer(AugmentedLagrangian(), window=5, **ONCE).fit(*few)
    assert hybrid["bytes_sent"] == trainer(Backprop(), **ONCE).fit(*few)["bytes_sent"]


def test_the_summary_tells_how_late_the_gradients_of_each_rank_are(few):
    found = trainer(FDG(micro_batches=8), None, 4).fit(*few, epochs=1)
    assert found["delay"] == [6 / 8, 4 / 8, 2 / 8, 0]


def test_the_summary_has_what_scripts_depend_on(few, tmp_path):
    run = tmp_path / "run"
    found = trainer(AugmentedLagrangian(), run, 4, **ONCE).fit(*few)
    assert summary(run) == found
    per_rank = (*("idle_share", "bytes_sent", "peak_memory_bytes", "delay"), "local_steps")
    assert all(len(found[key]) == 4 for key in per_rank)
    assert len(found["residual"]) == 3
    assert (found["kernels"], found["gpu_memory_bytes"]) == ("torch", [0] * 4)
    scalars = "solver model data blocks replicas epochs seed test_accuracy train_seconds"
    scalars += " images_per_second serial_seconds parallel_seconds"
    assert all(key in found for key in scalars.split())
    assert all(0 <= share <= 1 for share in found["idle_share"])
    events = traces.spans(run)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert list((run / "events").iterdir())


def test_local_steps_in_waits_are_counted_and_timed_on_each_rank_through_a_resume(few, tmp_path):
    # a virtual clock stands while others work
    settings = {"local_budget": [(8, 0), (8, 8), (0, 0)], "links": LinkSettings(kind="virtual")}
    found = filled(3, tmp_path, **settings).fit(*few, epochs=1)
    # two ticks a mini-batch, the first of five of which has no records to work on
    assert found["local_steps"] == [8, 16, 0]
    events = traces.spans(tmp_path)
    for rank, seconds in enumerate(found["local_seconds"]):
        own = [e["dur"] for e in events if e["pid"] == rank and e["name"] == "local step"]
        assert len(own) == found["local_steps"][rank]
        assert sum(own) / 1e6 <= seconds <= found["parallel_seconds"]
    again = filled(3, tmp_path, resume=True, **settings).fit(*few, epochs=2)
    assert again["local_steps"] == [16, 32, 0]
    assert again["local_seconds"][1] > found["local_seconds"][1]


@pytest.mark.parametrize(("ratio", "returns"), [(1e-9, 1), (1e9, 0)])
def test_a_residual_that_has_grown_too_much_returns_training_to_serial(ratio, returns, few):
    """Whatever it is: the second epoch's is compared with the first one's."""
    solver = AugmentedLagrangian(return_ratio=ratio)
    made = trainer(solver, window=4, train={"epochs": 3}, model="plain")
    assert made.fit(*few)["returns_to_serial"] == returns


def test_a_resumed_run_has_the_timetable_of_its_checkpoint(few, tmp_path, monkeypatch):
    """What would be timed anew, on the virtual clock of slow links, may come out otherwise."""
    slow = {"links": LinkSettings(kind="virtual", gigabits_per_second=1e-3)}
    made = filled(3, tmp_path, train={"report_every": 1}, checkpoint=OFTEN, **slow)
    made.fit(*few, epochs=2)
    expected = digests(tmp_path)
    waits = checkpoint.read_manifest(newest(tmp_path))["local_budget"]
    assert len(waits) == 3
    assert all(map(any, waits))
    interrupted(tmp_path, 7)
    monkeypatch.setattr("hybrid.method.method.fit_local_work", lambda *_: [LocalBudget(0, 0)] * 3)
    filled(3, tmp_path, train={"report_every": 1}, resume=True, **slow).fit(*few, epochs=2)
    assert checkpoint.read_manifest(newest(tmp_path))["local_budget"] == waits
    assert digests(tmp_path) == expected


def test_where_nobody_waits_the_hybrid_is_the_delayed_pipeline_bit_for_bit(few, tmp_path):
    """Even blocks of threads, whose messages take no time."""
    plain = trainer(DDG(), tmp_path / "plain", **ONCE)
    found = trained_weights(filled(2, tmp_path / "filled", local_budget=[(0, 0)] * 2, **ONCE), few)
    assert_same(found, trained_weights(plain, few))


@pytest.mark.parametrize(
    "other",
    [
        {"fill": "penalty"},
        {"fill": AugmentedLagrangian(filter=2)},
        {"fill": "none"},
        {"local_budget": [(4, 0), (0, 4)]},
    ],
    ids=str,
)
def test_a_run_goes_on_in_mid_epoch_with_other_local_steps(other, few, tmp_path):
    """Records of another kind are left out; a block that had none begins with the next ones."""
    settings = {"train": {"report_every": 1}, "checkpoint": OFTEN}
    filled(2, tmp_path, local_budget=[(0, 0), (0, 8)], **settings).fit(*few, epochs=2)
    stopped(tmp_path, 4)
    assert checkpoint.read_manifest(newest(tmp_path))["step"] == 4  # of 5 in an epoch
    again = {"fill": "augmented-lagrangian", "local_budget": [(0, 0), (0, 8)], **other}
    again = again if again["fill"] != "none" else {"fill": "none"}
    made = trainer(DDG(), tmp_path, 2, resume=True, **again, **settings)
    torch.use_deterministic_algorithms(True)  # unwritten memory is nan
    try:
        assert made.fit(*few, epochs=2)["rollbacks"] == []
    finally:
        torch.use_deterministic_algorithms(False)
    assert checkpoint.read_manifest(newest(tmp_path))["step"] == 10


def test_a_timetable_that_a_resume_replaces_is_told(few, tmp_path, capsys):
    filled(2, tmp_path, local_budget=[(4, 0), (0, 4)], **ONCE).fit(*few)
    for parts, told in ((DDG().num_micro_batches(32, 2), False), (1, True)):
        again = {"fill": "augmented-lagrangian", "resume": True, "quiet": False}
        trainer(DDG(micro_batches=parts), tmp_path, **again).fit(*few, epochs=3 if told else 2)
        assert ("its timetable of local steps is replaced" in capsys.readouterr().out) == told


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fill": PassSettings()}, "fill is PassSettings("),
        ({"fill": BlockADMM()}, "fill is BlockADMM("),
        ({"fill": AugmentedLagrangian(filter=3)}, "the filter is 3"),
        ({"fill": AugmentedLagrangian(momentum=0.5)}, "fill.momentum is 0.5, which has an effect"),
        (
            {"fill": "penalty", "local_budget": [(30, 9), (0, 8)]},
            "rounds.local_budget gives block 0 30 and 9",
        ),
        ({"solver": FDG(), "fill": "ddg"}, "unknown local method 'ddg'"),
        ({"solver": Backprop(), "fill": "penalty"}, "fill.name is 'penalty', but backprop has no"),
    ],
)
def test_local_steps_that_cannot_be_are_refused(settings, said, few):
    solver = settings.get("solver", DDG())
    more = {key: value for key, value in settings.items() if key != "solver"}
    assert refusal(lambda: trainer(solver, **more).fit(*few, epochs=1)).startswith(said)


def test_a_local_step_of_one_value_that_batchnorm_cannot_normalize_ends_the_run(few):
    layers = nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    waits = {
        "fill": "penalty",
        "local_budget": [(1, 0), (0, 2)],
        "train": {"epochs": 1, "batch_size": 16},
    }
    run = trainer_of(nn.Sequential(*layers), DDG(micro_batches=4), cuts=["4"], **waits)
    assert "Expected more than 1 value per channel when training" in refused(run, few)


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_16_bits_are_not_stored_of_a_network_of_float64(storage):
    x, y = torch.randn(32, 64, dtype=torch.float64), torch.randint(10, (32,))
    for solver, settings, name in (
        (DDG(), {"fill": AugmentedLagrangian(storage=storage)}, "fill"),
        (AugmentedLagrangian(storage=storage), {}, "solver"),
    ):
        net = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 10)).double()
        said = refusal(trainer_of(net, solver, cuts=["1"], **settings).fit, (x, y))
        assert said.startswith(f"{name}.storage is '{storage}', and the network has weights of")


@pytest.mark.parametrize(
    ("train", "rounds", "said"),
    [
        ({"kernels": "cupy"}, {"window": 4}, "no GPU"),
        (
            {"precision": "float16"},
            {"solver": DDG(), "fill": "penalty"},
            "choose bfloat16, or fill.name=none",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_be_had_here_is_refused(train, rounds, said, many):
    made = trainer(rounds.pop("solver", AugmentedLagrangian()), train=train, **rounds)
    assert said in refused(made, many)


@pytest.mark.parametrize(("blocks", "parts"), [(2, 2), (3, 4)])
def test_micro_batches_that_a_run_chooses_are_those_that_a_user_could_name(many, blocks, parts):
    """Passes that are timed before training leave no trace."""
    size = {"train": {"epochs": 1, "batch_size": 64}}
    chosen = trained_weights(trainer(DDG(), None, blocks, model="revnet8", **size), many)
    named = trainer(DDG(micro_batches=parts), None, blocks, model="revnet8", **size)
    assert_same(chosen, trained_weights(named, many))


def named():
    return trainer(DDG(micro_batches=2))


def users():
    layers = nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10)
    return trainer_of(nn.Sequential(*layers), DDG(), 2, sample=torch.zeros(2, 1, 8, 8))


class Plain(nn.ReLU):
    """A user's module."""


def exchanged():
    model = network()
    next(m for m in model.modules() if isinstance(getattr(m, "relu", None), nn.ReLU)).relu = Plain()
    return trainer_of(model, DDG(), 2, sample=torch.zeros(2, 1, 8, 8))


def hooked():
    model = network()
    next(model.parameters()).register_hook(lambda gradient: None)
    return trainer_of(model, DDG(), 2, sample=torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize("make", [named, users, exchanged, hooked])
def test_passes_are_timed_where_micro_batches_are_chosen_and_no_code_of_the_user_runs(
    few, monkeypatch, make
):
    seen: list[int] = []
    monkeypatch.setattr("hybrid.method.method.time_one_rank", lambda *_: float(seen.append(1) or 1))
    trainer(DDG()).fit(*few, epochs=1)
    assert len(seen) == 2  # of a rank each
    make().fit(*few, epochs=1)
    assert len(seen) == 2
