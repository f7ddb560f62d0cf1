"""One of R replicas on virtual clocks; the others would do the same at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from hybrid.links import Network, VirtualLinks
from hybrid.links.base import Peers, Program, num_bytes
from hybrid.links.grid import Arrangement
from hybrid.links.threads import Room, run_threads

T = TypeVar("T")


def run_representative(
    blocks: int,
    program: Program[T],
    network: Network,
    replicas: int,
    arrangement: Arrangement = "chain",
) -> list[T]:
    """Run `program` on the first of R replicas, each block on its own clock; results by block."""
    baton, threads = Lock(), torch.get_num_threads()

    def make(number: int, room: Room) -> RepresentativeLinks:
        links = RepresentativeLinks(number, room, network, baton, threads)
        links.place, links.arrangement = replace(links.place, replicas=replicas), arrangement
        links.peers = _Likewise(links)
        return links

    return run_threads(blocks, program, threads, make)


class RepresentativeLinks(VirtualLinks):
    """The links of a block of the first of R replicas, which alone is run.

    Its peers begin a sum or an exchange when it does, and the network's formulas tell how long that
    takes. What they would send has the right format and no meaning: units that only let time pass
    compute nothing.
    """

    def finish_exchange(self, num_bytes: int) -> Callable[[], None]:
        """Send the peers so many bytes in all; the call of what it gives waits for theirs."""
        P = self._network.peers_per_host(self.place, self.arrangement)
        took = self._network.exchange_seconds(num_bytes, self.place.replicas, P)
        self._free[0] = max(self.now(), self._free[0]) + took
        arrival = self._free[0] + self._network.latency_seconds

        def wait() -> None:
            self._clock += max(0.0, arrival - self.now())

        return wait

    def _sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        begun = self.now()

        def finish() -> Tensor:
            self._summed(begun, num_bytes(vector))
            return vector * self.place.replicas

        return finish

    def _all_gather(self, value: T, grid: bool) -> list[T]:
        mine = super()._all_gather(value, False)
        if not grid:
            return mine
        everyone = mine * self.place.replicas
        network = self._network
        self._clock += network.meeting_seconds(len(everyone)) - network.meeting_seconds(len(mine))
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
        wait = links.finish_exchange(sent)

        def arrived() -> list[Tensor]:
            with links.waiting("peers"):
                wait()
            return list(expected or pieces)

        return arrived

    def drop(self) -> None:
        """Nothing is under way."""
