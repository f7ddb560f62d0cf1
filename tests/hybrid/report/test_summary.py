"""What `fit` gives back: keys, attributes, a table and curves, with and without a run folder."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_type_hints

import pytest
from trainings import digits, trainer

import hybrid
from hybrid.solvers import Backprop

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=["folder", "memory"])
def made(request, tmp_path_factory):
    """(the summary of a training, its run folder)."""
    out = tmp_path_factory.mktemp("summary") / "run" if request.param == "folder" else None
    return trainer(Backprop(), out, model="plain").fit(*digits(4), epochs=3), out


def test_a_summary_has_keys_and_attributes_and_is_what_the_file_has(made):
    summary, out = made
    assert isinstance(summary, hybrid.Summary)
    assert summary["test_accuracy"] == summary.test_accuracy > 0
    assert "test_accuracy" in dir(summary)
    with pytest.raises(AttributeError, match="no 'accuracy'; it has solver, model"):
        summary.accuracy  # noqa: B018
    assert out is None or json.loads((out / "summary.json").read_text()) == summary
    assert {*get_type_hints(hybrid.Summary)} - {"history", "out"} == {*summary}, (
        "what is typed is what there is"
    )


def test_it_keeps_what_each_epoch_came_to_under_the_names_of_callbacks(made):
    history = made[0].history
    assert [epoch["epoch"] for epoch in history] == [1, 2, 3]
    assert history[-1]["test_accuracy"] == made[0].test_accuracy
    assert history[-1]["seconds"] == made[0].train_seconds
    assert [epoch["samples"] for epoch in history] == [128, 256, 384]


def test_a_notebook_shows_a_table_and_curves(made, tmp_path):
    pytest.importorskip("matplotlib")
    summary, _ = made
    table = summary._repr_html_()
    assert f"<td>{summary.test_accuracy:.2%}</td>" in table
    drawn = summary.plot(tmp_path / "curves.html")
    html = drawn._repr_html_()
    for title in ("Loss, by epochs", "Accuracy, by seconds of training", "Throughput"):
        assert html.count(f"<h3>{title}</h3>") == 1
    assert "</i>test</span>" in html
    assert html.count("<svg") in (5, 6), "lines of a folder have idle shares, too"
    assert (tmp_path / "curves.html").read_text().count("<svg") == html.count("<svg")
    assert len(repr(drawn)) < 100


def test_an_interrupt_is_one_line_in_scripts_and_notebooks_and_frees_the_folder(tmp_path):
    old, timers = signal.signal(signal.SIGINT, signal.default_int_handler), []

    class Stop(hybrid.Callback):
        def on_epoch(self, epoch, results):
            timers.append(threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)))
            timers[-1].start()

    try:
        for blocks in (1, 2):
            out = tmp_path / str(blocks)
            first = trainer(Backprop(), out, blocks, model="plain", callbacks=[Stop()])
            with pytest.raises(KeyboardInterrupt) as error:
                first.fit(*digits(4), epochs=1000)
            line = f"interrupted; go on with resume=True, out='{out}'"
            assert str(error.value) == line
            assert error.value._render_traceback_() == [f"hybrid: {line}"]  # IPython's hook
            again = trainer(Backprop(), out, blocks, model="plain", resume=True)
            assert again.fit(*digits(4), epochs=1).epochs >= 1
            timers[-1].join()
    finally:
        signal.signal(signal.SIGINT, old)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
from trainings import digits, trainer
from hybrid import Callback
from hybrid.solvers import Backprop

class Stop(Callback):
    def on_epoch(self, epoch, results):
        os.kill(os.getpid(), signal.SIGINT)

trainer(Backprop(), model="plain", blocks=1, callbacks=[Stop()]).fit(*digits(4), epochs=9)
"""


def test_a_script_that_is_interrupted_ends_in_a_line():
    words = [sys.executable, "-c", SCRIPT, str(ROOT / "tests/support/runs")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "hybrid: interrupted\n")
