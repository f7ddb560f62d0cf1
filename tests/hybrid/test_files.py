"""Nothing that a run folder holds hangs a command, takes its memory, or shows another's file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import refusal

from hybrid import files
from hybrid.errors import one_line
from hybrid.folder import traces

HUGE = 40 * 2**30
READ = (
    *(("report", name) for name in ("config.toml", "metrics.jsonl", "summary.json")),
    *(("evaluate", "config.toml"), ("export", "config.toml"), ("train", "metrics.jsonl")),
)
"""By which command, what must be read."""


def answer(hybrid, command: str, run: Path) -> tuple[int, str]:
    words: dict[str, tuple[object, ...]] = {
        "report": (run,),
        "evaluate": (run,),
        "export": (run, run.parent / "model.safetensors"),
        "train": ("--resume", "--epochs", 3, "--out", run),
    }
    status, _, err = hybrid(command, *words[command])
    return status, err


def spoil(file: Path, kind: str) -> None:
    """Put something else in a file's place."""
    theirs = file.with_name("theirs")
    theirs.write_text("[train]\nsecret = 7\n")
    if kind == "huge":
        os.truncate(file, HUGE)  # it takes no room
        return
    file.unlink()
    if kind in ("pipe", "folder"):
        (os.mkfifo if kind == "pipe" else os.mkdir)(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else theirs)


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder", "huge"])
def test_what_is_no_file_of_the_run_is_refused(kind: str, run_folder) -> None:
    file = run_folder / "summary.json"
    spoil(file, kind)
    said = refusal(files.read_whole, file, 1000)
    assert said.startswith(f"{file} ")
    assert (f"has {HUGE} bytes, more than the 1000" in said) == (kind == "huge")


@pytest.mark.parametrize(("command", "name"), READ)
@pytest.mark.parametrize("kind", ["pipe", "link", "huge"])
def test_a_command_names_what_it_cannot_read(command, name, kind, run_folder, hybrid) -> None:
    spoil(run_folder / name, kind)
    status, err = answer(hybrid, command, run_folder)
    assert (status, err.count("\n"), name in err, "secret" in err) == (1, 1, True, False)


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The bytes of every line that is read."""
    sizes: list[int] = []
    original = files.read_lines

    def counted(*arguments: Any) -> Iterator[bytes]:
        for line in original(*arguments):
            sizes.append(len(line))
            yield line

    for module in (files, traces):
        monkeypatch.setattr(module, "read_lines", counted)
    return sizes


SPAN = '{"name": "x", "ph": "X", "pid": 0, "tid": 0}'


@pytest.mark.parametrize("row", ["[],\n", f"{SPAN},\n"])
def test_traces_are_read_in_bounds_however_many_files_name_them(
    row: str, read, tmp_path, monkeypatch
) -> None:
    """Ten links to a file of 64 MB."""
    monkeypatch.setattr(traces, "MOST_JOINED", 1000)
    file = tmp_path / "traces" / "0.json"
    file.parent.mkdir()
    file.write_text('{"traceEvents": [\n' + row * (traces.MOST_BYTES // len(row) - 1))
    for rank in range(1, 10):
        os.link(file, file.with_name(f"{rank}.json"))
    assert traces.spans(tmp_path) == [json.loads(SPAN)] * (1000 if SPAN in row else 0)
    assert len(read) <= 1010


def test_a_line_that_is_a_hole_in_a_file_ends_the_reading(tmp_path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"first\n")
    os.truncate(file, 2 * files.MOST_OF_A_LINE)
    lines = files.read_lines(file)
    assert next(lines) == b"first\n"
    with pytest.raises(ValueError, match=f"{file} line 2 has more than {files.MOST_OF_A_LINE}"):
        next(lines)


def test_a_users_own_settings_may_be_a_link_but_no_pipe(tmp_path, hybrid) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[train]\nepochs = 7\n")
    (tmp_path / "link").symlink_to(file)
    status, out, _ = hybrid("train", tmp_path / "link", "--print-config")
    assert (status, "epochs = 7" in out) == (0, True)
    os.mkfifo(tmp_path / "pipe")
    status, _, err = hybrid("train", tmp_path / "pipe", "--print-config")
    assert (status, f"{tmp_path / 'pipe'} is not a regular file" in err) == (1, True)


def failing(*_: object) -> None:
    """What a disk says that takes no byte more."""
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("content", ["after", b"after"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, call, content) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    monkeypatch.setattr(f"hybrid.files.os.{call}", failing)
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_atomically(path, content)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    if call == "fsync":
        assert one_line(caught.value).endswith(".partial: No space left on device")


@pytest.mark.parametrize("write", [files.write_atomically, files.write_durably])
def test_a_link_put_where_a_file_is_being_made_is_not_followed(tmp_path, write) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    place = tmp_path / ("file" if write is files.write_atomically else ".file.partial")
    (tmp_path / ".file.partial").symlink_to(theirs)
    write(place, "mine")
    assert (place.read_text(), theirs.read_text()) == ("mine", "theirs")


def test_a_folder_that_the_command_was_given_in_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "it").touch()
    monkeypatch.chdir(tmp_path / "in")
    for name in (".", tmp_path / "in"):
        with pytest.raises(ValueError, match="name a new"), files.whole_folder(Path(name), "it"):
            pass
    assert (tmp_path / "in" / "it").exists()
