"""The command: wrong use is one line and a non-zero exit; a run can be evaluated and exported."""

from pathlib import Path

import pytest
import torch
import typer
from answers import assert_one_line, output
from safetensors.torch import load_file
from trainings import newest, summary

from hybrid import data, load
from hybrid.cli.app import app
from hybrid.cli.failure import run_command
from hybrid.networks import models
from hybrid.ranks.stopping import listening

QUICK = ("--epochs", "2", "--batch-size", "256", "--set", "train.threads=1")
NO_WAY_BACK = ("--set", "checkpoint.rollbacks=0", "--set", "train.report_every=100")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--solver penalty --set solver.betta=1", ("solver.betta", "solver.beta")),
        ("--solver penalty --set solver.filter=3", ("filter is 3", "divides")),
        ("--blocks 99", ("99 blocks", "14 units", "1 to 14")),
        ("--blocks 9 --set split.inside=false", ("9 blocks", "5 units", "1 to 5")),
        ("--set split.inside=true --set split.cuts=['layer2.0']", ("inside", "split.cuts settles")),
        ("--window all --set rounds.memory_gb=0.0001", ("0.0001 GB", "memory_gb")),
        ("--set train.device=cuda", ("no GPU", "cpu")),
        ("no.toml", ("no.toml",)),
    ],
)
def test_wrong_settings_are_one_line_with_a_remedy(hybrid, tmp_path, flags, parts):
    assert_one_line(hybrid("train", *flags.split(), "--out", tmp_path / "run"), *parts)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_command_says_so(capfd):
    def interrupted():
        raise KeyboardInterrupt

    own = typer.Typer()
    own.command()(interrupted)
    command = typer.main.get_command(own)
    for remedy in ("; go on with: hybrid train --resume --out run", ""):
        with listening() as request:  # as for a training
            request.advice = remedy
            status = run_command(lambda: command.main(args=[], standalone_mode=False))
        assert status == 130
        assert capfd.readouterr().err.endswith(f"hybrid: error: interrupted{remedy}\n")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--resume --model resnet14", ("model resnet8, not resnet14",)),
        ("--resume --batch-size 100", ("steps_per_epoch 5, not 14",)),
        ("--resume --epochs 9 --lr 1e9", ("epoch 3", "the last good checkpoint is", "00000010")),
        ("", ("already holds a run", "--resume")),
    ],
)
def test_a_folder_that_holds_a_run_is_gone_on_with_as_it_is_or_not_at_all(
    hybrid, run_folder, flags, parts
):
    words = [*flags.split(), *(NO_WAY_BACK if "--lr" in flags else ())]
    before = (run_folder / "metrics.jsonl").read_bytes()
    assert_one_line(hybrid("train", "--out", run_folder, *words), *parts)
    assert (run_folder / "metrics.jsonl").read_bytes() == before


