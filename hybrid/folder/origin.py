"""The origin of a run: its software, machine and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

DISTRIBUTION = "hybrid-blocks"
"""This package's name where packages are installed from."""
PACKAGES = ("torch", "numpy", "safetensors", "mpi4py", "cupy-cuda12x", "cupy-cuda13x")
"""The packages that the bits of a run may depend on."""


def origin(hosts: Sequence[str], step: int) -> dict[str, Any]:
    """The origin, for JSON, of a run that starts at `step` on ranks of these hosts, in order."""
    found: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "command": shlex.join(sys.argv),
        "hosts": list(hosts),
        "version": version_of(DISTRIBUTION),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: known for name in PACKAGES if (known := version_of(name))},
        "system": platform.platform(),
    }
    if job := os.environ.get("SLURM_JOB_ID"):
        found["slurm_job"] = job
    return found


def commit() -> str | None:
    """The commit of this package's sources, if they are in a repository or pip knows it."""
    with suppress(PackageNotFoundError, OSError, ValueError, AttributeError):
        told = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        if found := told.get("vcs_info", {}).get("commit_id"):
            return str(found)
    git = Path(__file__).parents[2] / ".git"
    # read by hand: MPI libraries may not survive a fork
    with suppress(OSError, ValueError):
        head = (git / "HEAD").read_text().strip()
        ref = head.partition("ref: ")[2]
        if not ref:
            return head
        if (git / ref).is_file():
            return (git / ref).read_text().strip()
        for line in (git / "packed-refs").read_text().splitlines():
            if line.endswith(f" {ref}"):
                return line.split()[0]
    return None


def version_of(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
