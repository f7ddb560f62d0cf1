"""The best checkpoint of a run evaluated and exported."""

import json

import pytest
from answers import assert_one_line, output
from safetensors.torch import load_file
from trainings import assert_same

from hybrid.folder import checkpoint


@pytest.fixture
def first_is_best(run_folder):
    """A run whose first epoch did best, and that kept it."""
    config = run_folder / "config.toml"
    config.write_text(config.read_text().replace("\nbest = false", "\nbest = true"))
    return told(run_folder, tested={"accuracy": 1.0})


def told(run, **news):
    """Let the checkpoint of the first epoch tell other things; gives it."""
    folder = run / "checkpoints" / "00000005"
    body = {**checkpoint.read_manifest(folder), **news}
    text = json.dumps({**body, "sha256": checkpoint.digest(body)})
    (folder / "manifest.json").write_text(text)
    return folder


def test_evaluate_takes_the_best_if_asked(hybrid, run_folder, first_is_best):
    assert f"({first_is_best})" in output(hybrid("evaluate", run_folder, "--best"))
    assert "00000010)" in output(hybrid("evaluate", run_folder))


def test_export_takes_the_best_if_asked(hybrid, run_folder, first_is_best, tmp_path):
    file = tmp_path / "model.safetensors"
    output(hybrid("export", run_folder, file, "--best"))
    manifest = checkpoint.read_manifest(first_is_best)
    assert_same(load_file(file), checkpoint.load_model(first_is_best, manifest))


def test_a_run_that_kept_no_best_says_how_to(hybrid, run_folder, tmp_path):
    for words in (("evaluate", run_folder), ("export", run_folder, tmp_path / "m.safetensors")):
        answer = hybrid(*words, "--best")
        assert_one_line(answer, "kept its newest 2 checkpoints", "checkpoint.best=true")


def test_a_run_without_a_tested_checkpoint_has_no_best(hybrid, run_folder, first_is_best):
    told(run_folder, tested_step=None)
    (run_folder / "checkpoints" / "00000010" / "manifest.json").unlink()
    assert_one_line(hybrid("evaluate", run_folder, "--best"), "weights that were tested")
