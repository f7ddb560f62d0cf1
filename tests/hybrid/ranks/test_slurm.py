"""The batch script equals recorded files, and does with stand-ins for Slurm what it promises."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.ranks.slurm import SlurmJob, script
from tests.hybrid.ranks.slurm_stand_ins import BASH, RANKS, Cluster

RECORDED = Path(__file__).with_name("recorded")
PLAIN = SlurmJob(Path("/home/ada/first.toml"), Path("/scratch/runs/first"), 2, 4)
REQUESTS = {
    "mpirun": replace(
        PLAIN, gpus_per_rank=1, setup="module load openmpi; source .venv/bin/activate"
    ),
    "srun": replace(
        PLAIN,
        launcher="srun",
        partition="gpu",
        account="p 1",
        time="1-00:00:00",
        config=Path("/home/ada l/it's.toml"),
        out=Path('/scratch/#1 100%/the "first" [0]*'),
        settings=("data.dir=/a b/$HOME", "optimizer.lr=1e-3", 'split.cuts=["it\'s"]'),
    ),
}
needs_bash = pytest.mark.skipif(BASH is None, reason="there is no bash")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


@pytest.fixture
def request_here(tmp_path: Path) -> SlurmJob:
    return replace(PLAIN, out=tmp_path / "runs" / "first")


@pytest.mark.parametrize("name", REQUESTS)
def test_the_script_is_the_recorded_one(name) -> None:
    assert script(REQUESTS[name]) == (RECORDED / f"{name}.sbatch").read_text()


@needs_bash
@pytest.mark.parametrize("file", [*RECORDED.glob("*.sbatch")], ids=lambda file: file.name)
def test_bash_can_read_the_script(file) -> None:
    subprocess.run([str(BASH), "-n", str(file)], check=True, timeout=60)


@needs_bash
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_the_signal_reaches_the_launcher_and_the_job_is_requeued(
    cluster, request_here, launcher
) -> None:
    assert cluster.signaled(replace(request_here, launcher=launcher)) == 0
    (started, *_), *rest = cluster.calls()
    assert started == launcher
    assert rest == [["USR1"], ["scontrol", "requeue", "17"]]


@needs_bash
def test_a_signal_during_the_setup_requeues_without_starting(cluster, request_here) -> None:
    request = replace(request_here, setup="kill -USR1 $$; sleep 0.1")
    assert cluster.run(request)[0] == 0
    assert cluster.calls() == [["scontrol", "requeue", "17"]]


AWAY = "the job is canceled, or requeued by Slurm itself\n"
ENDS: dict[str, tuple[str, dict[str, str], int, str]] = {
    "stopped with a checkpoint": ("75", {}, 0, ""),
    "ended by TERM before they could take it": ("143", {}, 0, ""),
    "stopped in the last run but one": ("75", {"SLURM_RESTART_COUNT": "19"}, 0, ""),
    "stopped in the last run": ("75", {"SLURM_RESTART_COUNT": "20"}, 75, "after 20 requeues"),
    "stopped where a site forbids requeueing": ("75", {"SCONTROL": "1"}, 75, "sbatch again"),
    "stopped as Slurm requeues it": ("75", {"SQUEUE": "REQUEUE_HOLD"}, 75, AWAY),
    "stopped with a node that is slow to answer": ("75", {"SQUEUE": "SIGNALING"}, 0, ""),
    "stopped with a flag nobody knows": ("75", {"SQUEUE": "UPDATE_DB"}, 0, ""),
    "stopped in a job that is gone": ("75", {"SQUEUE": ""}, 75, AWAY),
    "ended": ("0", {}, 0, ""),
    "ended, then met TERM": ("0", {"LATE": "143"}, 0, ""),
    "failed": ("1", {}, 1, ""),
    "ended by a USR1 that nobody forwarded": ("138", {}, 138, ""),
}
"""How ranks end, in which job: its status, and what it says."""
REQUEUED = ("stopped with", "ended by TERM", "stopped in the last run but", "stopped where")


@needs_bash
@pytest.mark.parametrize("how", ENDS)
def test_ranks_decide_by_their_end_whether_the_job_is_requeued(cluster, request_here, how) -> None:
    ranks, given, status, said = ENDS[how]
    found, err = cluster.run(request_here, ranks, **given)
    assert (found, said in err) == (status, True)
    asked = [["requeue", "17"]] if how.startswith(REQUEUED) else []
    assert [words for name, *words in cluster.calls() if name == "scontrol"] == asked


def test_ranks_killed_by_a_signal_they_cannot_take_yet_are_requeued(cluster, request_here) -> None:
    for name in ("mpirun", "srun"):
        cluster.program(name, RANKS.replace("sys.exit(75)", "sys.exit(138)"))
    assert cluster.signaled(request_here) == 0
    assert cluster.calls()[-1] == ["scontrol", "requeue", "17"]


@needs_bash
def test_a_launcher_that_ends_well_before_the_training_does_is_requeued(
    cluster, request_here
) -> None:
    assert cluster.run(request_here)[0] == 0
    (request_here.out / "checkpoints" / "00000010").mkdir(parents=True)
    (request_here.out / "checkpoints" / "00000010" / "manifest.json").touch()
    status, err = cluster.run(request_here, "0 lost")
    assert (status, "before the training" in err) == (0, True)
    assert [name for name, *_ in cluster.calls()] == ["mpirun", "mpirun", "scontrol"]


@needs_bash
@pytest.mark.parametrize(("fails", "starts", "status"), [(1, 2, 0), (9, 3, 213)])
def test_ranks_that_mpirun_cannot_place_are_started_again_twice(
    cluster, request_here, fails, starts, status
) -> None:
    nowhere = f"if len(open({{log!r}}).readlines()) <= {fails}: sys.exit(213)\n"
    cluster.program("mpirun", nowhere + RANKS)
    assert cluster.run(request_here, "0")[0] == status
    assert [name for name, *_ in cluster.calls()] == ["mpirun"] * starts


@needs_bash
def test_words_with_spaces_and_quotes_arrive_unchanged(cluster, tmp_path) -> None:
    quoted = REQUESTS["srun"]
    request = replace(quoted, launcher="mpirun", out=tmp_path / quoted.out.relative_to("/"))
    assert cluster.run(request)[0] == 0
    sets = [word for text in request.settings for word in ("--set", text)]
    words = cluster.calls()[0]
    assert words[words.index("hybrid") :] == [
        *("hybrid", "train", str(request.config), *sets, "--auto-resume", "--out", str(request.out))
    ]
