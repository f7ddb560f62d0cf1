"""One of R replicas on virtual clocks; the others would do the same at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from hybrid.links import VirtualLinks
from hybrid.links.base import Peers, num_bytes

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
        """When so many bytes for all peers, and theirs, have arrived."""
        self._free[0] = max(self.now(), self._free[0]) + self._network.seconds(num_bytes)
        return self._free[0] + self._network.latency_seconds

    def _sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        begun = self.now()

        def finish() -> Tensor:
            self._summed(begun, num_bytes(vector))
            return vector * self.place.replicas

        return finish

    def _all_gather(self, value: T, grid: bool) -> list[T]:
        chain = super()._all_gather(value, False)
        if not grid:
            return chain
        everyone = chain * self.place.replicas
        self.work(
            self._network.meeting_seconds(len(everyone)) - self._network.meeting_seconds(len(chain))
        )
        return everyone


class _Likewise(Peers):
    """The peers of a representative."""

    _links: RepresentativeLinks

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        links = self._links
        sent = sum(map(num_bytes, pieces)) - num_bytes(pieces[self.replica])
        links.traffic.count("peers", sent)
        end = links.exchange_end(sent)

        def arrived() -> list[Tensor]:
            with links.waiting("peers"):
                links.work(max(0.0, end - links.now()))
            return list(expected or pieces)

        return arrived

    def drop(self) -> None:
        """Nothing is under way."""
