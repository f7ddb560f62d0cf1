"""The batch script equals recorded files, and does with stand-ins for Slurm what it promises."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from hybrid.cli import app
from hybrid.failure import run_command
from hybrid.slurm import Request, script, seconds

RECORDED = Path(__file__).with_name("recorded")
JOBS = Path(__file__).parents[2] / "jobs"
PLAIN = Request(Path("/home/ada/first.toml"), Path("/scratch/runs/first"), 2, 4)
REQUESTS = {
    "mpirun": replace(
        PLAIN, gpus_per_rank=1, setup="module load openmpi; source .venv/bin/activate"
    ),
    "srun": replace(PLAIN, launcher="srun", partition="gpu", account="p 1", time="1-00:00:00"),
    "array": replace(PLAIN, nodes=1, seeds="0-4,7", cpus_per_rank=3, max_requeues=0),
    "quoting": replace(
        PLAIN,
        config=Path("/home/ada l/it's.toml"),
        out=Path('/scratch/#1 100%/the "first" [0]*'),
        settings=("data.dir=/a b/$HOME", "optimiser.lr=1e-3", 'split.cuts=["it\'s"]'),
    ),
}
BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="there is no bash")

STAND_IN = """\
#!{python}
import json, os, signal, sys, time
with open({log!r}, "a") as log:
    print(json.dumps([{name!r}, *sys.argv[1:]]), file=log)
"""
RANKS = """\
def stop(*_):
    with open({log!r}, "a") as log:
        print(json.dumps(["USR1"]), file=log)
    time.sleep(0.2)
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
open({ready!r}, "w").close()
if os.environ["RANKS"] == "wait":
    time.sleep(30)
if os.environ["RANKS"] == "0":  # as a training that ends
    run = sys.argv[sys.argv.index("--out") + 1]
    os.makedirs(run, exist_ok=True)
    with open(run + "/summary.partial", "w") as summary:
        summary.write("{{}}")
    os.replace(run + "/summary.partial", run + "/summary.json")
    sys.exit(int(os.environ.get("LATE", 0)))
if os.environ["RANKS"] == "0 lost":  # as a training that begins
    run = sys.argv[sys.argv.index("--out") + 1]
    os.path.exists(run + "/summary.json") and os.unlink(run + "/summary.json")
