"""The documentation tells the truth of today."""

import ast
import json
import re
import runpy
import sys
from contextlib import suppress
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conditions import check
from typer.testing import CliRunner

from hybrid.cli.app import app
from hybrid.data.samplers import SAMPLERS
from hybrid.solvers import named, registry
from hybrid.solvers.base import Setup
from hybrid.solvers.registry import STRATEGIES

ROOT = Path(__file__).parents[1]


def code_of(page: str) -> list[str]:
    """The blocks of Python of a page."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_page(page: str, code: str | None = None) -> dict[str, Any]:
    """What a page's code defines, run as a module: its classes can be found by name."""
    names: dict[str, Any] = {"__name__": page.replace("-", "_")}
    exec(compile(code or "\n".join(code_of(page)), f"{page}.md", "exec"), names)
    return names


def test_the_page_of_settings_is_the_declarations():
    page = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    assert page["PAGE"].read_text() == page["written"](), "run python docs/settings.py"


@pytest.mark.parametrize("name", [*registry.names(), *STRATEGIES, *SAMPLERS])
def test_everything_that_a_run_can_name_has_a_heading_of_a_page(name):
    pages = {*ROOT.glob("docs/*.md")} - {ROOT / "docs" / "settings.md"}
    assert any(re.search(rf"^#+ .*`{name}`", page.read_text(), re.MULTILINE) for page in pages)


