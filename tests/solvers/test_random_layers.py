"""Blocks that draw random numbers: the same bits on every kind of links, run after run, resumed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import random_layers
from random_layers import METHODS, trained

from hybrid.folder import checkpoint


@pytest.fixture(scope="module")
def by_mpi(mpirun: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all methods on two MPI ranks."""
    folder = tmp_path_factory.mktemp("mpi")
    done = mpirun(2, sys.executable, random_layers.__file__, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_runs_in_a_row_on_threads_virtual_clocks_and_mpi_and_resumed_have_the_same_bits(
    name: str, by_mpi: Path, tmp_path: Path
) -> None:
    first = trained(name, tmp_path / "first")
    assert trained(name, tmp_path / "second") == first
    assert trained(name, tmp_path / "virtual", "virtual") == first
    last = checkpoint.complete(by_mpi / name / "checkpoints")[-1]
    units = checkpoint.read_manifest(last)["units"]
    assert {unit: entry["sha256"] for unit, entry in units.items()} == first
    found = checkpoint.complete(tmp_path / "first" / "checkpoints")
    assert 0 < int(found[1].name) < 12
    for folder in found[2:]:
        shutil.rmtree(folder)
    assert trained(name, tmp_path / "first", resume=True) == first
