"""What the doctor says of folders, shared memory and Slurm."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hybrid.doctor import machine


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """`commands(name=shell text...)`: the only programs on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def make(**texts):
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return make


def test_a_machine_without_slurm_is_no_fault_outside_a_job(commands, monkeypatch) -> None:
    assert not machine.slurm()[0].remedy
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert "PATH" in machine.slurm()[0].remedy


@pytest.mark.parametrize(
    ("scontrol", "value", "remedy"),
    [
        ("echo 'JobRequeue              = 1'", "slurm 24.05.1", ""),
        ("echo 'PluginDir =\nJobRequeue = 0'", "only if it asks for it", "jobs/chain.sh"),
        ("exit 1", "does not answer", "login node"),
        ("while :; do :; done", "does not answer", "login node"),
    ],
)
def test_a_cluster_is_met_with_the_way_round(
    commands, monkeypatch, scontrol, value, remedy
) -> None:
    monkeypatch.setattr(machine.answer_of, "__kwdefaults__", {"seconds": 0.3})
    commands(sbatch="echo slurm 24.05.1", scontrol=scontrol)
    (found,) = machine.slurm()
    assert value in found.value
    assert remedy in found.remedy
    assert bool(remedy) == bool(found.remedy)


def test_programs_that_are_not_there_or_cannot_start_say_nothing(tmp_path) -> None:
    assert machine.answer_of("no-such-program") is None
    assert machine.answer_of(os.fspath(tmp_path)) is None


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("place", "reason"),
    [("tempfile.TemporaryFile", "Permission denied"), ("hybrid.doctor.machine.soon", "no answer")],
)
def test_a_folder_that_cannot_be_written_to_or_does_not_answer_is_a_finding(
    monkeypatch, tmp_path, place, reason
) -> None:
    monkeypatch.setattr(place, failing(OSError(13, reason, str(tmp_path))))
    (found,) = machine.run_folder(tmp_path)
    assert (found.subject, "--out" in found.remedy) == ("run folder", True)
    assert reason in found.value


def test_too_little_space_or_shared_memory_is_pointed_out(monkeypatch, tmp_path) -> None:
    assert not machine.run_folder(tmp_path / "not" / "yet")[0].remedy
    assert list(tmp_path.iterdir()) == []
    full = os.statvfs_result((4096, 4096, 16384, 1, 1, 100, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert "make room" in machine.run_folder(tmp_path)[0].remedy
    (shared,) = machine.shared_memory()
    assert (shared.value, "--shm-size" in shared.remedy) == ("64 MB", True)


def test_data_that_one_rank_cannot_read_is_pointed_out(tmp_path) -> None:
    good, bad = machine.unreadable(tmp_path), machine.unreadable(tmp_path / "none")
    assert not machine.data_folder(tmp_path, True, [good, good])[0].remedy
    (found,) = machine.data_folder(tmp_path, True, [good, bad])
    assert found.value.startswith("rank 1 cannot read it: ")
    assert "HYBRID_DATA" in found.remedy
    assert machine.data_folder(tmp_path, True, [bad, bad])[0].remedy
    assert not machine.data_folder(tmp_path, False, [bad, bad])[0].remedy


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path) -> None:
    def check(*others):
        comm = SimpleNamespace(bcast=lambda name: name, allgather=lambda sees: [sees, *others])
        return machine.same_folder(tmp_path, comm)

    assert not check(True)[0].remedy
    (found,) = check(True, False)
    assert (found.value.split(" does")[0], "--out" in found.remedy) == ("rank 2", True)
    assert list(tmp_path.iterdir()) == []
