"""Starting, and starting twice: one run goes on, and what is not a run's stays where it is."""

import json
import os

import pytest
from trainings import assert_same, digests, newest, weights

from hybrid.folder import checkpoint
from hybrid.folder.lock import Lock
from tests.faults.processes import Job

# a learning rate that does not depend on the number of epochs
CONSTANT = ("--set", "schedule.name=constant", "--set", "schedule.warmup_epochs=0")
QUICK = ("--batch-size", "64", "--set", "train.threads=1", "--set", "data.limit=640", *CONSTANT)


def test_auto_resume_begins_goes_on_and_ends(tmp_path, hybrid):
    words = ("train", *QUICK, "--auto-resume", "--out", tmp_path / "run")
    for epochs in (1, 2, 2):
        assert hybrid(*words, "--epochs", epochs)[0] == 0
    assert int(newest(tmp_path / "run").name) == 20
    assert hybrid("train", *QUICK, "--epochs", 2, "--out", tmp_path / "once")[0] == 0
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "once"))


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path, hybrid):
    run = tmp_path / "run"
    (run / "checkpoints" / "00000010").mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (run / "notes.txt").write_text("mine")
    words = ("train", *QUICK, "--auto-resume", "--epochs", 1, "--out", run)
    assert hybrid(*words)[0] == 0
    assert (run / "notes.txt").read_text() == "mine"
    assert newest(run).name == "00000010"


def test_metrics_without_a_checkpoint_are_never_lost(tmp_path, hybrid):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("of old\n")
    status, _, err = hybrid("train", *QUICK, "--auto-resume", "--out", run)
    assert (status, err.count("\n"), "already holds a run: remove it" in err) == (1, 1, True)
    assert (run / "metrics.jsonl").read_text() == "of old\n"


@pytest.mark.parametrize("how", ["--resume", "--auto-resume", ""])
def test_a_folder_with_an_owner_is_left_alone(how, run_folder, hybrid):
    before = {p: p.read_bytes() for p in run_folder.rglob("*") if p.is_file()}
    owner = Lock(run_folder)
    status, _, err = hybrid("train", *QUICK, *filter(None, [how]), "--out", run_folder)
    owner.release()
    assert (status, err.count("\n"), f"process {os.getpid()} on" in err) == (1, 1, True)
    assert {p: p.read_bytes() for p in run_folder.rglob("*") if p.is_file()} == before


def test_a_folder_whose_name_is_no_text_is_refused(tmp_path, hybrid):
    name = os.fsdecode(b"run-\xff")
    status, _, err = hybrid("train", *QUICK, "--out", tmp_path / name)
    assert (status, err.count("\n"), "must be UTF-8" in err) == (1, 1, True)
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_resume_at_once_one_goes_on_with_the_bits_of_an_undisturbed_run(
    tmp_path, hybrid
):
    words = ("train", *QUICK, "--epochs")
    assert hybrid(*words, 3, "--out", tmp_path / "undisturbed")[0] == 0
    run = tmp_path / "run"
    assert hybrid(*words, 1, "--out", run)[0] == 0
    line = [*map(str, (*words, 3, "--resume", "--out", run))]
    # the faster one may have ended when the slower one comes, which then finds an ended run
    jobs = [Job(line, tmp_path / f"{number}.err", 1, "threads") for number in range(2)]
    assert all(job.wait(60) for job in jobs)
    ends = [(job.output(), job.status()) for job in jobs]
    assert sorted(status for _, status in ends) in ([0, 1], [0, 0])
    for err, status in ends:
        assert err == "" if status == 0 else f"{run} is in use by the run of process" in err
    assert digests(run) == digests(tmp_path / "undisturbed")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert len(steps) == len((tmp_path / "undisturbed" / "metrics.jsonl").read_text().splitlines())
    assert not (run / "run.lock").exists()
    assert all(checkpoint.read_manifest(f) for f in checkpoint.complete(run / "checkpoints"))
