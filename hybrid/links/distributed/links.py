"""Links through torch.distributed: NCCL between GPUs where it can, else gloo."""

from __future__ import annotations

from typing import TypeVar

from hybrid.links.base import Program, Start
from hybrid.links.distributed.gloo import GlooLinks
from hybrid.links.distributed.nccl import NcclLinks, one_gpu_each

T = TypeVar("T")


class TorchLinks(GlooLinks):
    """The links of a run, whatever launcher has started its ranks."""

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run `program` on this rank, by NCCL if every rank has a GPU of its own."""
        if one_gpu_each(start.comm, start.device):
            return NcclLinks.start(program, start)
        return super().start(program, start)
