"""The order of all ranks' forward and backward passes, from a simulation that every rank makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

FORWARD, BACKWARD = 1, 2
"""Ticks of a unit's pass."""


class InstancePass(NamedTuple):
    """An instance's pass over one block."""

    forward: bool
    item: int


def limit(index: int, count: int, most: int) -> int:
    """Instances that block `index` of `count` may have under way, of `most` in all.

    More would only wait in front of the next block. The last block has one at a time.
    """
    return min(most, max(most, count) - index) if index < count - 1 else 1


class Schedule:
    r"""What each rank does next, from nothing but the paths of the instances.

    One clock ticks for all ranks; a message takes no time. A unit's forward pass takes one tick and
    its backward pass two; the loss takes none. An idle rank chooses the backward pass of the oldest
    instance whose adjoint has arrived. If there is none, it chooses the forward pass of the oldest
    instance whose input has arrived, unless block k has `limit` instances under way already. The
    first rank lets a new instance in while fewer than `most` (max_active_keys) are under way. With
    K = 3 blocks of one unit and most = 3, where instance 1 leaves behind block 1 and the path of
    instance 2 leaves out the unit of block 1:

        tick      0    1    2    3    4    5    6    7    8    9    10   11
        block 0   F0   F1   F2             B1---B1   B0---B0   F3   F4   B2---
        block 1        F0   F1   B1---B1   B0---B0   F2             B2 F3   F4
        block 2             F0   B0---B0             F2   B2---B2         F3

    The schedule is made in pieces, whenever new instances are known. A piece ends when the first
    rank would let in an instance that is not known yet, so the pieces do not change the order.
    """

    def __init__(self, count: int, most: int) -> None:
        self.most = most
        self.limits = [limit(index, count, most) for index in range(count)]
        self._lengths: dict[int, tuple[int, ...]] = {}
        self._inputs: list[deque[int]] = [deque() for _ in range(count)]
        """Of each rank, the instances whose input has arrived."""
        self._adjoints: list[list[int]] = [[] for _ in range(count)]
        """Of each rank, the instances whose adjoint has arrived."""
        self._under_way = [0] * count
        self._idle = [True] * count
        self._ends: list[tuple[int, int, InstancePass]] = []
        """(when, rank, pass) of the passes that have begun."""
        self._now = 0

    def extend(self, lengths: Sequence[tuple[int, ...]], first: int) -> list[list[InstancePass]]:
        """Every rank's passes until the first rank would need the instance after these.

        `lengths`: of each, from number `first` on, the units in the blocks that it goes through.
        """
        self._lengths |= dict(enumerate(lengths, first))
        self._inputs[0].extend(range(first, first + len(lengths)))
        return self._simulate(closing=False)

    def drain(self) -> list[list[InstancePass]]:
        """Every rank's passes until none is under way."""
        return self._simulate(closing=True)

    def _simulate(self, closing: bool) -> list[list[InstancePass]]:
        done: list[list[InstancePass]] = [[] for _ in self.limits]
        while True:
            for rank in range(len(self.limits)):
                op = self._next(rank) if self._idle[rank] else None
                if op is not None:
                    self._begin(rank, op)
                    done[rank].append(op)
                elif rank == 0 and not closing and self._idle[0] and self._has_room():
                    return done
            if not self._ends:
                return done
            self._now = self._ends[0][0]
            while self._ends and self._ends[0][0] == self._now:
                self._end(*heappop(self._ends)[1:])

    def _has_room(self) -> bool:
        return self._under_way[0] < self.most

    def _next(self, rank: int) -> InstancePass | None:
        """What an idle rank chooses."""
        if self._adjoints[rank]:
            return InstancePass(False, heappop(self._adjoints[rank]))
        if self._inputs[rank] and self._under_way[rank] < self.limits[rank]:
            return InstancePass(True, self._inputs[rank].popleft())
        return None

    def _begin(self, rank: int, op: InstancePass) -> None:
        self._idle[rank] = False
        self._under_way[rank] += op.forward
        ticks = FORWARD if op.forward else BACKWARD
        heappush(self._ends, (self._now + ticks * self._lengths[op.item][rank], rank, op))

    def _end(self, rank: int, op: InstancePass) -> None:
        self._idle[rank] = True
        last = len(self._lengths[op.item]) - 1
        if op.forward and rank < last:
            self._inputs[rank + 1].append(op.item)
        elif op.forward:
            heappush(self._adjoints[rank], op.item)
        else:
            self._under_way[rank] -= 1
            if rank:
                heappush(self._adjoints[rank - 1], op.item)
            else:
                del self._lengths[op.item]
