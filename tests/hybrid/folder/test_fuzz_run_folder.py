"""Any change to the files of a run folder is one line from every command that reads it."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from commands import command
from hostile_settings import values
from hypothesis import given
from hypothesis import strategies as st

from hybrid.folder import checkpoint
from hybrid.training.run import Run

FILES = ("metrics.jsonl", "summary.json", "config.toml", "manifest.json")
READERS = ("report", "evaluate", "export", "resume")


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, str, list[int], Any, bytes]:
    """A file, a reader, a way to a value in the file, another value, and broken bytes."""
    way = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    broken = draw(st.binary(min_size=1, max_size=6)) if draw(st.integers(0, 4)) == 0 else b""
    file, reader = draw(st.sampled_from(FILES)), draw(st.sampled_from(READERS))
    return file, reader, way, draw(values), broken


def replaced(tree: Any, way: list[int], value: Any) -> Any:
    """`tree` with another value where `way` leads."""
    if not way or not isinstance(tree, dict | list) or not tree:
        return value
    if isinstance(tree, list):
        place = way[0] % len(tree)
        return [*tree[:place], replaced(tree[place], way[1:], value), *tree[place + 1 :]]
    key = list(tree)[way[0] % len(tree)]
    return {**tree, key: replaced(tree[key], way[1:], value)}


def change(path: Path, way: list[int], value: Any, broken: bytes) -> None:
    content = path.read_bytes()
    if broken:
        place = sum(way) * 37 % len(content)
        path.write_bytes(content[:place] + broken + content[place + len(broken) :])
    elif path.suffix == ".toml":
        lines = content.decode().splitlines()
        settable = [n for n, line in enumerate(lines) if "=" in line and line[0] != "#"]
        place = settable[sum(way) * 7 % len(settable)]
        try:
            lines[place] = f"{lines[place].partition('=')[0]}= {json.dumps(value)}"
        except ValueError:
            return
        path.write_text("\n".join(lines))
    elif path.suffix == ".jsonl":
        first = replaced(json.loads(content.splitlines()[0]), way, value)
        path.write_bytes(dumps(first) + b"\n" + content.partition(b"\n")[2])
    elif path.name == "manifest.json":
        body = json.loads(content)
        del body["sha256"]
        body = replaced(body, way, value)
        digest = {"sha256": checkpoint.digest(body)} if isinstance(body, dict) else {}
        path.write_bytes(dumps({**body, **digest} if digest else body))
    else:
        path.write_bytes(dumps(replaced(json.loads(content), way, value)))


def dumps(tree: Any) -> bytes:
    """JSON, or NaN where an integer has more digits than Python prints."""
    try:
        return json.dumps(tree).encode()
    except ValueError:
        return json.dumps(math.nan).encode()


def check(finished: Path, folder: Path, case: tuple[str, str, list[int], Any, bytes]) -> None:
    name, reader, way, value, broken = case
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(finished, out)
    at = checkpoint.complete(out / "checkpoints")[-1] if name == "manifest.json" else out
    change(at / name, way, value, broken)
    words = {
        "report": ("report", out),
        "evaluate": ("evaluate", out),
        "export": ("export", out, folder / "x.safetensors"),
        "resume": ("train", "--resume", "--out", out, "--epochs", 3, "--set", "train.threads=1"),
    }[reader]
    logs = hidden()
    begun = process_time()
    status, _, err = command(*words)
    assert process_time() - begun < 10
    assert hidden() == logs
    if status:
        assert err.startswith("hybrid: error: ")
        assert err.count("\n") == 1
        assert err[:-1].isprintable()
        assert len(err) < 2000
    else:
        assert err == ""


def hidden() -> set[str]:
    """Where tracebacks are kept that no user should see."""
    return {p for p in os.listdir(tempfile.gettempdir()) if p.startswith("hybrid-error-")}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run that is opened, trains nothing and is closed; and no pictures."""

    def skip(run: Run) -> None:
        run.training.position.epoch = run.options.train.epochs

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))
    monkeypatch.setattr(Run, "_train_epoch", skip)
    monkeypatch.setattr("hybrid.report.single.curves", lambda *_: ())


@pytest.mark.usefixtures("quick")
@given(changes())
def test_a_changed_run_folder_is_read_or_answered_in_one_line(finished, tmp_path, case) -> None:
    check(finished, tmp_path, case)
