"""What the batch scripts do in a real Slurm, with a stand-in for `hybrid train`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import STOPPED
from hybrid.ranks.slurm import SlurmJob, script
from tests.slurm.cluster import Slurm

LAUNCHERS = ("mpirun", "srun")
STAND_IN = """\
#!/bin/bash
# trains for ever, or ends at once where the file `end` is there; stops as hybrid does
words=" $* " here=$(dirname "$0")
run=${words#* --out } run=${run%% *}
mkdir -p "$run"
trap 'exit 75' USR1 TERM
echo "${CUDA_VISIBLE_DEVICES:-none}" >>"$run/started-${SLURM_RESTART_COUNT:-0}"
until [[ -e $here/end ]]; do sleep 0.1; done
[[ ${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID} != 0 ]] || cp "$here/end" "$run/summary.json"
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A program in place of `hybrid`."""
    file = tmp_path / "stand-in"
    file.write_text(STAND_IN)
    file.chmod(0o755)
    return file


@pytest.fixture
def begin(slurm: Slurm, jobs: list[str], stand_in: Path, tmp_path: Path) -> Callable[..., str]:
    """`begin(nodes, fields of a SlurmJob...)`: a job of the stand-in."""

    def start(nodes: int, **more: Any) -> str:
        given: dict[str, Any] = {"ranks_per_node": 1, "cpus_per_rank": 1, **more}
        request = SlurmJob(tmp_path / "first.toml", tmp_path / "run", nodes, **given)
        # by its path: mpirun puts the folder it lies in before all others of PATH
        request.file.write_text(script(request).replace(" hybrid ", f" {stand_in} "))
        jobs.append(slurm("sbatch", "--parsable", request.file).strip())
        return jobs[-1]

    return start


def wait_for_ranks(run: Path, number: int, restarts: int = 0) -> list[str]:
    """The GPUs each rank saw, once so many have started since the job's last start."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        file = run / f"started-{restarts}"
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) == number:
            return lines
        time.sleep(0.1)
    logs = "\n".join(file.read_text() for file in run.parent.glob("*.out"))
    raise AssertionError(f"not {number} ranks have started: {lines}\n{logs}")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_is_requeued_as_often_as_it_may_and_then_ends_with_75(
    slurm: Slurm, begin, tmp_path, launcher
) -> None:
    job = begin(2, max_requeues=1, launcher=launcher)
    for restarts in range(2):
        assert slurm.wait_for(job, "RUNNING")["Restarts"] == f"{restarts}"
        wait_for_ranks(tmp_path / "run", 2, restarts)
        slurm("scancel", "--signal=USR1", "--batch", job)
        ended = slurm.wait_for(job, "FAILED" if restarts else "PENDING")
    assert ended["ExitCode"] == f"{STOPPED}:0"
    assert "after 1 requeues" in (tmp_path / f"run-{job}.out").read_text()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_sees_the_gpus_of_its_node_and_a_canceled_job_stays_canceled(
    slurm: Slurm, begin, tmp_path, launcher
) -> None:
    job = begin(2, launcher=launcher, ranks_per_node=2, gpus_per_rank=1)
    assert wait_for_ranks(tmp_path / "run", 4) == ["0,1"] * 4
    slurm("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    slurm.wait_until_idle()
    assert slurm.job(job)["JobState"] == "CANCELLED"


def preempt(slurm: Slurm) -> None:
    urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null")
    slurm("sbatch", *urgent, "--wrap=true")


def preempt_with_a_slow_node(slurm: Slurm) -> None:
    """Slurm shows the flag SIGNALING until the node has answered."""
    with slurm.slow(slurm.names[-1]):
        preempt(slurm)
        time.sleep(4)


def lose_daemon(slurm: Slurm) -> None:
    slurm.kill("prted")


@pytest.mark.parametrize(
    ("launcher", "interrupt", "said"),
    [
        ("mpirun", preempt, ""),
        ("srun", preempt, ""),
        ("mpirun", preempt_with_a_slow_node, ""),
        ("mpirun", lose_daemon, "before the training"),
    ],
)
def test_a_job_that_is_interrupted_goes_on(
    slurm: Slurm, begin, stand_in, tmp_path, launcher, interrupt, said
) -> None:
    job = begin(4, launcher=launcher)
    wait_for_ranks(tmp_path / "run", 4)
    interrupt(slurm)
    # the nodes share a folder for sessions: daemons that still end would take the next ones' away
    ending = time.monotonic() + 30
    while slurm.named("prted") and time.monotonic() < ending:
        time.sleep(0.1)
    slurm.wait_for(job, "PENDING")
    stand_in.with_name("end").touch()
    assert slurm.wait_for(job, "COMPLETED")["Restarts"] == "1"
    assert said in (tmp_path / f"run-{job}.out").read_text()
