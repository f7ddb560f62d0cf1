"""Another package adds a command and the report of its runs by entry points."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest
from answers import assert_one_line, output

from hybrid.solvers import named

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
            EntryPoint("act", "own_acts", "hybrid.reports"),
            *(EntryPoint("broken", "own_broken:X", f"hybrid.{kind}") for kind in KINDS),
        ]
    )
    (tmp_path / "own_broken.py").write_text("raise RuntimeError('libfoo\\nis missing')")
    monkeypatch.setattr(named, "entry_points", points.select)
    return points


KINDS = ("commands", "sync", "samplers")
CAUSE = "'broken' of another package cannot be imported: RuntimeError: libfoo is missing: install "
LEFT_OUT = f"{CAUSE}that package again, or uninstall it (it is left out)\n"


def test_its_command_is_one_of_ours(hybrid, own):
    assert output(hybrid("act")) == "acted\n"
    assert_one_line(hybrid("broken"), f"hybrid: error: command {CAUSE}")


def test_what_cannot_be_imported_is_named_and_left_out(hybrid, own):
    _, shown, told = hybrid("--help")
    assert "  act " in shown
    assert f"hybrid: command {LEFT_OUT}" in told
    for listed, kind in (("sync", "strategy"), ("samplers", "sampler")):
        status, shown, told = hybrid("list", listed)
        assert (status, told) == (0, f"hybrid: {kind} {LEFT_OUT}")
        assert "broken" not in shown


def test_without_it_the_command_is_unknown(hybrid):
    assert_one_line(hybrid("act"), "No such command 'act'", status=2)


def test_its_runs_have_its_report(hybrid, own, tmp_path):
    (tmp_path / "acts").touch()
    output(hybrid("report", tmp_path))
    assert (tmp_path / "report" / "index.html").read_text() == "<p>acts</p>"
    for words in (("evaluate",), ("export", "m.safetensors"), ("report", "another")):
        told = hybrid(words[0], tmp_path, *words[1:])
        assert_one_line(told, "is a run of hybrid act, which has no test data and no one network")


def test_a_report_that_cannot_be_had_is_named_and_left_out(hybrid, own, tmp_path, monkeypatch):
    (tmp_path / "acts").touch()
    others = {"broken": "own_broken", "failing": "own_acts:content"}
    points = [EntryPoint(name, place, "hybrid.reports") for name, place in others.items()]
    monkeypatch.setattr(named, "entry_points", EntryPoints([*points, *own]).select)
    status, _, told = hybrid("report", tmp_path)
    assert (status, told.count("\n")) == (0, 2)
    assert f"hybrid: report {LEFT_OUT}" in told
    assert "hybrid: report 'failing' fails at " in told
    assert (tmp_path / "report" / "index.html").read_text() == "<p>acts</p>"
