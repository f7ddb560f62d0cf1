"""Links between blocks: threads in one process, MPI ranks, or virtual clocks."""

from hybrid.errors import AgreedError
from hybrid.links.base import PeerError, Program, RankLinks, Traffic
from hybrid.links.threads import ThreadLinks, run_threads
from hybrid.links.virtual import Network, VirtualLinks, run_virtual

__all__ = [
    "AgreedError",
    "Network",
    "PeerError",
    "Program",
    "RankLinks",
    "ThreadLinks",
    "Traffic",
    "VirtualLinks",
    "run_threads",
    "run_virtual",
]
