"""Nothing that a run folder holds hangs a command, takes its memory, or shows another's file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid import reading

READ = {
    "report": ("config.toml", "metrics.jsonl", "summary.json"),
    "evaluate": ("config.toml",),
    "export": ("config.toml",),
    "train": ("config.toml", "metrics.jsonl"),
}
"""By which command, what must be read."""
CASES = [(command, name) for command, names in READ.items() for name in names]


def answer(hybrid, command: str, run: Path) -> tuple[int, str]:
    words: dict[str, tuple[object, ...]] = {
        "report": (run,),
        "evaluate": (run,),
        "export": (run, run.parent / "model.safetensors"),
        "train": ("--resume", "--epochs", 3, "--out", run),
    }
    status, _, err = hybrid(command, *words[command])
    return status, err


@pytest.mark.parametrize(("command", "name"), CASES)
@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder"])
def test_what_is_no_file_of_the_run_is_refused(
    command: str, name: str, kind: str, run_folder, hybrid, tmp_path
) -> None:
    file, theirs = run_folder / name, tmp_path / "theirs"
    theirs.write_text("[train]\nsecret = 7\n")
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else theirs)
    status, err = answer(hybrid, command, run_folder)
    assert status == 1
    assert err.count("\n") == 1
    assert "secret" not in err
    assert name in err


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_file_of_forty_gigabytes_that_takes_no_room_is_refused(
    command: str, name: str, run_folder, hybrid
) -> None:
    os.truncate(run_folder / name, 40 * 2**30)
    status, err = answer(hybrid, command, run_folder)
    assert status == 1
    assert f"{run_folder / name} has {40 * 2**30} bytes, more than the " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["pipe", "link", "huge"])
def test_a_report_does_without_starts_that_cannot_be_read(kind: str, run_folder, hybrid) -> None:
    file = run_folder / "starts.jsonl"
    if kind == "huge":
        os.truncate(file, 40 * 2**30)
    else:
        target = file.rename(file.with_name(f"{file.name}.theirs"))
        os.mkfifo(file) if kind == "pipe" else file.symlink_to(target)
    assert answer(hybrid, "report", run_folder) == (0, "")


def test_a_line_that_is_a_hole_in_a_file_ends_the_reading(tmp_path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"first\n")
    os.truncate(file, 2 * reading.MOST_OF_A_LINE)
    lines = reading.read_lines(file)
    assert next(lines) == b"first\n"
    with pytest.raises(ValueError, match=f"{file} line 2 has more than {reading.MOST_OF_A_LINE}"):
        next(lines)


def test_lines_are_whole_ones(tmp_path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"first\n\nlast\nbroken o")
    assert [*reading.read_lines(file)] == [b"first\n", b"\n", b"last\n"]


def test_a_users_own_settings_may_be_a_link_but_no_pipe(tmp_path, hybrid) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[train]\nepochs = 7\n")
    (tmp_path / "link").symlink_to(file)
    status, out, _ = hybrid("train", tmp_path / "link", "--print-config")
    assert (status, "epochs = 7" in out) == (0, True)
    os.mkfifo(tmp_path / "pipe")
    status, _, err = hybrid("train", tmp_path / "pipe", "--print-config")
    assert (status, f"{tmp_path / 'pipe'} is not a regular file" in err) == (1, True)
