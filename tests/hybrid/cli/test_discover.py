"""`hybrid list`, `explain` and `train --print-config`: what there is, in words."""

import json

import pytest
import typer
from answers import assert_one_line, output

from hybrid import data
from hybrid.cli.app import app
from hybrid.networks.models.families import FAMILIES
from hybrid.settings.methods import NAMED, explanations, known_settings
from hybrid.settings.resolve import load, to_toml
from hybrid.solvers import registry


def test_everything_there_is_has_a_line(hybrid):
    found = json.loads(output(hybrid("list", "--json")))
    assert list(found["solvers"]) == registry.names()
    assert list(found["sync"]) == list(NAMED["sync"])
    assert list(found["samplers"]) == list(NAMED["sampler"])
    assert list(found["models"]) == list(FAMILIES)
    assert all(line and "\n" not in line for names in found.values() for line in names.values())
    for name in ("digits", "synthetic"):  # which need no files
        assert name in found["data"]
        assert len(data.load(name)[0])
    shown = output(hybrid("list", "sync"))
    assert [line.split()[0] for line in shown.splitlines()] == ["sync", *NAMED["sync"]]


def test_every_setting_is_explained():
    every = {setting for name in registry.names() for setting in known_settings(name)}
    for section, known in NAMED.items():
        for name in known:
            every |= known_settings(registry.DEFAULT, {section: name}).keys()
    for setting in every:
        for text in explanations(setting, {}):
            first, help_text = text.splitlines()[:2]
            assert first.startswith(f"{setting}: ")
            assert ", by default " in first
            assert help_text.strip()


def test_a_key_alone_is_explained_wherever_it_is(hybrid):
    said = output(hybrid("explain", "beta"))
    assert "solver.beta: float, which must be positive, by default 0.0005" in said
    assert "of penalty, augmented-lagrangian" in said
    assert "sampler.beta: float, which must " in said
    said = output(hybrid("explain", "train.epochs"))
    assert "int, at least 1" in said
    assert "also --epochs" in said
    assert "'float32' or 'bfloat16'" in output(hybrid("explain", "solver.storage"))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("rounds.windw", "unknown setting 'rounds.windw'; did you mean 'rounds.window'?"),
        ("", "unknown setting ''"),
    ],
)
def test_a_setting_that_is_not_there_is_one_line(hybrid, asked, reason):
    assert_one_line(hybrid("explain", asked), reason)


def test_settings_are_printed_and_repeat_the_run(hybrid, tmp_path):
    words = ("--solver", "ddg", "--batch-size", 32, "--set", "sampler.name=auto-assist")
    text = output(hybrid("train", *words, "--print-config", "--out", tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    file = tmp_path / "run.toml"
    file.write_text(text)
    read = load(file, {})
    assert to_toml(read).strip() == text.strip()
    assert (read.solver["name"], read.sampler["name"]) == ("ddg", "auto-assist")
    assert read.train.batch_size == 32


def test_help_fits_80_columns_and_has_the_flags_in_groups(hybrid, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = output(hybrid("--help"))
    assert "..." not in shown.replace("[ARGS]...", "")
    commands = shown.partition("Commands:")[2].split("\n\n")[0].split("\n")[1:]
    assert [line.split()[0] for line in commands][:3] == ["train", "evaluate", "report"]
    said = output(hybrid("train", "--help"))
    groups = [line for line in said.splitlines() if line.endswith(":") and line[0] != " "]
    assert groups[1:4] == ["Network and data:", "Method:", "Training:"]
    assert groups[-1] == "Options:"
    assert max(map(len, (shown + said).splitlines())) <= 80
    flags = typer.main.get_command(app).commands["train"].params
    assert not [flag for each in flags for flag in each.opts if flag not in said]
