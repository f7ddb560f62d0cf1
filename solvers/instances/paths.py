"""The units that an instance goes through, and where it leaves; every rank knows them before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Path(NamedTuple):
    """The path of one instance."""

    units: tuple[frozenset[int], ...]
    """For each block, up to that behind which the instance leaves: its units on the path."""

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

    What is drawn for a unit does not depend on the cuts: only units that may be left out count.
    """

    seed: int
    survivals: Sequence[Sequence[float]]
    """For each block, the probabilities with which an instance goes through its units."""
    exits: float = 0.0
    """The probability with which an instance leaves at a cut; every cut is equally likely."""

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
