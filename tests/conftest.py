"""Launching programs, each with a hard time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from hybrid.cli.app import app
from hybrid.cli.failure import run_command

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Command = Callable[..., tuple[int, str, str]]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def mpirun() -> Launch:
    """`mpirun(n, *command)` runs it on `n` ranks; `limit` seconds, then it is an error."""

    def launch(
        ranks: int, *command: object, limit: float = 100
    ) -> subprocess.CompletedProcess[str]:
        return _run([BIN / "mpirun", "-n", ranks, *command], limit)

    return launch


@pytest.fixture(scope="session")
def hybrid_cli() -> Path:
    """The installed `hybrid` command."""
    return BIN / "hybrid"


@pytest.fixture
def hybrid(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process: (exit status, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        words = [str(argument) for argument in arguments]
        command = typer.main.get_command(app)
        status = run_command(lambda: command.main(args=words, standalone_mode=False))
        return status, *capfd.readouterr()

    return run


def _run(command: list[object], limit: float) -> subprocess.CompletedProcess[str]:
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [str(part) for part in command],
        env=os.environ | allowed,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