def test_a_flipped_byte_in_a_checkpoint_names_the_file_and_the_one_before(hybrid, run_folder):
    file = newest(run_folder) / "layer1.0.safetensors"
    content = bytearray(file.read_bytes())
    content[700] ^= 1
    file.write_bytes(content)
    for words in (
        ("train", "--resume", "--out", run_folder),
        ("evaluate", run_folder),
    ):
        assert_one_line(hybrid(*words), str(file), "wrong checksum", "resume from 00000005")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --resume --out .", "no checkpoint to resume from"),
        ("train --resume", "--resume needs --out"),
        ("evaluate .", "not a run folder"),
        ("export . m.safetensors", "not a run folder"),
    ],
)
def test_a_folder_that_is_no_run_is_named(hybrid, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert_one_line(hybrid(*words.split()), said)


@pytest.mark.parametrize(
    ("name", "said"),
    [("model.pt", ".safetensors"), ("no/m.safetensors", "No such file or directory")],
)
def test_export_to_what_can_be_no_safetensors_file_is_refused(
    hybrid, run_folder, tmp_path, name, said
):
    assert_one_line(hybrid("export", run_folder, tmp_path / name), name.rpartition("/")[2], said)
    assert list(tmp_path.glob("*model*")) == []


def test_evaluate_and_a_plain_model_with_the_export_give_the_accuracy_of_the_summary(
    hybrid, run_folder, tmp_path
):
    accuracy = summary(run_folder)["test_accuracy"]
    assert output(hybrid("evaluate", run_folder)).startswith(f"test accuracy {accuracy:.2%}")
    file = tmp_path / "model.safetensors"
    output(hybrid("export", run_folder, file))
    model = models.build("resnet8", 10, 1, 8).eval()
    model.load_state_dict(load_file(file))
    _, test = data.load("digits")
    with torch.no_grad():
        answers = model(test.batch(torch.arange(360), 0, 0, augment=False)).argmax(1)
    assert accuracy == float((answers == test.labels).double().mean())


@pytest.mark.parametrize(
    "command", [command.name or command.callback.__name__ for command in app.registered_commands]
)
def test_every_command_has_help_with_an_example(hybrid, command):
    assert "Example: " in output(hybrid(command, "--help"))


def test_what_no_user_should_see_is_one_line_and_a_file_with_the_details(capfd):
    def broken():
        raise KeyError("lost")

    assert run_command(broken) == 1
    err = capfd.readouterr().err
    assert_one_line((1, "", err), "KeyError: 'lost'", "details in ")
    log = Path(err.split("details in ")[1].strip(" )\n"))
    assert "Traceback" in log.read_text()
    log.unlink()


def test_a_text_is_trained_on_tested_in_bits_and_written(hybrid, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"abcdefg" * 700)
    flags = "--model gpt-2-64 --data text --blocks 2 --solver ddg --epochs 2 --batch-size 32"
    small = "data.length=16 solver.micro_batches=2 optimizer.name=adamw optimizer.lr=0.01"
    settings = [part for one in [*small.split(), "train.threads=1"] for part in ("--set", one)]
    run = tmp_path / "run"
    output(hybrid("train", *flags.split(), "--data-dir", text, *settings, "--out", run))
    tested = output(hybrid("evaluate", run))
    bits = summary(run)["test_bits_per_byte"]
    assert f"bits_per_byte {bits:.4g}" in tested
    assert bits < 0.5  # of 2.8, were the seven letters in any order
    goes_on = ("train", "--resume", "--out", run, "--epochs", 3)
    text.write_bytes(b"abcdefg" * 701)
    assert_one_line(hybrid(*goes_on), "has 4907 bytes that are not those of before")
    text.unlink()
    x = torch.full((1, 16), ord("a"))
    assert load(run)(x).shape == (1, 256, 16)
    written = output(hybrid("generate", run, "--prompt", "cde", "--bytes", 9, "--temperature", 0))
    assert written == "cdefgabcdefg\n"
    drawn = [output(hybrid("generate", run, "--bytes", 30, "--seed", seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    said = output(hybrid("generate", run, "--bytes", 1, "--prompt", "a\x1b[2J\té\nb\x9b"))
    assert said.startswith("a\\x1b[2J\té\nb\\x9b")
    assert_one_line(hybrid("generate", run, "--temperature", -1), "-1", "0 or above")
    assert_one_line(hybrid("generate", run, "--model", "resnet8"), "package.module:function")
    assert_one_line(hybrid("evaluate", run), "is not there")


def test_only_what_was_trained_on_text_is_written(hybrid, run_folder):
    assert_one_line(hybrid("generate", run_folder), "trained on digits", "trained on text")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model resnet8 --data text --data-dir .", "bytes of text"),
        ("--model gpt-2-64 --data text", "with --data-dir"),
        ("--data text --data-dir nowhere", "nowhere is not there"),
        ("--model gpt-2-64 --data text --data-dir . --set data.augment=false", "images"),
    ],
)
def test_a_text_that_cannot_be_is_one_line(hybrid, tmp_path, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    assert_one_line(hybrid("train", *flags.split(), "--out", "run"), said)
    assert not (tmp_path / "run").exists()
