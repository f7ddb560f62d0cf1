"""What the doctor says of Slurm, by stand-ins for its commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid.doctor import batch, finding
from hybrid.doctor.finding import Finding

CONFIG = """echo 'JobRequeue              = 1
PreemptParameters       =
PreemptMode             = REQUEUE
PreemptType             = preempt/none'"""
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2\n"
Commands = Callable[..., None]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """`commands(name=shell text...)`: the only programs on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(**texts: str) -> None:
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return make


def look(**environment: str) -> dict[str, Finding]:
    return {found.subject: found for found in batch.slurm(environment)}


def test_a_machine_without_slurm_is_no_fault_outside_a_job(commands) -> None:
    assert not look()["Slurm"].remedy
    assert "PATH" in look(SLURM_JOB_ID="17")["Slurm"].remedy


def test_a_healthy_cluster_has_nothing_to_mend(commands) -> None:
    commands(sbatch="echo slurm 24.05.1", scontrol=CONFIG, srun="echo 'pmix\npmix_v4'")
    found = look()
    assert [f for f in found.values() if f.remedy] == []
    assert found["Slurm"].value == "slurm 24.05.1"
    assert found["PMIx"].value.startswith("pmix_v4 listed")


def test_a_controller_that_does_not_answer_is_said_soon(commands, monkeypatch) -> None:
    commands(sbatch="echo slurm 24.05.1", scontrol="exit 1")
    assert "does not answer" in look()["Slurm"].value
    commands(scontrol="while :; do :; done")
    monkeypatch.setattr(finding.said, "__kwdefaults__", {"seconds": 0.3})
    assert "login node" in look()["Slurm"].remedy


def test_a_cluster_without_requeueing_or_pmix_is_met_with_the_way_round(commands) -> None:
    no = "echo 'PluginDir =\nJobRequeue = 0'"
    commands(sbatch="echo slurm 22.05.8", scontrol=no, srun="echo none; echo pmi2")
    found = look()
    assert "jobs/chain.sh" in found["requeue"].remedy
    assert "mpirun" in found["PMIx"].value


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, False),
        ({"PreemptType": "preempt/qos", "PreemptMode": "OFF"}, False),
        ({"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}, True),
        (
            {
                "PreemptType": "preempt/partition_prio",
                "PreemptMode": "REQUEUE",
                "SlurmctldParameters": "idle_on_node_suspend,preempt_send_user_signal",
            },
            False,
        ),
    ],
)
def test_preemption_that_mpirun_does_not_survive_is_pointed_out(settings, warned) -> None:
    assert bool(batch.preemption(settings).remedy) == warned


def in_a_job(commands: Commands, script: str, shown: str = "Requeue=1") -> dict[str, Finding]:
    words = (
        f"case $2 in config) {CONFIG};; batch_script) echo '{script}';; job) echo {shown};; esac"
    )
    commands(sbatch="echo slurm 22.05.8", srun="echo pmix", squeue="echo 3:20:00", scontrol=words)
    return look(SLURM_JOB_ID="17")


@pytest.mark.parametrize(
    ("line", "warned"),
    [
        ("#SBATCH --signal=B:USR1@120", False),
        ("#SBATCH --signal SIGUSR2@60", False),
        ("#SBATCH --signal=B:KILL@120", True),
        ("# no signal", True),
    ],
)
def test_inside_a_job_its_signal_and_time_are_told(commands, line, warned) -> None:
    found = in_a_job(commands, f"{SCRIPT}{line}\n")
    assert found["time left"].value == "3:20:00 of job 17"
    assert ("USR1@120" in found["signal"].remedy) == warned


def test_a_job_that_may_not_be_requeued_is_told_the_line_to_add(commands) -> None:
    found = in_a_job(commands, SCRIPT, "Requeue=0")
    assert found["requeue"].remedy == "#SBATCH --requeue in the job script"


def test_a_job_by_hand_has_no_script_to_look_at(commands) -> None:
    assert "by hand" in in_a_job(commands, "")["signal"].value


def test_the_scripts_of_hybrid_submit_pass(tmp_path) -> None:
    from hybrid.ranks.slurm import Request, script

    text = script(Request(tmp_path / "a.toml", tmp_path / "run", 2, 2))
    assert not batch.signal(text).remedy
    for job in (Path(__file__).parents[3] / "jobs").glob("*.sbatch"):
        assert not batch.signal(job.read_text()).remedy


def test_programs_that_are_not_there_or_cannot_start_say_nothing(tmp_path) -> None:
    assert finding.said("no-such-program") is None
    assert finding.said(os.fspath(tmp_path)) is None