sys.exit(int(os.environ["RANKS"].removesuffix(" lost")))
"""


class Cluster:
    """Stand-ins for mpirun, srun, scontrol and sbatch that keep the words they are called with."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log, self.ready = folder / "bin", folder / "log", folder / "ready"
        self.bin.mkdir(parents=True)
        for name in ("mpirun", "srun"):
            self.program(name, RANKS)
        self.program("scontrol", "sys.exit(int(os.environ.get('SCONTROL', 0)))")
        self.program("sbatch", "print('17;local')")

    def program(self, name: str, body: str) -> None:
        values = {"python": sys.executable, "name": name, "log": str(self.log)}
        file = self.bin / name
        file.write_text((STAND_IN + body).format(**values, ready=str(self.ready)))
        file.chmod(0o755)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def start(
        self, job: Request | Path, ranks: str, *words: str, cwd: Path | None = None, **given: str
    ) -> subprocess.Popen[str]:
        if isinstance(job, Request):
            job.file.parent.mkdir(parents=True, exist_ok=True)
            job.file.write_text(script(job))
        slurm = {"SLURM_JOB_ID": "17", "RANKS": ranks, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.Popen(
            [str(BASH), str(job.file if isinstance(job, Request) else job), *words],
            env=os.environ | slurm | given,
            cwd=cwd,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, request: Request, ranks: str = "0", **given: str) -> tuple[int, str]:
        job = self.start(request, ranks, **given)
        _, err = job.communicate(timeout=60)
        return job.returncode, err

    def signalled(
        self, job: Request | Path, *words: str, cwd: Path | None = None, **given: str
    ) -> int:
        """Exit status of a job that is told its end when its ranks are at work."""
        process = self.start(job, "wait", *words, cwd=cwd, **given)
        limit = time.monotonic() + 60
        while not self.ready.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
        return process.returncode


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


@pytest.fixture
def request_here(tmp_path: Path) -> Request:
    return replace(PLAIN, out=tmp_path / "runs" / "first")


@pytest.mark.parametrize("name", REQUESTS)
def test_the_script_is_the_recorded_one(name) -> None:
    assert script(REQUESTS[name]) == (RECORDED / f"{name}.sbatch").read_text()


@needs_bash
@pytest.mark.parametrize(
    "file", [*RECORDED.glob("*.sbatch"), *JOBS.glob("*")], ids=lambda file: file.name
)
def test_bash_can_read_the_script(file) -> None:
    subprocess.run([str(BASH), "-n", str(file)], check=True, timeout=60)


@needs_bash
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_the_signal_reaches_the_launcher_and_the_job_is_requeued(
    cluster, request_here, launcher
) -> None:
    assert cluster.signalled(replace(request_here, launcher=launcher)) == 0
    (started, *_), *rest = cluster.calls()
    assert started == launcher
    assert rest == [["USR1"], ["scontrol", "requeue", "17"]]


@needs_bash
def test_a_signal_during_the_setup_requeues_without_starting(cluster, request_here) -> None:
    request = replace(request_here, setup="kill -USR1 $$; sleep 0.1")
    assert cluster.run(request)[0] == 0
    assert cluster.calls() == [["scontrol", "requeue", "17"]]


@needs_bash
def test_ranks_killed_by_a_signal_they_cannot_take_yet_are_requeued(cluster, request_here) -> None:
    for name in ("mpirun", "srun"):
        cluster.program(name, RANKS.replace("sys.exit(75)", "sys.exit(138)"))
    assert cluster.signalled(request_here) == 0
    assert cluster.calls()[-1] == ["scontrol", "requeue", "17"]


@needs_bash
def test_the_last_allowed_run_ends_with_75_and_says_how_to_go_on(cluster, request_here) -> None:
    status, err = cluster.run(request_here, "75", SLURM_RESTART_COUNT="20")
    assert status == 75
    assert "after 20 requeues" in err
    assert [name for name, *_ in cluster.calls()] == ["mpirun"]
    assert cluster.run(request_here, "75", SLURM_RESTART_COUNT="19")[0] == 0


@needs_bash
def test_a_site_that_forbids_requeueing_gets_75(cluster, request_here) -> None:
    status, err = cluster.run(request_here, "75", SCONTROL="1")
    assert (status, "sbatch again" in err) == (75, True)


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
@pytest.mark.parametrize("late", ["138", "143"])
def test_a_signal_after_the_end_of_the_training_does_not_repeat_it(
    cluster, request_here, late
) -> None:
    assert cluster.run(request_here, "0", LATE=late)[0] == 0
    assert [name for name, *_ in cluster.calls()] == ["mpirun"]


@needs_bash
def test_ranks_ended_by_term_before_they_could_take_it_are_requeued(cluster, request_here) -> None:
    assert cluster.run(request_here, "143")[0] == 0
    assert cluster.calls()[-1] == ["scontrol", "requeue", "17"]


@needs_bash
@pytest.mark.parametrize("status", [0, 1, 137, 138])
def test_any_other_status_is_passed_on(cluster, request_here, status) -> None:
    assert cluster.run(request_here, str(status))[0] == status
    assert [name for name, *_ in cluster.calls()] == ["mpirun"]


@needs_bash
def test_a_setup_that_fails_ends_the_job_before_it_trains(cluster, request_here) -> None:
    assert cluster.run(replace(request_here, setup="false"))[0] == 1
    assert not cluster.log.exists()


@needs_bash
def test_a_run_with_a_checkpoint_is_resumed(cluster, request_here) -> None:
    folder = request_here.out / "checkpoints" / "00000010"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    assert cluster.run(request_here)[0] == 0
    assert cluster.calls()[0][-3:] == ["--resume", "--out", str(request_here.out)]


@needs_bash
def test_a_run_without_a_whole_checkpoint_is_set_aside_each_time(cluster, request_here) -> None:
    for count in ("0", "1"):
        (request_here.out / "checkpoints" / "00000010").mkdir(parents=True)
        (request_here.out / "metrics.jsonl").write_text(count)
        assert cluster.run(request_here, SLURM_RESTART_COUNT=count)[0] == 0
        assert "--resume" not in cluster.calls()[-1]
        aside = request_here.out.with_name(f"first.without-checkpoint-17-{count}")
        assert (aside / "metrics.jsonl").read_text() == count
        assert [file.name for file in request_here.out.iterdir()] == ["summary.json"]


@needs_bash
def test_words_with_spaces_and_quotes_arrive_unchanged(cluster, tmp_path) -> None:
    request = replace(REQUESTS["quoting"], out=tmp_path / REQUESTS["quoting"].out.relative_to("/"))
    (request.out / "checkpoints" / "00000010").mkdir(parents=True)
    (request.out / "checkpoints" / "00000010" / "manifest.json").touch()
    assert cluster.run(request)[0] == 0
    sets = [word for text in request.settings for word in ("--set", text)]
    words = cluster.calls()[0]
    assert words[words.index("hybrid") :] == [
        *("hybrid", "train", str(request.config), *sets, "--resume", "--out", str(request.out))
    ]


@needs_bash
def test_a_seed_of_an_array_has_its_own_folder_and_requeues_itself_alone(
    cluster, request_here
) -> None:
    task = {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "3"}
    assert cluster.run(replace(request_here, seeds="0-4"), "75", **task)[0] == 0
    words, requeue = cluster.calls()
    assert words[-4:] == ["--set", "train.seed=3", "--out", f"{request_here.out}-seed3"]
    assert requeue == ["scontrol", "requeue", "16_3"]


@needs_bash
def test_a_chain_of_jobs_waits_for_one_after_another(cluster) -> None:
    search = f"{cluster.bin}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(BASH), str(JOBS / "chain.sh"), "2", str(JOBS / "train.sbatch"), "--epochs", "3"],
        env=os.environ | {"PATH": search},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    words = [str(JOBS / "train.sbatch"), "--epochs", "3"]
    assert done.stdout == "17\n17\n"
    assert cluster.calls() == [
        ["sbatch", "--parsable", *words],
        ["sbatch", "--parsable", "--dependency=afterany:17", *words],
    ]


@needs_bash
@pytest.mark.parametrize("name", ["train", "train-srun", "sweep"])
def test_the_scripts_to_edit_forward_the_signal_and_requeue(cluster, tmp_path, name) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    array = {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "3"} if name == "sweep" else {}
    given = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "8", "RUN": "a run"}
    file = JOBS / f"{name}.sbatch"
    assert cluster.signalled(file, "--epochs", "3", cwd=tmp_path, **given, **array) == 0
    words, *rest = cluster.calls()
    run = "a run-seed3" if array else "a run"
    assert words[0] == ("srun" if name == "train-srun" else "mpirun")
    assert words[-4:] == ["--out", run, "--epochs", "3"]
    assert rest == [["USR1"], ["scontrol", "requeue", "16_3" if array else "17"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", 300), ("04:00:00", 14400), ("100:00:01", 360001), ("2-01:00:00", 176400)],
)
def test_time_limits_are_read_as_slurm_reads_them(text, expected) -> None:
    assert seconds(text) == expected


@pytest.fixture
def submit(capfd, tmp_path, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """`hybrid submit` of a small TOML file, 2 nodes of 2 ranks: (exit status, stdout, stderr)."""
    (tmp_path / "run.toml").write_text("[split]\nblocks = 4\n")
    monkeypatch.chdir(tmp_path)
    words = ["submit", "run.toml", "--nodes", "2", "--ranks-per-node", "2", "--out", "runs/first"]

    def run(*more: str) -> tuple[int, str, str]:
        capfd.readouterr()
        command = typer.main.get_command(app)
        status = run_command(lambda: command.main(args=[*words, *more], standalone_mode=False))
        return status, *capfd.readouterr()

    return run


def test_a_dry_run_prints_the_script_and_leaves_nothing(submit, tmp_path) -> None:
    status, out, err = submit("--dry-run", "--set", "optimiser.lr=0.2")
    request = Request(tmp_path / "run.toml", tmp_path / "runs" / "first", 2, 2, 1)
    assert (status, err) == (0, "")
    assert out == script(replace(request, settings=("optimiser.lr=0.2",)))
    assert not (tmp_path / "runs").exists()


def test_no_gpu_is_asked_for_where_the_settings_say_cpu(submit) -> None:
    assert "gpus" not in submit("--dry-run", "--set", "train.device=cpu")[1]


def test_sbatch_gets_the_script_and_the_number_is_printed(
    submit, cluster, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", str(cluster.bin), prepend=os.pathsep)
    status, out, _ = submit()
    file = tmp_path / "runs" / "first.sbatch"
    assert (status, out) == (0, "17\n")
    assert cluster.calls() == [["sbatch", "--parsable", str(file)]]
    assert file.read_text() == submit("--dry-run")[1]
    assert list(file.parent.iterdir()) == [file]


def test_what_sbatch_says_against_it_is_one_line(submit, cluster, monkeypatch) -> None:
    cluster.program("sbatch", "sys.exit('sbatch: error:\\nInvalid account')")
    monkeypatch.setenv("PATH", str(cluster.bin), prepend=os.pathsep)
    assert_one_line(submit(), "refused", "sbatch: error: Invalid account")


def test_a_cluster_without_gpus_is_met_with_the_flag_to_ask_for_none(
    submit, cluster, monkeypatch
) -> None:
    cluster.program("sbatch", "sys.exit('Invalid generic resource (gres) specification')")
    monkeypatch.setenv("PATH", str(cluster.bin), prepend=os.pathsep)
    assert_one_line(submit(), "(gres)", "--gpus-per-rank 0")


def test_a_machine_without_sbatch_is_told_so(submit, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_one_line(submit(), "no sbatch here", "--dry-run")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--nodes", "0"), ("--nodes is 0", "at least 1")),
        (("--ranks-per-node", "-1"), ("--ranks-per-node is -1", "at least 1")),
        (("--ranks-per-node", "3"), ("4 blocks", "2 nodes of 3 ranks are 6", "split.blocks=6")),
        (("--set", "split.cuts=['layer2.0']", "--set", "split.blocks=0"), ("2 blocks", "4")),
        (("--time", "4h"), ("'4h'", "HH:MM:SS")),
        (("--time", "1-24:00:00"), ("D-HH:MM:SS",)),
        (("--time", "2"), ("120 seconds", "more")),
        (("--array", "4-0"), ("'4-0'", "0-4")),
        (("--array", "1,x"), ("'1,x'",)),
        (("--array", "0-4", "--set", "train.seed=1"), ("--array", "train.seed")),
        (("--max-requeues", "-1"), ("--max-requeues is -1", "at least 0")),
        (("--launcher", "prun"), ("'prun'", "mpirun or srun")),
        (("--out", "a\nb"), ("line break",)),
        (("--set", "data.dir=a\nb"), ("line break",)),
        (("--setup", "module load 'mpi"), ("--setup", "bash cannot read")),
        (("--setup", "module load \\"), ("--setup", "in the middle")),
        (("--set", "optimiser.rl=1"), ("optimiser.rl", "optimiser.lr")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_wrong_request_is_one_line_with_a_remedy(submit, tmp_path, flags, parts) -> None:
    assert_one_line(submit(*flags), *parts)
    assert not (tmp_path / "runs").exists()


def assert_one_line(answer: tuple[int, str, str], *parts: str) -> None:
    status, out, err = answer
    assert (status, out) == (1, "")
    assert err.startswith("hybrid: error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
