"""What is installed, and whether all ranks have the same."""

import platform
from collections.abc import Sequence

from hybrid.doctor.finding import Finding
from hybrid.folder.runfolder import DISTRIBUTION, version_of

PACKAGES = ("hybrid", "torch", "numpy", "mpi4py", "cupy")
"""What a run needs or may have; some are installed under other names."""


def installed() -> dict[str, str]:
    """Version of Python and of each package; empty where it is not installed."""
    found = {"python": platform.python_version()} | dict.fromkeys(PACKAGES, "")
    for name in (*PACKAGES[1:], DISTRIBUTION, "cupy-cuda12x", "cupy-cuda13x"):
        if number := version_of(name):
            found[name.partition("-")[0]] = number
    return found


def versions(found: dict[str, str]) -> list[Finding]:
    """One line for each; only a missing mpi4py has a remedy."""
    remedies = {"mpi4py": "pip install 'hybrid-blocks[mpi]' to run under mpirun"}
    return [
        Finding(name, number or "not installed", "" if number else remedies.get(name, ""))
        for name, number in found.items()
    ]


def same_versions(ranks: Sequence[dict[str, str]]) -> list[Finding]:
    """Up to three versions that differ from those of rank 0."""
    differing = [
        f"{name} {here or 'missing'} on rank 0, {there[name] or 'missing'} on rank {rank}"
        for name, here in ranks[0].items()
        for rank, there in enumerate(ranks)
        if there[name] != here
    ][:3]
    if not differing:
        return [Finding("versions", f"the same on {len(ranks)} ranks")]
    remedy = "activate the same environment on every node, in the job script"
    return [Finding("versions", "; ".join(differing), remedy)]
