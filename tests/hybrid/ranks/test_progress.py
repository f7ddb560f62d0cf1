"""A bar is drawn on screens alone, by the thread that reports, and changes nothing else."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import contextmanager, suppress
from time import monotonic
from types import ModuleType

import pytest
from trainings import assert_same, digits, trainer
from world import for_mpirun

from hybrid.ranks import launch, progress
from hybrid.ranks.progress import PLAIN, Bar
from hybrid.solvers import Backprop


class Terminal:
    """A terminal of 100 columns, and what was written to it."""

    def __init__(self):
        self.main, self.side = pty.openpty()
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def text(self):
        os.close(self.side)
        return read(self.main)


def read(descriptor):
    found = b""
    try:
        while part := os.read(descriptor, 65536):
            found += part
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(descriptor)
    return found.decode()


@contextmanager
def on_screen(monkeypatch):
    """sys.stdout is a terminal."""
    for name in PLAIN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    made = Terminal()
    with monkeypatch.context() as patch, os.fdopen(os.dup(made.side), "w") as stream:
        patch.setattr(sys, "stdout", stream)
        yield made


def test_a_bar_counts_on_a_terminal_and_lines_appear_above_it(monkeypatch):
    threads = threading.active_count()
    with on_screen(monkeypatch) as screen:
        with Bar(8, text="at work") as bar:
            assert bar.shown
            assert not Bar(3).shown, "beside another one"
            bar.update(4, "half", now=True)
            print("a line | of a table")
            assert threading.active_count() == threads, "nobody draws beside the work"
        assert not bar.shown
        print("the end")
    written = screen.text()
    assert "4/8" in written
    assert "half" in written
    assert re.search(r"\x1b\[2Ka line \| of a table\r\n", written), "on a line of its own"
    assert written.endswith("\x1b[2Kthe end\r\n"), "the bar is gone"
    assert "\x1b[?25l" not in written, "a killed run would leave no cursor"


@pytest.mark.parametrize("name", [*PLAIN, "TERM", "rank", "quiet", "pipe"])
def test_elsewhere_nothing_is_drawn(monkeypatch, tmp_path, name):
    with on_screen(monkeypatch) as screen, (tmp_path / "log").open("w") as log:
        if name in (*PLAIN, "TERM"):
            monkeypatch.setenv(name, "dumb")
        if name == "rank":
            monkeypatch.setattr(launch, "launched_rank", lambda: 1)
        if name == "pipe":
            monkeypatch.setattr(sys, "stdout", log)
        with Bar(8, quiet=name == "quiet") as bar:
            bar.update(4, now=True)
            assert not bar.shown
    assert screen.text() == ""


def test_a_terminal_that_goes_away_does_not_end_the_work(monkeypatch):
    with suppress(OSError), on_screen(monkeypatch) as screen, Bar(8) as bar:
        os.close(screen.main)
        os.close(screen.side)
        for done in range(8):
            bar.update(done, now=True)
        assert not bar.shown


def test_a_notebook_shows_one_bar_that_is_updated(monkeypatch):
    shown = []

    class Handle:
        def update(self, table):
            shown.append(table._repr_mimebundle_([], [])["text/html"])

    def display(table, display_id):
        shown.append(table._repr_mimebundle_([], [])["text/html"])
        return Handle()

    ipython, inner = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython).update(get_ipython=lambda: type("Shell", (), {"kernel": True})())
    vars(inner).update(display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    with Bar(8, text="epoch 1/2") as bar:
        bar.update(4, now=True)
        bar.update(5)  # too soon
    assert [re.search(r"\d/8", html)[0] for html in shown] == ["0/8", "4/8", "5/8"]


def trained(quiet):
    made = trainer(Backprop(micro_batches=2), model="plain", quiet=quiet)
    made.fit(*digits(4), epochs=2)
    return made.blocks.model.state_dict()


def test_a_bar_moves_within_a_report_and_leaves_the_bits(monkeypatch):
    counted = []
    update = Bar.update
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(
        Bar, "update", lambda bar, *a, **k: (update(bar, *a, **k), counted.append(bar.done))[0]
    )
    with on_screen(monkeypatch) as screen:
        drawn = trained(quiet=False)
    assert {*range(1, 9)} <= {*counted}, "every mini-batch, though a report has 16"
    written = screen.text()
    assert "epoch 2/2, evaluation" in written
    assert len(re.findall(r"\x1b\[2Kepoch \d/2  test", written)) == 2, "a line for each epoch"
    assert_same(trained(quiet=True), drawn)


WORDS = ("train", "--blocks", "2", "--epochs", "500", "--set", "train.threads=1")


@pytest.mark.parametrize("by_mpirun", [False, True])
def test_the_terminal_shows_a_bar_and_ctrl_c_is_answered_there(hybrid_cli, tmp_path, by_mpirun):
    """Under mpirun the terminal is mpirun's."""
    words = [str(hybrid_cli.parent / "mpirun"), "-n", "2"] if by_mpirun else []
    written, status = interrupt(words, hybrid_cli, tmp_path)
    assert (status != 0) if by_mpirun else (status == 130)
    assert re.search(r"epoch 1/500 \S*━", written), "a bar"
    again = f"{'mpirun -n 2 ' * by_mpirun}hybrid train --resume --out {tmp_path / 'run'}"
    assert written.count(f"interrupted; go on with: {again}\r\n") == 1


def interrupt(words, hybrid_cli, tmp_path):
    """What a terminal shows of a command that gets Ctrl-C once it has begun; its status."""
    environment = {k: v for k, v in os.environ.items() if k not in PLAIN} | {"TERM": "xterm"}
    made, written = Terminal(), b""
    job = subprocess.Popen(
        [*words, str(hybrid_cli), *WORDS, "--out", str(tmp_path / "run")],
        **dict.fromkeys(("stdin", "stdout", "stderr"), made.side),
        env=environment | for_mpirun(),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(made.side)
    limit = monotonic() + 90
    while b"epoch 1/500  test" not in written and monotonic() < limit:
        written += os.read(made.main, 65536)
    job.send_signal(signal.SIGINT)
    written += read(made.main).encode()
    return written.decode(), job.wait(timeout=60)
