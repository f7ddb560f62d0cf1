"""The order in which every rank takes its instances up and home: a simulation that all make."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

FORWARD, BACKWARD = 1, 2
"""Ticks that a unit takes."""


class InstancePass(NamedTuple):
    """An instance's pass over one block."""

    forward: bool
    item: int


def limit(index: int, count: int, most: int) -> int:
    """Instances that block `index` of `count` may have under way, of `most` in all.

    More would only wait in front of the next block. The last takes each home at once.
    """
    return min(most, max(most, count) - index) if index < count - 1 else 1


class Order:
    r"""What each rank does next, from the paths of the instances alone.

    A clock ticks for all ranks; a message takes no time. A unit's forward pass takes a tick, its
    backward pass two; the loss takes none. A rank that is idle takes the oldest instance whose
    adjoint has come home, else the oldest that has come up, if block k then has at most `limit`
    under way. The first rank takes a new one while fewer than `most` (max_active_keys) are. K = 3
    blocks of a unit, most = 3; instance 1 leaves behind block 1, 2 passes it by without a unit:

        tick      0    1    2    3    4    5    6    7    8    9    10   11
        block 0   F0   F1   F2             B1---B1   B0---B0   F3   F4   B2---
        block 1        F0   F1   B1---B1   B0---B0   F2             B2 F3   F4
        block 2             F0   B0---B0             F2   B2---B2         F3

    It is made in pieces, whenever new instances are known. A piece ends when the first rank would
    take one that is not, so what is done does not depend on the pieces.
    """

    def __init__(self, count: int, most: int) -> None:
        self.most = most
        self.limits = [limit(index, count, most) for index in range(count)]
        self._lengths: dict[int, tuple[int, ...]] = {}
        self._entering: deque[int] = deque()
        self._up: list[deque[int]] = [deque() for _ in range(count)]
        self._home: list[list[int]] = [[] for _ in range(count)]
        self._open = [0] * count
        self._idle = [True] * count
        self._ends: list[tuple[int, int, InstancePass]] = []
        """(when, rank, op) of those that are at work."""
        self._now = 0

    @property
    def active(self) -> int:
        """Instances that have gone up and not come home."""
        return self._open[0]

    def take(self, lengths: Sequence[tuple[int, ...]], first: int) -> list[list[InstancePass]]:
        """Every rank's ops until the first one would take the instance after these.

        `lengths`: of each, from number `first` on, the units in the blocks it goes through.
        """
        self._lengths |= dict(enumerate(lengths, first))
        self._entering.extend(range(first, first + len(lengths)))
        return self._go_on(closing=False)

    def drain(self) -> list[list[InstancePass]]:
        """Every rank's ops until all are home."""
        return self._go_on(closing=True)

    def _go_on(self, closing: bool) -> list[list[InstancePass]]:
        done: list[list[InstancePass]] = [[] for _ in self.limits]
        while True:
            for rank in range(len(self.limits)):
                op = self._next(rank) if self._idle[rank] else None
                if op is not None:
                    self._begin(rank, op)
                    done[rank].append(op)
                elif rank == 0 and not closing and self._idle[0] and self._open[0] < self.most:
                    return done
            if not self._ends:
                return done
            self._now = self._ends[0][0]
            while self._ends and self._ends[0][0] == self._now:
                self._end(*heappop(self._ends)[1:])

    def _next(self, rank: int) -> InstancePass | None:
        """What an idle rank takes."""
        if self._home[rank]:
            return InstancePass(False, heappop(self._home[rank]))
        waiting = self._up[rank] if rank else self._entering
        if waiting and self._open[rank] < self.limits[rank]:
            return InstancePass(True, waiting.popleft())
        return None

    def _begin(self, rank: int, op: InstancePass) -> None:
        self._idle[rank] = False
        self._open[rank] += op.forward
        ticks = FORWARD if op.forward else BACKWARD
        heappush(self._ends, (self._now + ticks * self._lengths[op.item][rank], rank, op))

    def _end(self, rank: int, op: InstancePass) -> None:
        self._idle[rank] = True
        last = len(self._lengths[op.item]) - 1
        if op.forward and rank < last:
            self._up[rank + 1].append(op.item)
        elif op.forward:
            heappush(self._home[rank], op.item)
        else:
            self._open[rank] -= 1
            if rank:
                heappush(self._home[rank - 1], op.item)
            else:
                del self._lengths[op.item]
