"""What is installed, and whether all ranks have the same."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from hybrid.doctor.finding import Finding

PACKAGES = ("hybrid", "torch", "numpy", "mpi4py", "cupy")
_CUPY = ("cupy", "cupy-cuda12x", "cupy-cuda13x")


def installed() -> dict[str, str]:
    """Version of Python and of each package; empty where it is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def versions(found: dict[str, str]) -> list[Finding]:
    """A line each; only mpi4py is missed."""
    remedies = {"mpi4py": "pip install 'hybrid[mpi]' to run under mpirun"}
    return [
        Finding(name, number or "not installed", "" if number else remedies.get(name, ""))
        for name, number in found.items()
    ]


def same_versions(ranks: Sequence[dict[str, str]]) -> list[Finding]:
    """Names what differs from rank 0."""
    differing = [
        f"{name} {ranks[0][name] or 'missing'} on rank 0, {there[name] or 'missing'} on rank {rank}"
        for name in ranks[0]
        for rank, there in enumerate(ranks)
        if there[name] != ranks[0][name]
    ][:3]
    if not differing:
        return [Finding("versions", f"the same on {len(ranks)} ranks")]
    remedy = "activate the same environment on every node, in the job script"
    return [Finding("versions", "; ".join(differing), remedy)]


def _version(package: str) -> str:
    for name in _CUPY if package == "cupy" else (package,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
