"""Another package adds a command and the report of its runs by entry points."""

from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from answers import assert_one_line, output

MODULE = """
import typer
app = typer.Typer(add_completion=False)

@app.command()
def act():
    "Act."
    typer.echo("acted")

def is_run(folder):
    return (folder / "acts").exists()

def content(run):
    return b"<p>acts</p>"
"""


@pytest.fixture
def own(monkeypatch, tmp_path):
    """As if a package of this name were installed."""
    (tmp_path / "own_acts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    points = EntryPoints(
        [
            EntryPoint("act", "own_acts:app", "hybrid.commands"),
            EntryPoint("gone", "own_gone:app", "hybrid.commands"),
            EntryPoint("act", "own_acts", "hybrid.reports"),
        ]
    )
    for place in ("hybrid.solvers.named", "hybrid.report.single"):
        monkeypatch.setattr(import_module(place), "entry_points", points.select)


def test_its_command_is_one_of_ours(hybrid, own):
    assert output(hybrid("act")) == "acted\n"
    assert_one_line(
        hybrid("gone"),
        "which adds the command 'gone', cannot be imported",
        "No module named 'own_gone'",
    )


def test_without_it_the_command_is_unknown(hybrid):
    assert_one_line(hybrid("act"), "No such command 'act'", status=2)


def test_its_runs_have_its_report(hybrid, own, tmp_path):
    (tmp_path / "acts").touch()
    output(hybrid("report", tmp_path))
    assert (tmp_path / "report" / "index.html").read_text() == "<p>acts</p>"
    for words in (("evaluate",), ("export", "m.safetensors"), ("report", "another")):
        told = hybrid(words[0], tmp_path, *words[1:])
        assert_one_line(told, "is a run of hybrid act, which has no test data and no one network")
