"""Links between blocks: threads in one process, or MPI ranks."""

from hybrid.links.base import AgreedError, PeerError, Program, RankLinks, Traffic
from hybrid.links.threads import ThreadLinks, run_threads

__all__ = [
    "AgreedError",
    "PeerError",
    "Program",
    "RankLinks",
    "ThreadLinks",
    "Traffic",
    "run_threads",
]
