"""What a run leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from answers import output
from trainings import interrupted

import hybrid
from hybrid.folder import runfolder, traces
from hybrid.folder.runfolder import RunFolder


def lines(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_after_the_resumed_step_are_dropped_and_a_torn_last_line_too(tmp_path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"step": step, "phase": "serial", "loss": 0.5}) for step in (1, 2, 3)]
    metrics.write_text("\n".join(whole) + '\n{"step": 4, "pha')
    folder = RunFolder(tmp_path)
    folder.open("# settings\n", from_step=2)
    folder.metric({"step": 3, "epoch": 0, "phase": "serial", "loss": 0.25})
    folder.close(None)
    assert lines(metrics) == [1, 2, 3]
    assert json.loads(metrics.read_text().splitlines()[-1])["loss"] == 0.25


def test_every_rank_writes_its_spans_after_earlier_ones_and_a_join_has_all(tmp_path) -> None:
    times = {"ph": "X", "tid": 0, "ts": 1e15 + 0.5, "dur": 2.0}
    names = "serial", "parallel", "test"
    first, second, third = ({"name": name, "pid": 0, **times} for name in names)
    other = {"name": "serial", "pid": 10, "args": {"step": 3}, **times}
    assert not traces.join(tmp_path)
    traces.write(tmp_path, 10, [other])
    traces.write(tmp_path, 0, [first, second])
    left = tmp_path / "traces" / ".0.json.beef.partial"  # by a run that was killed
    left.mkdir()
    RunFolder(tmp_path).open("", from_step=2)
    assert not left.exists()
    traces.write(tmp_path, 0, [third])  # resumed, on fewer ranks
    traces.write(tmp_path, 3, [other, third])
    os.truncate(tmp_path / "traces" / "3.json", 150)  # cut off
    (tmp_path / "traces" / "3.json").with_name("others.json").write_text("\n{}\n" * 7)
    assert traces.join(tmp_path)
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found == {"traceEvents": [first, second, third, other, other]}


def test_the_newest_starts_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hybrid.folder.runfolder.MOST_STARTS", 3)
    for step in range(5):
        RunFolder(tmp_path).open("", from_step=step)
    assert lines(tmp_path / "starts.jsonl") == [2, 3, 4]


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1}',
        '{"step": 1e999, "phase": "test"}',
        "[]}",
        '{"step": "x", "phase": "test"}',
        "7}",
    ],
)
def test_a_line_that_is_no_metric_is_named_before_anything_goes_on(tmp_path, line: str) -> None:
    good = '{"step": 1, "phase": "test"}\n'
    (tmp_path / "metrics.jsonl").write_text(f"{good}{line}\n" if line[-1] == "}" else line + "}\n")
    with pytest.raises(ValueError, match=r"line \d of metrics.jsonl is no metric: remove the line"):
        RunFolder(tmp_path).open("", from_step=2)


def test_lines_of_a_way_that_was_left_are_dropped_but_not_for_who_resumes_on_it(tmp_path) -> None:
    def line(step: int, phase: str = "serial") -> str:
        return json.dumps({"step": step, "phase": phase}) + "\n"

    told = [line(1), line(2), line(1, "rollback"), line(2), line(3)]
    path = tmp_path / "metrics.jsonl"
    for rollbacks, expected in ((1, [told[0], *told[2:4]]), (0, told[:2])):
        path.write_text("".join(told))
        RunFolder(tmp_path).open("", from_step=2, rollbacks=rollbacks)
        assert path.read_text() == "".join(expected)


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


def test_the_commit_is_that_of_the_sources():
    root = Path(hybrid.__file__).parents[1]
    found = subprocess.run(
        ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    assert runfolder.commit() == (found.stdout.strip() if (root / ".git").is_dir() else None)
