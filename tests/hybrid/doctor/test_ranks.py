"""What the doctor says of MPI, cores, GPUs and versions, by made-up ranks."""

from __future__ import annotations

import sys

import pytest
import torch

from hybrid import doctor
from hybrid.doctor import ranks
from hybrid.doctor.ranks import RankHardware


def place(host="n1", cpus="0", threads=1, gpus=0, visible=None):
    return RankHardware(
        host, [int(cpu) for cpu in cpus.split(",")], threads, ["H100"] * gpus, visible
    )


HERE = ranks.installed()
OTHER = HERE | {"torch": "1.0"}, HERE | {"numpy": ""}


@pytest.mark.parametrize(
    ("found", "value", "remedy"),
    [
        (ranks.binding([place(cpus="0"), place(cpus="1")])[-1], "", ""),
        (ranks.binding([place("n1"), place("n2")])[-1], "", ""),
        (ranks.binding([place(cpus="0,1"), place(cpus="0,1")])[-1], "", ""),
        (ranks.binding([place(), place()])[-1], "", "--map-by"),
        (ranks.binding([place(cpus=c, threads=2) for c in ("0,1", "1,2")])[-1], "", "--map-by"),
        (ranks.same_versions([HERE, HERE])[0], f"torch {torch.__version__.partition('+')[0]}", ""),
        (
            ranks.same_versions([HERE, *OTHER])[0],
            "on rank 0, 1.0 on rank 1; numpy",
            "activate the same",
        ),
        (ranks.same_versions([HERE | {"mpi4py": ""}])[0], "mpi4py missing", "pip install mpi4py"),
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
        ([place(gpus=2, visible="0,1")] * 2, []),
        ([place("n1", gpus=1), place("n2", gpus=1)], []),
        ([place(gpus=1, visible="0"), place(gpus=1, visible="1")], ["GPU view"]),
        ([place(gpus=2, visible="0,1")] * 3, ["GPU sharing"]),
        ([place(gpus=1, visible="0")] * 2, ["GPU sharing"]),
        ([place(gpus=1), place(gpus=0)], ["GPU sharing"]),
    ],
)
def test_gpus_that_are_shared_or_out_of_reach_are_pointed_out(places, subjects) -> None:
    found = ranks.gpu_sharing(places)
    assert [finding.subject for finding in found] == subjects
    assert all(finding.remedy for finding in found)


def test_a_torch_that_cannot_use_the_gpus_of_the_host_is_pointed_out(monkeypatch, tmp_path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: x)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA build" in ranks.gpus()[0].remedy


def test_a_check_that_fails_is_a_line_and_not_the_end(monkeypatch, tmp_path) -> None:
    def broken() -> None:
        raise RuntimeError("broken\nbadly")

    monkeypatch.setattr(ranks, "library", broken)
    lines: list[str] = []
    doctor.report(lines.append, tmp_path)
    assert any("cannot look: RuntimeError: broken badly" in line for line in lines)
    assert any("GPUs" in line for line in lines)


@pytest.mark.parametrize("built", [True, False])
def test_a_torchvision_whose_operators_do_not_load_is_pointed_out(
    monkeypatch, tmp_path, built
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    if built:
        (tmp_path / "torchvision" / "_C.so").write_bytes(b"for another torch")
    found = ranks.torchvision()
    assert len(found) == built
    for finding in found:
        assert f"does not fit torch {torch.__version__}" in finding.value
        assert "from one index" in finding.remedy
