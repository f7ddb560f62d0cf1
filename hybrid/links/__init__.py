"""Links between blocks: threads of one process, ranks of MPI or of torch, or virtual clocks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.errors import AgreedError as AgreedError
    from hybrid.errors import PeerError as PeerError
    from hybrid.links.base import Program as Program
    from hybrid.links.base import RankLinks as RankLinks
    from hybrid.links.base import Start as Start
    from hybrid.links.base import Traffic as Traffic
    from hybrid.links.threads import ThreadLinks as ThreadLinks
    from hybrid.links.threads import run_threads as run_threads
    from hybrid.links.virtual import LinkSpeed as LinkSpeed
    from hybrid.links.virtual import VirtualLinks as VirtualLinks
    from hybrid.links.virtual import run_virtual as run_virtual

_HOMES = {
    **dict.fromkeys(("Program", "RankLinks", "Start", "Traffic"), "hybrid.links.base"),
    **dict.fromkeys(("AgreedError", "PeerError"), "hybrid.errors"),
    **dict.fromkeys(("ThreadLinks", "run_threads"), "hybrid.links.threads"),
    **dict.fromkeys(("LinkSpeed", "VirtualLinks", "run_virtual"), "hybrid.links.virtual"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: the settings, which know the registry, need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hybrid.links' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
