"""One real Slurm cluster for all tests of this folder, and trainings on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from world import FOLDER

from tests.slurm.cluster import Slurm, why_not

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]

TESTED = "22.05"
"""Debian 12's Slurm; it must start."""
Submit = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.timeout(600))  # the first one may have to install Slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Four nodes of two cores and two GPUs that are none, or a skip that says why."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    cluster = Slurm(folder)
    cluster.environment |= {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        FOLDER: str(folder),
    }
    try:
        try:
            cluster.start()
        except RuntimeError as error:
            if TESTED in cluster("sbatch", "--version"):
                raise
            pytest.skip(f"another Slurm than {TESTED}, which does not start like it: {error}")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def jobs(slurm: Slurm) -> Iterator[list[str]]:
    """The numbers of a test's jobs, which do not outlive it."""
    numbers: list[str] = []
    yield numbers
    for job in numbers:
        slurm("scancel", job, fails=True)
    slurm.wait_until_idle()


@pytest.fixture
def submit(slurm: Slurm, jobs: list[str]) -> Submit:
    """`submit(config, nodes, more words of hybrid submit...)`: the number of the job."""

    def run(config: Path, nodes: int, *words: object) -> str:
        command = ["hybrid", "submit", config, "--nodes", nodes, "--ranks-per-node", 1]
        command += ["--cpus-per-rank", 1, "--gpus-per-rank", 0, *words]
        jobs.append(slurm(*command).strip())
        return jobs[-1]

    return run