def test_pages_name_the_methods_that_refuse_replicas():
    refusing = set()
    for name in registry.names():
        solver = registry.solver_class(name)()
        alone, grid = (
            Setup(((4, 2, 2),), 8, stored_batches=1, replicas=R, total=8 * R) for R in (1, 2)
        )
        check(solver, alone)
        with suppress(ValueError):
            check(solver, grid)
            continue
        refusing.add(name)
    for page, begins in (("README.md", "Every method but "), ("docs/replicas.md", "All but ")):
        text = " ".join((ROOT / page).read_text().split())
        (said,) = re.findall(rf"{begins}(.*?) run", text)
        assert {name for name in registry.names() if name in said} == refusing


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md"))], ids=str)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("file", sorted(ROOT.glob("docs/benchmarks/*.py")), ids=str)
def test_what_a_benchmark_imports_is_there(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and re.match("hybrid|solvers", node.module or ""):
            for name in node.names:
                exec(f"from {node.module} import {name.name}", {})


def test_the_page_on_your_own_network_does_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "".join(code_of("your-own-network")).count("Trainer(") == 6
    run_page("your-own-network")
    assert (tmp_path / "runs" / "own" / "summary.json").exists()


@pytest.mark.parametrize("name", ["callbacks", "samplers", "your-own-solver", "your-own-strategy"])
def test_what_a_page_shows_of_ones_own_trains(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = run_page(name).get("summary", {"test_accuracy": 1.0})
    assert "epoch 2/" in capsys.readouterr().out
    assert summary["test_accuracy"] > 0.5  # of ten classes


def test_the_notebook_runs_and_keeps_no_outputs(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in code:
        *body, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(body, []), "notebook", "exec"), names)
        assert isinstance(last, ast.Expr), "each cell shows something"
        shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
    blocks, summary, accuracies, curves = shown
    assert blocks._repr_html_().count("<tr>") == 3
    assert f"<td>{summary.test_accuracy:.2%}</td>" in summary._repr_html_()
    assert accuracies[-1] == summary.test_accuracy > 0.9
    assert "<svg" in curves._repr_html_()


def test_links_and_data_of_the_page_train_by_their_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "your-own-links-and-data.md").read_text()
    theirs = ModuleType("theirs")
    vars(theirs).update(run_page("your-own-links-and-data"))
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    rows = re.findall(r'^    "(\w+\.\w+)" = "(.*?)"', text, re.MULTILINE)
    points = EntryPoints([EntryPoint(name, value, "hybrid") for name, value in rows])
    monkeypatch.setattr(named, "entry_points", lambda: points)
    settings = {"train.epochs": 2, "split.blocks": 2, "links.kind": "counting"}
    given = {"model.name": "resnet8", "data.name": "stripes", "train.batch_size": 32, **settings}
    words = [word for k, v in given.items() for word in ("--set", f"{k}={v}")]
    result = CliRunner().invoke(app, ["train", *words])
    assert result.exit_code == 0, result.output
    assert "epoch 2/" in result.output
    assert min(theirs.SENT[0], theirs.SENT[1]) > 0


def test_the_sampler_of_the_page_is_kept_in_a_run_folder_and_goes_on(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(code_of("samplers"))
    kept = code.replace("sampler=Hardest(lag=4))", 'sampler=Hardest(lag=4), out="run")')
    assert kept != code
    run_page("samplers", kept)
    again = kept.replace('out="run"', 'out="run", resume=True').replace("epochs=2", "epochs=3")
    run_page("samplers", again)


def test_a_simulated_figure_says_so_where_it_stands():
    simulated = (
        r"1\.27 t|2\.9 (?:and|t)|4\.5 t|6\.1 t|2\.61? t|1\.94 t|1\.44 t|twelve|10 of 12|0 of 18"
    )
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "docs/benchmarks/README.md"]:
        for piece in re.split(r"\n\n|\n(?=\|| *- )", page.read_text()):
            if re.search(simulated, piece):
                assert "simulated" in piece, (page, piece)


def test_pictures_show_the_figures_of_their_pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page, drawn = runpy.run_path(str(ROOT / "docs" / "pictures.py")), {}
    monkeypatch.setitem(
        page["speed"].__globals__, "save", lambda figure, name: drawn.update({name: figure})
    )
    page["speed"]()
    page["accuracy"]()
    figures = ROOT / "docs" / "benchmarks"
    for name, text, points in (
        ("speed-up-blocks", figures / "delays/to-the-end.md", slice(1, 3)),
        ("speed-up-links", figures / "auxiliary/slow-links.md", slice(0, 2)),
        ("accuracy-over-time", figures / "delays/to-the-end.md", slice(-1, None)),
    ):
        said = set(re.findall(r"\d+\.\d+", text.read_text()))
        axes = drawn[name].axes[0]
        assert "simulated" in axes.get_xlabel()
        lines = {str(x.get_label()): [f"{y:.2f}" for y in x.get_ydata()] for x in axes.lines}
        assert any("default" in label for label in lines) or name != "speed-up-blocks"
        for label in lines.keys() - {"K times"}:
            # the page has neither flushed pipelines on slow links nor the line at one rank's rate
            if name != "speed-up-links" or label.startswith(("data", "no bubble")):
                assert set(lines[label][points]) <= said, (name, label)


def test_no_table_is_broken_by_an_empty_line():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
            assert re.match(r".*\n\| ?--", table), (page, table)


PAGES = sorted(ROOT.glob("docs/benchmarks/**/*.md"))


def test_prose_is_wrapped_at_120_characters():
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for line in _prose(page)
        if len(_without_addresses(line)) > 120
    ]
    assert not wide


def test_a_page_of_results_has_at_most_600_words():
    free = {"README.md", "appendix.md"}
    words = {page: sum(len(line.split()) for line in _prose(page)) for page in PAGES}
    assert not {page.name: n for page, n in words.items() if n > 600 and page.name not in free}
    assert sum(words.values()) > 1000


def _prose(page):
    """Lines outside tables, headings, pictures and code, which is fenced or after an empty line."""
    fenced = indented = False
    before = ""
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        fenced ^= fence
        indented = line.startswith("    ") and (indented or not before)
        if not (fence or fenced or indented or re.match(r"\s*\||#|!\[", line)):
            yield line
        before = line.strip()


def _without_addresses(line):
    """What can be broken of a line."""
    return re.sub(r"\]\([^)]*\)|https?://\S+", "", line)
