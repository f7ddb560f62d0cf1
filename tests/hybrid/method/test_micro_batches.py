"""On a GPU m follows from a measured pass, and a run repeats it from its settings."""

import pytest
from trainings import OFTEN, assert_same, digits, interrupted, trained_weights, trainer

from hybrid.method import micro_batches
from hybrid.settings.resolve import load
from hybrid.solvers import DDG, Backprop


@pytest.mark.parametrize(
    ("solver", "milliseconds", "m", "late"),
    [
        (DDG(), 100.0, 8, "0.38"),
        (DDG(), 39.9, 4, "0.75"),
        (DDG(), 10.0, 2, "1.5"),
        (DDG(), 2.0, 1, "3"),
        (DDG(micro_batches=2), 2.0, 2, ""),
        (Backprop(), 2.0, 1, ""),
    ],
    ids=str,
)
def test_no_pass_of_a_micro_batch_is_short(monkeypatch, capsys, solver, milliseconds, m, late):
    monkeypatch.setattr(micro_batches, "MEASURED_ON", "cpu")
    # of a mini-batch, all by its work: an eighth for one of eight micro-batches
    found = milliseconds / 1e3 / 8, 0.0
    monkeypatch.setattr(micro_batches, "longest_passes", lambda *arguments: found)
    data, train = digits(8), {"epochs": 1, "batch_size": 128}
    made = trainer(solver, blocks=4, train=train)
    made.options.quiet = False
    found = trained_weights(made, data)
    said = capsys.readouterr().out
    assert (f"{m} micro-batch" in said) == (f"at most {late} steps late" in said) == bool(late)
    same = type(solver)(micro_batches=m)
    assert_same(found, trained_weights(trainer(same, blocks=4, train=train), data))


def test_a_pass_is_measured_and_the_run_folder_has_the_m_that_was_chosen(
    monkeypatch, hybrid, tmp_path
):
    monkeypatch.setattr(micro_batches, "MEASURED_ON", "cpu")
    monkeypatch.setattr(micro_batches, "SHORTEST_PASS", 1e9)
    words = ("--solver", "ddg", "--data", "digits", "--set", "data.limit=128", "--epochs", "1")
    code, said, _ = hybrid("train", *words, "--blocks", "4", "--out", tmp_path / "run")
    assert code == 0
    assert "1 micro-batch of a mini-batch, since passes of one in 8 through a block take" in said
    config = load(None, {}, base=tmp_path / "run/config.toml")
    assert config.solver["micro_batches"] == 1


def test_a_run_goes_on_with_the_m_that_it_began_with(monkeypatch, tmp_path):
    monkeypatch.setattr(micro_batches, "MEASURED_ON", "cpu")
    found, data = [], digits(8)
    for name, shortest in (("undisturbed", 0.005), ("resumed", 0.0)):
        settings = {"out": tmp_path / name, "blocks": 4, "checkpoint": OFTEN}
        settings["train"] = {"epochs": 2, "batch_size": 64, "report_every": 1}
        monkeypatch.setattr(micro_batches, "longest_passes", lambda *arguments: (0.005 / 4, 0.0))
        trainer(DDG(), **settings).fit(*data)
        interrupted(tmp_path / name, 1)
        # another time would say as many as there can be
        monkeypatch.setattr(micro_batches, "SHORTEST_PASS", shortest)
        found.append(trained_weights(trainer(DDG(), resume=True, **settings), data))
    assert_same(*found)


def test_a_deterministic_run_measures_nothing(monkeypatch):
    monkeypatch.setattr(micro_batches, "MEASURED_ON", "cpu")
    monkeypatch.setattr(micro_batches, "longest_passes", None)
    train = {"epochs": 1, "batch_size": 128, "deterministic": True}
    trainer(DDG(), blocks=4, train=train).fit(*digits(4))


def test_on_other_replicas_a_run_goes_on_with_micro_batches_that_are_no_larger(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(micro_batches, "MEASURED_ON", "cpu")
    monkeypatch.setattr(micro_batches, "longest_passes", lambda *arguments: (1e-3, 0.0))
    settings = {"out": tmp_path / "run", "blocks": 4, "checkpoint": OFTEN}
    settings["train"] = {"epochs": 1, "batch_size": 128}
    trainer(DDG(), **settings).fit(*digits(8))
    settings["train"]["epochs"] = 2
    made = trainer(DDG(), resume=True, replicas=2, **settings)
    assert made.fit(*digits(8)).delay == [3.0, 2.0, 1.0, 0.0] * 2
