"""What joins ranks: its rate and latency between hosts, and within one."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from hybrid.links.grid import Arrangement, Place
from hybrid.settings.config import LinkSettings

_RING_BYTES = 1 << 16
"""From which on Open MPI sums in a ring."""


@dataclass(frozen=True)
class Network:
    """A connection of two ranks, which carries one message at a time in each direction."""

    bytes_per_second: float = 10e9 / 8
    """Between hosts; every rank has as much, whatever its host's other ranks send."""
    latency_seconds: float = 10e-6
    within: Network | None = None
    """Between ranks of one host; None: as between hosts."""
    ranks_per_host: int = 1
    """Ranks that the launcher numbers one after the other and starts on one host."""
    sums_by_host: bool = False
    """Whether the engine adds up within a host first, as NCCL does; MPI and gloo do not."""

    @classmethod
    def asked(cls, links: LinkSettings) -> Network:
        """The network that the settings of [links] describe."""
        rate = links.gigabits_per_second * 1e9 / 8
        return cls(rate, links.latency_microseconds * 1e-6)

    def between(self, number: int, other: int) -> Network:
        """What joins two of the launcher's ranks."""
        together = number // self.ranks_per_host == other // self.ranks_per_host
        return self.within if together and self.within is not None else self

    def seconds(self, num_bytes: float) -> float:
        """That bytes take to leave."""
        return num_bytes / self.bytes_per_second

    def meeting_seconds(self, ranks: int) -> float:
        """That a value of each of so many ranks takes to reach all: 2 latency ceil(log2 n)."""
        return 2 * ceil(log2(ranks)) * self.latency_seconds

    def peers_per_host(self, place: Place, arrangement: Arrangement) -> int:
        """P, owners of the same block on one host, which divides their number R."""
        R, ranks = place.replicas, self.ranks_per_host if self.within is not None else 1
        most = ranks if arrangement == "peers" else ranks // place.blocks
        return max(P for P in range(1, min(max(most, 1), R) + 1) if R % P == 0)

    def sum_seconds(
        self, num_bytes: float, replicas: int, per_host: int = 1
    ) -> tuple[float, float]:
        """That the sum of a vector of R replicas, P on every host, travels; and latency besides.

            ring      2 (R-1)/R B / rate                 2 (R-1)/R (Q between + (R-Q) within)
            tree      2 ceil(log2 R) B / rate            2 ceil(log2 R)
            by host   2 (P-1)/P B / within + 2 (Q-1)/Q (B/P) / between,  and two trees;  Q = R / P

        MPI's and gloo's ring is of all replicas, at the rate of its slowest link; MPI takes a tree
        below 64 KiB. By host the peers of one reduce and scatter the vector, each sums its part
        with those of the other hosts, and all gather the parts.
        """
        R, P, Q = replicas, per_host, replicas // per_host
        inside = self.within or self
        if self.sums_by_host:
            near, far = 2 * (P - 1) / P * num_bytes, 2 * (Q - 1) / Q * num_bytes / P
            latency = inside.meeting_seconds(P) + self.meeting_seconds(Q)
            return inside.seconds(near) + self.seconds(far), latency
        slowest = inside if Q == 1 else self
        if num_bytes < _RING_BYTES:
            return slowest.seconds(2 * ceil(log2(R)) * num_bytes), slowest.meeting_seconds(R)
        long = Q if Q > 1 else 0
        around = long * self.latency_seconds + (R - long) * inside.latency_seconds
        return slowest.seconds(2 * (R - 1) / R * num_bytes), 2 * (R - 1) / R * around

    def exchange_seconds(self, num_bytes: float, replicas: int, per_host: int = 1) -> float:
        """That a rank's bytes for R - 1 peers take to leave, of which P - 1 are on its host."""
        near = (per_host - 1) / max(1, replicas - 1) * num_bytes
        return (self.within or self).seconds(near) + self.seconds(num_bytes - near)
