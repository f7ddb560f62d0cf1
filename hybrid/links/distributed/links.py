"""Links through torch.distributed: NCCL between GPUs where it can, else gloo."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from hybrid.links.base import Program, RankLinks, Start
from hybrid.links.distributed.gloo import GlooLinks
from hybrid.links.distributed.nccl import NcclLinks, one_gpu_each

T = TypeVar("T")


class TorchLinks(GlooLinks):
    """The links of a run, whatever launcher has started its ranks."""

    @classmethod
    def of(cls, comm: Any, device: torch.device, replicas: int) -> RankLinks:
        """Those of this rank on a grid with so many replicas, by NCCL where `start` takes it."""
        return (NcclLinks if one_gpu_each(comm, device) else cls)(comm, device, replicas)

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run `program` on this rank, by NCCL if every rank has a GPU of its own."""
        if one_gpu_each(start.comm, start.device):
            return NcclLinks.start(program, start)
        return super().start(program, start)
