"""What the doctor says of MPI, cores, GPUs and versions, by made-up ranks."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from hybrid import doctor
from hybrid.doctor import cores, mpi, versions
from hybrid.doctor.cores import RankHardware


def place(host="n1", cpus="0", threads=1, gpus=0, visible=None):
    return RankHardware(
        host, [int(cpu) for cpu in cpus.split(",")], threads, ["H100"] * gpus, visible
    )


def launched(version):
    return mpi.matching("Open MPI", "5.0.11", version)


HERE = versions.installed()
OTHER = HERE | {"torch": "1.0"}, HERE | {"numpy": ""}


@pytest.mark.parametrize(
    ("found", "value", "remedy"),
    [
        (mpi.ranks_found(4, 1), "", "srun --mpi=pmix"),
        (mpi.ranks_found(4, 4), "", ""),
        (mpi.ranks_found(0, 1), "", ""),
        *((launched(f"mpirun (Open MPI) {same}"), "", "") for same in ("5.0.11", "5.0.3")),
        (launched(""), "", ""),
        (launched("mpirun (Open MPI) 4.1.6"), "", "--no-binary mpi4py"),
        (launched("HYDRA build details: Version: 4.2.1"), "", "--no-binary mpi4py"),
        (cores.binding([place(cpus="0"), place(cpus="1")])[0], "", ""),
        (cores.binding([place("n1"), place("n2")])[0], "", ""),
        (cores.binding([place(cpus="0,1"), place(cpus="0,1")])[0], "", ""),
        (cores.binding([place(), place()])[0], "", "--map-by"),
        (cores.binding([place(cpus=c, threads=2) for c in ("0,1", "1,2")])[0], "", "--map-by"),
        (versions.same_versions([HERE, HERE])[0], "", ""),
        (
            versions.same_versions([HERE, *OTHER])[0],
            "on rank 0, 1.0 on rank 1; numpy",
            "activate the same",
        ),
    ],
)
def test_what_is_amiss_has_its_remedy_and_nothing_else_has_one(found, value, remedy) -> None:
    assert value in found.value
    assert remedy in found.remedy
    assert bool(remedy) == bool(found.remedy)


def test_a_container_with_little_shared_memory_is_told_the_flag(monkeypatch) -> None:
    small = os.statvfs_result((4096, 4096, 16384, 100, 100, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    (shared,) = mpi.shared_memory()
    assert (shared.value, "--shm-size" in shared.remedy) == ("64 MB", True)


def test_what_killed_launchers_left_is_counted(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", str(tmp_path))
    assert mpi.killed() == []
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in (os.getpid(), 1, f"host.{2**31 - 1}"):
        (tmp_path / f"ompi.{name}").mkdir()
    assert mpi.killed() == []
    for pid in (ended.pid, 10**20):
        (tmp_path / f"ompi.{pid}").mkdir()
    (found,) = mpi.killed()
    assert found.value.startswith(f"2 left by launchers that were killed, as {tmp_path}/ompi.")
    assert found.remedy


@pytest.mark.parametrize(
    ("places", "subjects"),
    [
        ([place(), place()], []),
        ([place(gpus=2, visible="0,1")] * 2, []),
        ([place("n1", gpus=1), place("n2", gpus=1)], []),
        ([place(gpus=1, visible="0"), place(gpus=1, visible="1")], ["GPU view"]),
        ([place(gpus=2, visible="0,1")] * 3, ["GPU sharing"]),
        ([place(gpus=1, visible="0")] * 2, ["GPU sharing"]),
        ([place(gpus=1), place(gpus=0)], ["GPU ranks", "GPU sharing"]),
    ],
)
def test_gpus_that_are_shared_or_out_of_reach_are_pointed_out(places, subjects) -> None:
    found = cores.gpu_sharing(places)
    assert [finding.subject for finding in found] == subjects
    assert all(finding.remedy for finding in found)


def test_a_torch_that_cannot_use_the_gpus_of_the_host_is_pointed_out(monkeypatch, tmp_path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: x)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA build" in cores.gpus()[0].remedy


def test_a_check_that_fails_is_a_line_and_not_the_end(monkeypatch, tmp_path) -> None:
    def broken() -> None:
        raise RuntimeError("broken\nbadly")

    monkeypatch.setattr(mpi, "mpirun", broken)
    lines: list[str] = []
    doctor.report(lines.append, tmp_path)
    assert any("cannot look: RuntimeError: broken badly" in line for line in lines)
    assert any("GPUs" in line for line in lines)
