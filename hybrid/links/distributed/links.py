"""Links over torch.distributed: NCCL between GPUs where it can, else gloo."""

from __future__ import annotations

from typing import Any

from hybrid.links.base import Start
from hybrid.links.distributed.gloo import GlooLinks
from hybrid.links.distributed.nccl import NcclLinks, takes_nccl


class TorchLinks(GlooLinks):
    """The links of a run, whatever launcher has started its ranks."""

    def __new__(cls, start: Start) -> Any:
        """By NCCL where every rank has a GPU of its own, unless links.device says otherwise."""
        return NcclLinks(start) if takes_nccl(start) else super().__new__(cls)
