"""Window, sweeps and corrections that follow the residual and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid.settings.round_options import WINDOW

HOLD = 8
"""Probes before a residual that was too large is tried again."""
_ROOT = 0.5**0.5


@dataclass(frozen=True)
class RoundPlan:
    """How rounds go for a while."""

    window: int
    """Mini-batches."""
    sweeps: int = 1
    correct_every: int = 1


class Controller:
    r"""Moves on a ladder of rounds, from the cautious ones to those that trust the records longest.

        window 1, 2, 4, ... `limit`,   then sweeps 2, 4, ... `sweeps` at the longest window
                                       (from `least_sweeps` on, where a method wants as many),
        then a correction every 2nd, 4th, ... `correct_every`-th round

    A probe is the relative residual r = ||lam - x|| / ||x|| of the last parallel phase, the largest
    over the cuts, and the learning rate. Records age with the steps since they were made and with
    the size of these, so the rung to aim at has (beyond `limit`, as many doublings as)

        window = WINDOW (largest rate so far) / rate,   to the nearest power of two

    and a probe asks for

        one rung down   if r > residual, or if the rung is above the aim
        one rung up     if r <= residual / 2 and the rung is below the aim

    Two probes in a row that ask for the same move by it, a factor of two. After a residual that was
    too large, none of the next HOLD probes asks for more. On the lowest rung, two that ask for less
    ask for a rest: the next rounds are serial alone, if `correct_every` lets any be serial.

    It is a pure function of the probes, and by IEEE products and comparisons alone: ranks that give
    it the same decide the same.
    """

    def __init__(
        self,
        limit: int,
        sweeps: int = 1,
        correct_every: int = 1,
        residual: float = 0.1,
        least_sweeps: int = 1,
    ) -> None:
        longest, once = powers(limit)[-1], min(correct_every, 1)
        swept = [n for n in powers(sweeps) if n >= least_sweeps] or [sweeps]
        self.ladder = [
            *(RoundPlan(window, swept[0], once) for window in powers(limit)),
            *(RoundPlan(longest, each, once) for each in swept[1:]),
            *(RoundPlan(longest, swept[-1], each) for each in powers(correct_every)[1:]),
        ]
        self.residual = residual
        self.start = self.level = len(powers(min(WINDOW, longest))) - 1
        self.peak = 0.0
        """Largest learning rate so far."""
        self.votes = 0
        """Probes in a row that asked for more, or, negative, for less."""
        self.held = 0
        """Probes still to come that cannot ask for more."""

    @property
    def now(self) -> RoundPlan:
        """Of the next rounds."""
        return self.ladder[self.level]

    def aim(self, rate: float) -> int:
        """The rung for a learning rate, whatever the residual."""
        doublings = 0
        while doublings < len(self.ladder) and rate * 2**doublings <= self.peak * _ROOT:
            doublings += 1
        return min(self.start + doublings, len(self.ladder) - 1)

    def probe(self, residual: float, rate: float) -> bool:
        """Take a probe; whether the next rounds shall be serial alone."""
        self.peak = max(self.peak, rate)
        aim = self.aim(rate)
        large = not residual <= self.residual
        barred = self.held > 0
        self.held = HOLD if large else max(0, self.held - 1)
        if large or self.level > aim:
            self.votes = min(self.votes, 0) - 1
        elif self.level < aim and residual <= self.residual / 2 and not barred:
            self.votes = max(self.votes, 0) + 1
        else:
            self.votes = 0
        if abs(self.votes) < 2:
            return False
        asked, self.votes = self.level + (1 if self.votes > 0 else -1), 0
        self.level = max(0, asked)
        return asked < 0 and self.now.correct_every > 0

    def state(self) -> dict[str, Any]:
        """JSON-able, for a checkpoint."""
        return {name: getattr(self, name) for name in ("level", "peak", "votes", "held")}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave, within this ladder."""
        self.peak, self.votes, self.held = state["peak"], state["votes"], state["held"]
        self.level = min(state["level"], len(self.ladder) - 1)


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`; 1 alone for less."""
    return [2**n for n in range(max(1, most).bit_length())]
