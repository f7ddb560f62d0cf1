"""Links between blocks: threads in one process, MPI ranks, or virtual clocks."""

from hybrid.errors import AgreedError
from hybrid.links.base import PeerError, Place, Program, RankLinks, Traffic
from hybrid.links.threads import ThreadLinks, run_threads
from hybrid.links.virtual import Network, VirtualLinks, run_virtual

__all__ = [
    "AgreedError",
    "Network",
    "PeerError",
    "Place",
    "Program",
    "RankLinks",
    "ThreadLinks",
    "Traffic",
    "VirtualLinks",
    "run_threads",
    "run_virtual",
]
