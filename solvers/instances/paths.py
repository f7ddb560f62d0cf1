"""Which units an instance goes through, and where it leaves: known to every rank beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Path(NamedTuple):
    """Of one instance."""

    units: tuple[frozenset[int], ...]
    """Of each block, up to that behind which it leaves: the units that it goes through."""

    @property
    def last(self) -> int:
        """The block behind which it leaves: the last, or one with an exit."""
        return len(self.units) - 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Units of each block."""
        return tuple(map(len, self.units))


@dataclass(frozen=True)
class Paths:
    """Draws paths, each a pure function of (seed, step, id of the instance's first sample).

    The numbers of a unit do not depend on the cuts: those that may be left out are counted.
    """

    seed: int
    survivals: Sequence[Sequence[float]]
    """Of each block: with which probability an instance goes through a unit."""
    exits: float = 0.0
    """With which probability an instance leaves at a cut, any of them as likely as another."""

    def of(self, step: int, first: int) -> Path:
        """The path of the instance whose first sample is `first`."""
        count = sum(p < 1 for block in self.survivals for p in block)
        seeds = np.random.SeedSequence((self.seed, step, first))
        # 53 bits each, as floats have
        numbers = (seeds.generate_state(count + 2, np.uint64) >> np.uint64(11)) * 2.0**-53
        leaves, where, *draws = numbers.tolist()
        last = len(self.survivals) - 1
        if leaves < self.exits:
            last = int(where * last)
        draw = iter(draws)
        gone = [[p < 1 and next(draw) >= p for p in block] for block in self.survivals]
        units = [frozenset(u for u, out in enumerate(block) if not out) for block in gone]
        return Path(tuple(units[: last + 1]))
