"""Launching programs, each with a hard time limit; how much the property tests try."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# before torch is imported, here and in what tests start: workers share the cores, unless
# `make test-machines` asks for more
os.environ.setdefault("OMP_NUM_THREADS", "1")
# every step of replicas is followed by a look whether their weights have the same bits
os.environ["HYBRID_DEBUG"] = "1"

import pytest
from commands import command
from hypothesis import HealthCheck, settings
from world import World, for_mpirun

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Command = Callable[..., tuple[int, str, str]]
BIN = Path(sys.executable).parent
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]

settings.register_profile(
    "quick", max_examples=8, deadline=None, derandomize=True, suppress_health_check=CHECKS
)
settings.register_profile("long", max_examples=300, deadline=None, suppress_health_check=CHECKS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


GROUPS = {
    "ranks": (
        "tests/hybrid/bench/plan/test_on_ranks",
        "tests/hybrid/bench/test_baselines",
        "tests/hybrid/bench/test_bench",
        "tests/hybrid/cli/test_on_ranks",
        "tests/hybrid/data/samplers/test_every_sampler",
        "tests/hybrid/data/test_mapped",
        "tests/hybrid/data/test_stream",
        "tests/hybrid/folder/test_disks",
        "tests/hybrid/links/test_processes",
        "tests/hybrid/proof/test_proof",
        "tests/hybrid/training/test_any_network",
        "tests/hybrid/training/test_given_optimizers",
        "tests/hybrid/training/test_lengths",
        "tests/hybrid/training/test_on_ranks",
        "tests/hybrid/training/test_pretrained",
        "tests/hybrid/training/test_replicas",
        "tests/hybrid/training/test_unlike_replicas",
        "tests/hybrid/training/test_validation",
        "tests/solvers/test_random_layers",
        "tests/test_coming_from",
        "tests/test_tutorial",
        "wings/messages/tests/test_ampnet",
        "wings/rl/tests/test_on_ranks",
    ),
    "slurm": ("tests/slurm/",),
    "faults": ("tests/faults/", "tests/hybrid/training/test_auto_resume"),
}
"""Files whose tests share what is slow to start, as the ranks of `world`: begun first, and each
group done by one worker of pytest-xdist. A file that is missing here is only slower."""


def _group(nodeid: str) -> str:
    groups = (name for name, files in GROUPS.items() if nodeid.startswith(files))
    return next(groups, nodeid.partition("::")[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [*GROUPS, "tests/test_settings_act.py"]
    items.sort(key=lambda item: (*order, group := _group(item.nodeid)).index(group))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.fixture(scope="session")
def mpirun() -> Launch:
    """`mpirun(n, *command)` runs it on `n` ranks; `limit` seconds, then it is an error."""

    def launch(
        ranks: int, *command: object, limit: float = 100
    ) -> subprocess.CompletedProcess[str]:
        return _run([BIN / "mpirun", "-n", ranks, *command], limit)

    return launch


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Three ranks of one mpirun; `world.run(n, "module:function", ...)` on `n` of them."""
    made = World()
    yield made
    made.close()


@pytest.fixture(scope="session")
def hybrid_cli() -> Path:
    """The installed `hybrid` command."""
    return BIN / "hybrid"


@pytest.fixture
def hybrid() -> Command:
    """Run the command in this process: (exit status, stdout, stderr)."""
    return command


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run: two blocks, two epochs of five steps."""
    out = tmp_path_factory.mktemp("finished") / "run"
    sizes = ("--epochs", 2, "--batch-size", 256)
    # a timetable, in which there is local work, and a report in each epoch but at its end
    waits = "fill.name=augmented-lagrangian", "rounds.local_budget=[[16,0],[0,16]]"
    more = ("train.threads=1", "train.report_every=1", *waits)
    words = (*sizes, *(word for each in more for word in ("--set", each)), "--out", out)
    status, _, err = command("train", *words)
    assert status == 0, err
    return out


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _run(command: list[object], limit: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=os.environ | for_mpirun(),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
