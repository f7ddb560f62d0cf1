"""Links between blocks: threads of one process, ranks of MPI or of torch, or virtual clocks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.errors import AgreedError, PeerError
    from hybrid.links.base import Program, RankLinks, Start, Traffic
    from hybrid.links.threads import ThreadLinks, run_threads
    from hybrid.links.virtual import LinkSpeed, VirtualLinks, run_virtual

__all__ = [
    "AgreedError",
    "LinkSpeed",
    "PeerError",
    "Program",
    "RankLinks",
    "Start",
    "ThreadLinks",
    "Traffic",
    "VirtualLinks",
    "run_threads",
    "run_virtual",
]

_HOMES = {
    **dict.fromkeys(("AgreedError", "PeerError"), "hybrid.errors"),
    **dict.fromkeys(("ThreadLinks", "run_threads"), "hybrid.links.threads"),
    **dict.fromkeys(("LinkSpeed", "VirtualLinks", "run_virtual"), "hybrid.links.virtual"),
}
"""Modules of the names that are not in `hybrid.links.base`."""


def __getattr__(name: str) -> Any:
    """Import a name on first use: the settings, which know the registry, need no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hybrid.links' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "hybrid.links.base")), name)
