"""What joins ranks: its rate and latency."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from hybrid.settings.config import LinkSettings

_RING_BYTES = 1 << 16
"""From which on Open MPI sums in a ring."""


@dataclass(frozen=True)
class Network:
    """A connection of two ranks, which carries one message at a time in each direction."""

    bytes_per_second: float = 10e9 / 8
    """Every rank has as much, whatever its host's other ranks send."""
    latency_seconds: float = 10e-6

    @classmethod
    def asked(cls, links: LinkSettings) -> Network:
        """The network that the settings of [links] describe."""
        rate = links.gigabits_per_second * 1e9 / 8
        return cls(rate, links.latency_microseconds * 1e-6)

    def seconds(self, num_bytes: float) -> float:
        """That bytes take to leave."""
        return num_bytes / self.bytes_per_second

    def meeting_seconds(self, ranks: int) -> float:
        """That a value of each of so many ranks takes to reach all: 2 latency ceil(log2 n)."""
        return 2 * ceil(log2(ranks)) * self.latency_seconds

    def sum_seconds(self, num_bytes: float, replicas: int) -> tuple[float, float]:
        """That the sum of a vector of B bytes of each of R replicas travels; and latency besides.

            ring      2 (R-1)/R B / rate                 2 (R-1) latency
            tree      2 ceil(log2 R) B / rate            2 ceil(log2 R) latency

        MPI takes a tree below 64 KiB.
        """
        R = replicas
        if num_bytes < _RING_BYTES:
            return self.seconds(2 * ceil(log2(R)) * num_bytes), self.meeting_seconds(R)
        return self.seconds(2 * (R - 1) / R * num_bytes), 2 * (R - 1) * self.latency_seconds
