"""One of R replicas on virtual clocks, which stands for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from hybrid.links import VirtualLinks
from hybrid.links.base import PeerLinks
from hybrid.solvers.peers import Sum

T = TypeVar("T")


class RepresentativeLinks(VirtualLinks):
    """The links of a block of the first of R replicas, the only one that runs.

    Its peers begin a sum or an exchange when it does, and the network's formulas give the time.
    Their messages have the right format and no meaning: stand-ins compute nothing.
    """

    def __init__(self, *start: Any, replicas: int) -> None:
        super().__init__(*start)
        self.place = replace(self.place, replicas=replicas)
        self.peers = _IdenticalPeers(self)

    def sum_of_peers(self, vector: Tensor) -> Sum:
        start = self.now()

        def finish() -> Tensor:
            self.advance_past_sum(start, vector.nbytes)
            return vector * self.place.replicas

        return Sum(finish)

    def all_gather_grid(self, value: T) -> list[T]:
        chain = super().all_gather_grid(value)
        grid = chain * self.place.replicas
        seconds = [self.speed.meeting_seconds(len(each)) for each in (chain, grid)]
        with self.waiting("everyone"):
            self.work(seconds[1] - seconds[0])
        return grid


class _IdenticalPeers(PeerLinks):
    """The peers of a representative, which do the same as it at the same time."""

    _links: RepresentativeLinks

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        links = self._links
        sent = sum(piece.nbytes for piece in pieces) - pieces[self.replica].nbytes
        links.traffic.bytes_sent["peers"] += sent
        end = links._leaves(0, sent) + links.speed.latency_seconds

        def arrived() -> list[Tensor]:
            with links.waiting("peers"):
                links.work(max(0.0, end - links.now()))
            return list(expected or pieces)

        return arrived
