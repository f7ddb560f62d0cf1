"""What the doctor says of made-up ranks, folders and shared memory."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hybrid import doctor
from hybrid.doctor import checks
from hybrid.doctor.checks import RankHardware


def place(host="n1", cpus="0", threads=1, gpus=()):
    return RankHardware(
        host, [int(cpu) for cpu in cpus.split(",")], threads, [f"H100 {n}" for n in gpus]
    )


HERE = checks.installed()
OTHER = HERE | {"torch": "1.0"}, HERE | {"numpy": ""}


@pytest.mark.parametrize(
    ("found", "value", "remedy"),
    [
        (checks.binding([place(cpus="0"), place(cpus="1")])[-1], "", ""),
        (checks.binding([place(cpus="0,1"), place(cpus="0,1")])[-1], "", ""),
        (checks.binding([place(), place()])[-1], "", "--map-by"),
        (checks.binding([place(cpus=c, threads=2) for c in ("0,1", "1,2")])[-1], "", "--map-by"),
        (checks.same_versions([HERE, HERE])[0], f"torch {torch.__version__.partition('+')[0]}", ""),
        (
            checks.same_versions([HERE, *OTHER])[0],
            "on rank 0, 1.0 on rank 1; numpy",
            "activate the same",
        ),
        (checks.same_versions([HERE | {"mpi4py": ""}])[0], "mpi4py missing", "pip install mpi4py"),
    ],
)
def test_what_is_amiss_has_its_remedy_and_nothing_else_has_one(found, value, remedy) -> None:
    assert value in found.value
    assert remedy in found.remedy
    assert bool(remedy) == bool(found.remedy)


@pytest.mark.parametrize(
    ("places", "subjects"),
    [
        ([place(), place()], []),
        ([place(gpus=(0, 1))] * 2, []),
        ([place(gpus=(0,)), place(gpus=(1,))], []),  # each sees its own alone
        ([place(gpus=(0, 1))] * 3, ["GPU sharing"]),
        ([place(gpus=(0,))] * 2, ["GPU sharing"]),
        ([place(gpus=(0,)), place()], ["GPU sharing"]),
    ],
)
def test_gpus_that_are_shared_or_out_of_reach_are_pointed_out(places, subjects) -> None:
    found = checks.gpu_sharing(places)
    assert [finding.subject for finding in found] == subjects
    assert all(finding.remedy for finding in found)


def test_a_torch_that_cannot_use_the_gpus_of_the_host_is_pointed_out(monkeypatch, tmp_path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: x)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA build" in checks.gpus()[0].remedy


def test_a_check_that_fails_is_a_line_and_not_the_end(monkeypatch, tmp_path) -> None:
    def broken() -> None:
        raise RuntimeError("broken\nbadly")

    monkeypatch.setattr(checks, "library", broken)
    lines: list[str] = []
    doctor.report(lines.append, tmp_path)
    assert any("cannot look: RuntimeError: broken badly" in line for line in lines)
    assert any("GPUs" in line for line in lines)


def test_a_torchvision_that_does_not_load_is_pointed_out(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms does not exist')")
    (finding,) = checks.torchvision()
    assert finding.value.endswith(
        f"does not fit torch {torch.__version__}: operator nms does not exist"
    )
    assert "from one index" in finding.remedy


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_a_folder_that_cannot_be_written_to_is_a_finding(monkeypatch, tmp_path) -> None:
    reason = "Permission denied"
    monkeypatch.setattr("tempfile.NamedTemporaryFile", failing(OSError(13, reason, str(tmp_path))))
    (found,) = checks.run_folder(tmp_path, None)
    assert (found.subject, "--out" in found.remedy) == ("run folder", True)
    assert reason in found.value


def test_a_folder_whose_server_does_not_answer_is_a_finding_on_every_rank(monkeypatch, tmp_path):
    """No rank raises before it has met the others, which would wait for it."""
    monkeypatch.setattr(checks, "within_limit", partial(checks.within_limit, seconds=0.05))
    monkeypatch.setattr(checks.Path, "exists", lambda _: time.sleep(2))
    met = []
    comm = SimpleNamespace(bcast=lambda name: name, allgather=lambda sees: met.append(sees) or met)
    (found,) = checks.run_folder(tmp_path, comm)
    assert ("no answer in 0.05 s" in found.value, "--out" in found.remedy) == (True, True)
    assert met == [False]


def test_a_folder_is_not_made_and_too_little_shared_memory_is_pointed_out(
    monkeypatch, tmp_path
) -> None:
    assert not checks.run_folder(tmp_path / "not" / "yet", None)[0].remedy
    assert list(tmp_path.iterdir()) == []
    full = os.statvfs_result((4096, 4096, 16384, 1, 1, 100, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    (shared,) = checks.shared_memory()
    assert (shared.value, "--shm-size" in shared.remedy) == ("64 MB", True)


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path) -> None:
    def check(*others):
        comm = SimpleNamespace(bcast=lambda name: name, allgather=lambda sees: [sees, *others])
        return checks.run_folder(tmp_path, comm)

    assert not check(True)[0].remedy
    (found,) = check(True, False)
    assert (found.value.split(" does")[0], "--out" in found.remedy) == ("rank 2", True)
    assert list(tmp_path.iterdir()) == []
