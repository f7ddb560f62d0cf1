"""One of R replicas on virtual clocks; the others would do the same at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from hybrid.links import VirtualLinks
from hybrid.links.base import PeerLinks

T = TypeVar("T")


class RepresentativeLinks(VirtualLinks):
    """The links of a block of the first of R replicas, which alone is run.

    Its peers begin a sum or an exchange when it does, and the network's formulas tell how long that
    takes. What they would send has the right format and no meaning: units that only let time pass
    compute nothing.
    """

    def __init__(self, *start: Any, replicas: int) -> None:
        super().__init__(*start)
        self.place = replace(self.place, replicas=replicas)
        self.peers = _Likewise(self)

    def exchange_end(self, num_bytes: int) -> float:
        """When bytes for all peers, and theirs, have arrived."""
        return self._leaves(0, num_bytes) + self.speed.latency_seconds

    def sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        begun = self.now()

        def finish() -> Tensor:
            self._summed(begun, vector.nbytes)
            return vector * self.place.replicas

        return finish

    def everyone(self, value: T) -> list[T]:
        chain = super().everyone(value)
        everyone = chain * self.place.replicas
        seconds = [self.speed.meeting_seconds(len(each)) for each in (chain, everyone)]
        with self.waiting("everyone"):
            self.work(seconds[1] - seconds[0])
        return everyone


class _Likewise(PeerLinks):
    """The peers of a representative."""

    _links: RepresentativeLinks

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        links = self._links
        sent = sum(piece.nbytes for piece in pieces) - pieces[self.replica].nbytes
        links.traffic.bytes_sent["peers"] += sent
        end = links.exchange_end(sent)

        def arrived() -> list[Tensor]:
            with links.waiting("peers"):
                links.work(max(0.0, end - links.now()))
            return list(expected or pieces)

        return arrived
