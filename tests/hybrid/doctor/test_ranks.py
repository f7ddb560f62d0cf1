"""What the doctor says of MPI, cores, GPUs and versions, by made-up ranks."""

from __future__ import annotations

import os

import pytest
import torch

from hybrid import doctor
from hybrid.doctor import cores, mpi, versions
from hybrid.doctor.cores import Place


def place(
    host: str = "n1", cpus: str = "0", threads: int = 1, gpus: int = 0, visible: str | None = None
) -> Place:
    return Place(host, [int(cpu) for cpu in cpus.split(",")], threads, ["H100"] * gpus, visible)


@pytest.mark.parametrize(
    ("started", "found", "warned"), [(4, 1, True), (4, 4, False), (0, 1, False)]
)
def test_ranks_that_do_not_find_each_other_are_told_the_remedy(started, found, warned) -> None:
    assert ("srun --mpi=pmix" in mpi.ranks_found(started, found).remedy) == warned


@pytest.mark.parametrize(
    ("launcher", "warned"),
    [
        ("mpirun (Open MPI) 5.0.11", False),
        ("mpirun (Open MPI) 5.0.3", False),
        ("mpirun (Open MPI) 4.1.6", True),
        ("HYDRA build details: Version: 4.2.1", True),
        ("", False),
    ],
)
def test_a_launcher_of_another_mpi_is_pointed_out(launcher, warned) -> None:
    assert ("--no-binary mpi4py" in mpi.matching("Open MPI", "5.0.11", launcher).remedy) == warned


def test_a_container_with_little_shared_memory_is_told_the_flag(monkeypatch) -> None:
    small = os.statvfs_result((4096, 4096, 16384, 100, 100, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    (shared,) = mpi.shared_memory()
    assert (shared.value, "--shm-size" in shared.remedy) == ("64 MB", True)


@pytest.mark.parametrize(
    ("places", "warned"),
    [
        ([place(cpus="0"), place(cpus="1")], False),
        ([place("n1"), place("n2")], False),
        ([place(cpus="0,1", threads=1), place(cpus="0,1", threads=1)], False),
        ([place(), place()], True),
        ([place(cpus="0,1", threads=2), place(cpus="1,2", threads=2)], True),
    ],
)
def test_ranks_that_share_a_core_are_pointed_out(places, warned) -> None:
    (found,) = cores.binding(places)
    assert ("--map-by" in found.remedy) == warned


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


def test_versions_that_differ_are_named() -> None:
    here = versions.installed()
    assert not versions.same_versions([here, here])[0].remedy
    (found,) = versions.same_versions([here, here | {"torch": "1.0"}, here | {"numpy": ""}])
    assert found.value.startswith(f"torch {here['torch']} on rank 0, 1.0 on rank 1; numpy")
    assert found.remedy


def test_a_check_that_fails_is_a_line_and_not_the_end(monkeypatch, tmp_path) -> None:
    def broken() -> None:
        raise RuntimeError("broken\nbadly")

    monkeypatch.setattr(mpi, "mpirun", broken)
    lines: list[str] = []
    doctor.report(lines.append, tmp_path)
    assert any("cannot look: RuntimeError: broken badly" in line for line in lines)
    assert any("GPUs" in line for line in lines)
