"""What the doctor says of Slurm, by stand-ins for its commands."""

import os
from collections.abc import Callable

import pytest

from hybrid.doctor import batch, finding
from hybrid.ranks.slurm import Request, script

CONFIG = """echo 'JobRequeue              = 1
PreemptParameters       =
PreemptMode             = REQUEUE
PreemptType             = preempt/none'"""
Commands = Callable[..., None]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """`commands(name=shell text...)`: the only programs on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(**texts):
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return make


def look(**environment):
    return {found.subject: found for found in batch.slurm(environment)}


def test_a_machine_without_slurm_is_no_fault_outside_a_job(commands):
    assert not look()["Slurm"].remedy
    assert "PATH" in look(SLURM_JOB_ID="17")["Slurm"].remedy


def test_a_healthy_cluster_has_nothing_to_mend(commands):
    commands(sbatch="echo slurm 24.05.1", scontrol=CONFIG, srun="echo 'pmix\npmix_v4'")
    found = look()
    assert [f for f in found.values() if f.remedy] == []
    assert found["Slurm"].value == "slurm 24.05.1"
    assert found["PMIx"].value.startswith("pmix_v4 listed")


def test_a_controller_that_does_not_answer_is_said_soon(commands, monkeypatch):
    commands(sbatch="echo slurm 24.05.1", scontrol="exit 1")
    assert "does not answer" in look()["Slurm"].value
    commands(scontrol="while :; do :; done")
    monkeypatch.setattr(finding.said, "__kwdefaults__", {"seconds": 0.3})
    assert "login node" in look()["Slurm"].remedy


def test_a_cluster_without_requeueing_or_pmix_is_met_with_the_way_round(commands):
    no = "echo 'PluginDir =\nJobRequeue = 0'"
    commands(sbatch="echo slurm 22.05.8", scontrol=no, srun="echo none; echo pmi2")
    found = look()
    assert "a chain of jobs" in found["requeue"].remedy
    assert "mpirun" in found["PMIx"].value


@pytest.mark.parametrize(
    ("kind", "mode", "parameters", "warned"),
    [
        (None, None, None, False),
        ("preempt/qos", "OFF", None, False),
        ("preempt/qos", "REQUEUE", None, True),
        ("preempt/qos", "REQUEUE", "idle_on_node_suspend,preempt_send_user_signal", False),
    ],
)
def test_preemption_that_mpirun_does_not_survive_is_pointed_out(kind, mode, parameters, warned):
    given = {"PreemptType": kind, "PreemptMode": mode, "SlurmctldParameters": parameters}
    settings = {name: value for name, value in given.items() if value}
    assert bool(batch.preemption(settings).remedy) == warned


@pytest.mark.parametrize(
    ("line", "shown", "subject", "value", "remedy"),
    [
        ("#SBATCH --signal=B:USR1@120\n", "Requeue=1", "time left", "3:20:00 of job 17", ""),
        ("#SBATCH --signal=B:USR1@120\n", "Requeue=1", "signal", "USR1", ""),
        ("#SBATCH --signal SIGUSR2@60\n", "Requeue=1", "signal", "USR2", ""),
        ("#SBATCH --signal=B:KILL@120\n", "Requeue=1", "signal", "", "USR1@120"),
        ("# no signal\n", "Requeue=1", "signal", "", "USR1@120"),
        (None, "Requeue=1", "signal", "no batch script", ""),
        ("", "Requeue=0", "requeue", "", "#SBATCH --requeue in the job script"),
    ],
)
def test_inside_a_job_its_time_signal_and_requeueing_are_told(
    commands, line, shown, subject, value, remedy
):
    script = "" if line is None else f"#!/bin/bash\n#SBATCH --nodes=2\n{line}"
    words = (
        f"case $2 in config) {CONFIG};; batch_script) echo '{script}';; job) echo {shown};; esac"
    )
    commands(sbatch="echo slurm 22.05.8", srun="echo pmix", squeue="echo 3:20:00", scontrol=words)
    found = look(SLURM_JOB_ID="17")[subject]
    assert value in found.value
    assert remedy in found.remedy
    assert bool(remedy) == bool(found.remedy)


def test_the_scripts_of_hybrid_submit_pass(tmp_path):
    text = script(Request(tmp_path / "a.toml", tmp_path / "run", 2, 2))
    assert not batch.signal(text).remedy


def test_programs_that_are_not_there_or_cannot_start_say_nothing(tmp_path):
    assert finding.said("no-such-program") is None
    assert finding.said(os.fspath(tmp_path)) is None
