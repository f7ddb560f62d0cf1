"""Where a run comes from is in its folder, a line a start."""

import json
import re
import subprocess
import sys
from pathlib import Path

from answers import output
from trainings import interrupted

import hybrid
from hybrid.folder import origin


def starts(run):
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


def test_every_start_is_told_of(run_folder, hybrid, monkeypatch):
    (first,) = starts(run_folder)
    assert first["step"] == 0
    assert len(first["hosts"]) == 2
    assert first["packages"]["torch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", first["time"])
    interrupted(run_folder, 0)
    with (run_folder / "starts.jsonl").open("a") as file:
        file.write('{"step": 3, "ti')  # as a full disk leaves it
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(sys, "argv", ["hybrid", "train", "--out", "a folder"])
    output(hybrid("train", "--resume", "--out", run_folder))
    before, second = starts(run_folder)
    assert before == first
    assert second["step"] == 5
    assert second["slurm_job"] == "17"
    assert second["command"] == "hybrid train --out 'a folder'"
    page = output(hybrid("report", run_folder)).split()[-1]
    assert "--out &#39;a folder&#39;" in Path(page).read_text()


def test_the_commit_is_that_of_the_sources():
    root = Path(hybrid.__file__).parents[1]
    found = subprocess.run(
        ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    assert origin.commit() == (found.stdout.strip() if (root / ".git").exists() else None)


def test_a_commit_is_found_among_packed_refs(tmp_path, monkeypatch):
    git = tmp_path / ".git"
    git.mkdir()
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "hybrid" / "folder" / "origin.py"))
    assert origin.commit() is None
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\nabc refs/heads/other\ndef refs/heads/main\n")
    assert origin.commit() == "def"
    (git / "HEAD").write_text("0123\n")
    assert origin.commit() == "0123"
