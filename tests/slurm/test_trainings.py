"""Trainings under a real Slurm: whatever interrupts a job, its model has the same bits."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm

NODES, EPOCHS, STEPS_PER_EPOCH = 4, 3, 44
SETTINGS = f"""\
[model]
name = "resnet8"
[train]
epochs = {EPOCHS}
batch_size = 32
device = "cpu"
threads = 1
[split]
balance = "operations"
[rounds]
local_budget = [[8, 0], [8, 0], [0, 8], [0, 8]]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Settings of a small training with filled waits, which keeps records across a stop."""
    (tmp_path / "first.toml").write_text(SETTINGS)
    return tmp_path / "first.toml"


@pytest.fixture(scope="session")
def undisturbed(slurm: Slurm, tmp_path_factory) -> dict[str, str]:
    """The last checkpoint of the same training that nothing interrupts, on threads."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "first.toml").write_text(SETTINGS)
    blocks = ("--blocks", NODES)
    slurm("hybrid", "train", folder / "first.toml", *blocks, "--out", folder / "run", seconds=170)
    return digests(folder / "run")


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of each file of the newest checkpoint, momentum included."""
    newest = sorted((run / "checkpoints").glob("[0-9]*/manifest.json"))[-1].parent
    return {
        str(file.relative_to(newest.parent)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(newest.rglob("*.safetensors"))
    }


def last_step(run: Path) -> int:
    """The step of the newest line of metrics; 0 where there is none."""
    try:
        return int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, IndexError):
        return 0


def wait_for_step(run: Path, step: int, seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while last_step(run) < step:
        assert time.monotonic() < limit, f"step {last_step(run)} of {step}"
        time.sleep(0.05)


def stopped_after(log: str) -> list[int]:
    """The steps after which the job was stopped, as its log tells."""
    return [int(step) for step in re.findall(r"stopped by SIG\w+ after step (\d+)", log)]


def test_a_training_started_by_srun_finds_its_ranks_and_ends_well(
    slurm: Slurm, submit, config, tmp_path
) -> None:
    run = tmp_path / "run"
    short = (
        "--launcher",
        "srun",
        "--set",
        "train.epochs=1",
        "--set",
        "data.limit=64",
        "--set",
        "fill.name=penalty",
        "--set",
        "rounds.local_budget=[[8,0],[0,8]]",
        "--out",
        run,
    )
    slurm.wait_for(submit(config, 2, *short), "COMPLETED")
    assert json.loads((run / "summary.json").read_text())["blocks"] == 2


def preempt(slurm: Slurm, job: str) -> None:
    """By a job that needs all nodes: SIGTERM to the steps, then 60 s."""
    urgent = ("--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null")
    slurm("sbatch", *urgent, "--wrap=true")


def fail_node(slurm: Slurm, job: str) -> None:
    """A node goes down; being alive, it is taken back when it answers (ReturnToService=2)."""
    slurm("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")


def stop(slurm: Slurm, job: str) -> None:
    """The signal before the time limit."""
    slurm("scancel", "--signal=USR1", "--batch", job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "interrupt"),
    [
        ("mpirun", preempt),
        ("srun", preempt),
        ("mpirun", fail_node),
        ("srun", fail_node),
        ("mpirun", stop),
    ],
)
def test_a_training_that_is_interrupted_goes_on_to_the_same_bits(
    slurm: Slurm, submit, config, undisturbed, tmp_path, launcher, interrupt
) -> None:
    run = tmp_path / "run"
    job = submit(config, NODES, "--out", run, "--launcher", launcher)
    wait_for_step(run, STEPS_PER_EPOCH + 1)
    interrupt(slurm, job)
    slurm.wait_for(job, "PENDING")
    assert slurm.wait_for(job, "COMPLETED")["Restarts"] == "1"
    assert digests(run) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_training_goes_on_after_its_time_limit(slurm: Slurm, submit, config, tmp_path) -> None:
    longer = ("--set", "train.epochs=80")
    whole, run = tmp_path / "whole", tmp_path / "run"
    slurm("hybrid", "train", config, "--blocks", 2, "--out", whole, *longer, seconds=500)
    job = submit(config, 2, "--out", run, "--time", 3, *longer)
    ended = slurm.wait_for(job, "COMPLETED", seconds=600)
    assert int(ended["Restarts"]) >= 1
    stops = stopped_after((tmp_path / f"run-{job}.out").read_text())
    assert len(stops) == int(ended["Restarts"])
    assert digests(run) == digests(whole)
