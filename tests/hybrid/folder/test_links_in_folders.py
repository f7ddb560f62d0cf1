"""Nothing is written through a link that lies in a folder: it may lead to somebody else's file."""

from __future__ import annotations

import os
import socket

import pytest

QUICK = (
    *("train", "--epochs", "1", "--batch-size", "64", "--blocks", "1", "--solver", "backprop"),
    *("--set", "data.limit=64", "--set", "train.threads=1"),
)


def outside(tmp_path):
    """Another user's folder, with a file of each name in it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("theirs")
    return folder


def untouched(folder):
    return [(p.name, p.read_text()) for p in folder.iterdir()] == [("precious", "theirs")]


def assert_refused(answer, link):
    status, _, err = answer
    assert status == 1
    assert err.startswith("hybrid: error: ")
    assert err.count("\n") == 1
    assert f"{link} is a link to " in err


FILES = ["config.toml", "metrics.jsonl", "summary.json", "trace.json"]
FOLDERS = ["checkpoints", "events", "traces"]


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, "checkpoints/.00000002.partial"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_new_run_names_a_link_in_its_folder(hybrid, tmp_path, name, dangling) -> None:
    theirs, out = outside(tmp_path), tmp_path / "run"
    target = theirs if name in FOLDERS or name.startswith("checkpoints/") else theirs / "precious"
    link = out / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target.with_name("none") if dangling else target)
    assert_refused(hybrid(*QUICK, "--out", out), link)
    assert untouched(theirs)
    assert not target.with_name("none").exists()
    assert [p for p in out.rglob("*") if not p.is_symlink()] in ([], [out / "checkpoints"])


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, "checkpoints/00000099", "events/x"])
def test_a_resumed_run_names_a_link_in_its_folder(hybrid, tmp_path, run_folder, name) -> None:
    theirs, link = outside(tmp_path), run_folder / name
    if link.exists():
        link.rename(tmp_path / "moved")
    link.symlink_to(theirs if name in FOLDERS else theirs / "precious")
    assert_refused(hybrid("train", "--resume", "--epochs", "3", "--out", run_folder), link)
    assert untouched(theirs)


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket"])
def test_what_is_no_trace_is_named_before_training_goes_on(
    hybrid, run_folder, kind, monkeypatch
) -> None:
    file = run_folder / "traces" / "1.json"
    file.unlink()
    if kind == "socket":
        monkeypatch.chdir(file.parent)  # a whole path may be too long for one
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(file.name)
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(file)
    status, said, err = hybrid("train", "--resume", "--epochs", 3, "--out", run_folder)
    assert (status, said, err.count("\n")) == (1, "", 1)
    assert f"{file} is not a regular file and is not replaced: remove it" in err


def test_the_run_folder_itself_may_be_a_link(hybrid, tmp_path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    assert hybrid(*QUICK, "--out", tmp_path / "run")[0] == 0
    assert (tmp_path / "scratch" / "summary.json").is_file()
    assert hybrid("evaluate", tmp_path / "run")[0] == 0


@pytest.mark.parametrize("name", ["report", "report/index.html"])
def test_a_report_is_not_written_through_a_link(hybrid, tmp_path, run_folder, name) -> None:
    theirs, link = outside(tmp_path), run_folder / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(theirs if name == "report" else theirs / "precious")
    assert_refused(hybrid("report", run_folder), link)
    assert untouched(theirs)
