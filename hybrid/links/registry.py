"""The links by name: one file each, a line here; a link is imported when asked for."""

from __future__ import annotations

from typing import Any

from hybrid.solvers.named import Named

AUTO = "auto"
"""What joins the ranks that a launcher has started, MPI or torch.distributed; else threads."""

LINKS: Named[Any] = Named(
    "link",
    {
        "threads": "hybrid.links.threads:ThreadLinks",
        "mpi": "hybrid.links.mpi.links:MpiLinks",
        "torch": "hybrid.links.distributed.links:TorchLinks",
        "virtual": "hybrid.links.virtual:VirtualLinks",
    },
    default=AUTO,
    group="hybrid.links",
    base="hybrid.links.base:RankLinks",
)
"""Name -> where its class is."""
