"""Other packages add what a run is made of, and commands with their reports, by entry points."""

import sys
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


THEIRS = """
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.data import TensorDataset

from hybrid.data.samplers.uniform import Uniform
from hybrid.links import ThreadLinks
from hybrid.solvers import Backprop
from hybrid.solvers.sync.all_reduce import AllReduce

MADE = Counter()

@dataclass(frozen=True)
class Solver(Backprop):
    name: ClassVar[str] = "mine"

    def start(self, *arguments):
        MADE["solver"] += 1
        return super().start(*arguments)

@dataclass(frozen=True)
class Strategy(AllReduce):
    name: ClassVar[str] = "ours"
    strength: int = 3
    "How strongly replicas agree."

    def start(self, *arguments):
        MADE["strategy"] += self.strength
        return super().start(*arguments)

@dataclass(frozen=True)
class Sampler(Uniform):
    name: ClassVar[str] = "same"

    def start(self, *arguments):
        MADE["sampler"] += 1
        return super().start(*arguments)

class Links(ThreadLinks):
    name = "counting"

    def _send(self, *message):
        MADE["link"] += 1
        super()._send(*message)

def noise():
    MADE["data"] += 1
    pair = TensorDataset(torch.randn(16, 1, 8, 8), torch.arange(16) % 4)
    pair.classes = "abcd"
    return pair, pair
"""
POINTS = """[hybrid]
solver.mine = theirs:Solver
strategy.ours = theirs:Strategy
sampler.same = theirs:Sampler
link.counting = theirs:Links
data.noise = theirs:noise
"""


def test_an_installed_package_adds_all_that_a_run_is_made_of(hybrid, tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    (tmp_path / "theirs-1.0.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    (tmp_path / "theirs-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(named, "entry_points", named.entry_points.__wrapped__)
    words = ["--solver", "mine", "--data", "noise", "--blocks", "2", "--replicas", "2"]
    for key in ("sync.name=ours", "sync.strength=4", "sampler.name=same", "links.kind=counting"):
        words += ["--set", key]
    output(hybrid("train", *words, "--epochs", "1", "--batch-size", "8"))
    made = sys.modules["theirs"].MADE
    assert min(made[kind] for kind in ("solver", "strategy", "sampler", "link", "data")) > 0
    said = hybrid("train", "--set", "sync.strength=4")
    assert_one_line(said, "sync.strength is a setting of ours; this run's sync.name is all-reduce")


@pytest.fixture
def own(monkeypatch, tmp_path):
    """As if a package of this name were installed."""
    (tmp_path / "own_acts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    points = EntryPoints(
        [
            EntryPoint("command.act", "own_acts:app", "hybrid"),
            EntryPoint("report.act", "own_acts", "hybrid"),
            *(EntryPoint(f"{kind}.broken", "own_broken:X", "hybrid") for kind in KINDS),
        ]
    )
    (tmp_path / "own_broken.py").write_text("raise RuntimeError('libfoo\\nis missing')")
    monkeypatch.setattr(named, "entry_points", lambda: points)
    return points


KINDS = ("command", "strategy", "sampler")
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
    points = [EntryPoint(f"report.{name}", place, "hybrid") for name, place in others.items()]
    monkeypatch.setattr(named, "entry_points", lambda: EntryPoints([*points, *own]))
    status, _, told = hybrid("report", tmp_path)
    assert (status, told.count("\n")) == (0, 2)
    assert f"hybrid: report {LEFT_OUT}" in told
    assert "hybrid: report 'failing' fails at " in told
    assert (tmp_path / "report" / "index.html").read_text() == "<p>acts</p>"
