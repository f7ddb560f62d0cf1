"""Several runs on one page: seeds together, what differs, curves by epochs and by time."""

import json
import re
import shutil
from pathlib import Path

import pytest
from answers import assert_one_line, output
from trainings import digits, trained_weights, trainer

from hybrid.report.comparison import content
from hybrid.report.records import read
from hybrid.solvers import DDG, Backprop

FLAGS = ("--epochs", 2, "--set", "data.limit=128", "--batch-size", 32, "--set", "train.threads=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods with two seeds each, which take a second each."""
    from commands import command

    folder = tmp_path_factory.mktemp("runs")
    made = []
    for solver in ("backprop", "ddg"):
        for seed in (0, 1):
            out = folder / f"{solver}-{seed}"
            words = ("--solver", solver, "--seed", seed, "--blocks", 2, "--out", out)
            output(command("train", *FLAGS, *words))
            made.append(out)
    return made


def text(page):
    document = re.sub(r"<script.*?</script>", " ", Path(page).read_text(), flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", document)


def test_seeds_are_one_row_and_methods_are_compared(runs, hybrid, tmp_path):
    said = output(hybrid("report", *runs, "--out", tmp_path / "page"))
    assert said == f"wrote {tmp_path / 'page' / 'index.html'}\n"
    page = (tmp_path / "page" / "index.html").read_text()
    shown = text(tmp_path / "page" / "index.html")
    assert "4 runs compared: resnet8 on digits" in shown
    rows = re.findall(r'<th scope="row">((?:backprop|ddg) [^<]*)</th><td>(\d)</td>', page)
    assert rows == [("backprop (backprop-0, backprop-1)", "2"), ("ddg (ddg-0, ddg-1)", "2")]
    both = [json.loads((run / "summary.json").read_text())["test_accuracy"] for run in runs]
    assert f"{50 * (both[0] + both[1]):.2f}" in shown
    assert "solver.name" in shown
    assert "train.seed" not in shown  # which is no difference
    for title in ("Test accuracy", "Test loss", "Training loss"):
        for axis in ("epochs", "seconds of training"):
            assert re.search(rf"{title}[^<]*, by {axis}", shown)
    assert shown.count("Throughput") == 1
    assert not re.search(r"<(script|img|link)[^>]+(src|href)=", page)  # it stands alone
    assert len(page) < 1e6


def test_runs_of_the_library_and_runs_that_have_not_ended_take_part(runs, hybrid, tmp_path):
    own, going = tmp_path / "own", Path(shutil.copytree(runs[0], tmp_path / "going"))
    trained_weights(trainer(DDG(), own), digits(2))
    trained_weights(trainer(Backprop(), tmp_path / "second"), digits(2))
    (going / "summary.json").unlink()
    output(hybrid("report", own, going, tmp_path / "second", "--out", tmp_path / "page"))
    assert "3 runs compared" in text(tmp_path / "page" / "index.html")


def test_a_folder_that_is_no_run_is_one_line(runs, hybrid, tmp_path):
    assert_one_line(hybrid("report", runs[0], tmp_path), "is not a run folder", "--out")
    file = tmp_path / "file"
    file.write_text("")
    assert_one_line(hybrid("report", *runs, "--out", file), "file")
    assert file.read_text() == ""


def by_hand(folder, epochs, accuracy, **known):
    """A run folder of a run of the library, tested after each epoch."""
    folder.mkdir()
    tests = [
        {"step": e, "epoch": e, "phase": "test", "test_accuracy": 0.5} for e in range(1, epochs + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tests))
    told = {"solver": folder.name, "epochs": epochs, "test_accuracy": accuracy, **known}
    (folder / "summary.json").write_text(json.dumps(told))
    return folder


def test_of_runs_that_cannot_be_compared_the_page_tells_the_difference(tmp_path):
    runs = [
        by_hand(tmp_path / "a", 3, 0.98, data="digits", solver="ddg"),
        by_hand(tmp_path / "b", 2, 0.99, data="mnist", solver="fdg"),
    ]
    rows = re.findall(r"<tr>.*?</tr>", compared(runs))
    assert "<td>1</td><td>3</td><td>98.00" in rows[1]
    assert "<td>1</td><td>2</td><td>99.00" in rows[2]
    assert '<th scope="row">data.name</th><td>digits</td><td>mnist</td>' in rows[4]


def test_runs_of_several_launchers_are_no_seeds_of_each_other(tmp_path):
    told = {"a": "threads", "b": "mpi", "c": "torch", "d": "mpi"}
    runs = [by_hand(tmp_path / x, 2, 0.9, solver="ddg", links=links) for x, links in told.items()]
    named = {"threads (a)": "1", "mpi (b, d)": "2", "torch (c)": "1"}
    assert names_and_counts(runs) == named
    assert names_and_counts(runs[1::2]) == {"b, d": "2"}


def test_a_name_has_what_tells_runs_apart_and_tells_folders_of_one_name_apart(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    runs = [
        by_hand(tmp_path / "x" / "run", 2, 0.9, solver="ddg", data="digits", blocks=2),
        by_hand(tmp_path / "y" / "run", 2, 0.9, solver="ddg", data="digits", blocks=4),
        by_hand(tmp_path / "third", 2, 0.9, solver="ddg", data="cifar10", blocks=8),
    ]
    assert [*names_and_counts(runs)][:3] == [
        f"digits, blocks 2 ({runs[0]})",
        f"digits, blocks 4 ({runs[1]})",
        f"cifar10 ({runs[2]})",
    ]


def names_and_counts(runs):
    """Of the table of runs."""
    return dict(re.findall(r'<th scope="row">([^<]+)</th><td>(\d)</td><td>', compared(runs)))


def compared(runs):
    return content([read(run) for run in runs]).decode()
