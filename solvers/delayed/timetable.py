"""A static table of forward and backward slots, a unit of a block at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_SLOTS = 2
"""Backward slots that one forward slot can feed: a backward pass takes two ticks."""


class UnitPass(NamedTuple):
    """A unit's part of a pass; as tuples they sort into the order of the table."""

    time: int
    """When a forward pass reads the unit's weights, or a backward pass has stepped them."""
    forward: bool
    """At the same time steps come first, and are seen."""
    unit: int
    item: int


@dataclass(frozen=True)
class Timetable:
    r"""When which slot takes which unit of which micro-batch ("item"), in M-ths of a tick.

    A forward pass takes a tick, its M units one M-th each; a backward pass takes two. With one
    forward slot and two backward slots, M = 3 (a, b, c: the units; capitals: backward):

        tick              0     1     2     3     4
        forward slot      abc   abc   abc   abc   abc
        backward slot 0         CCBBAA      CCBBAA
        backward slot 1               CCBBAA      CCBBAA

    A unit's weights are read when its forward part begins, and step when its backward part ends. A
    graph that finds no slot waits, at most `queue` of them; then the forward slot waits. With no
    backward slot one slot takes both by turns: `queue` + 1 forward passes, then backward, forward,
    backward, ... The table has no end; how far items have come follows from their number alone.
    """

    units: int
    """M."""
    backward_slots: int
    queue: int

    def begins(self, item: int) -> int:
        """The time of its forward pass: when a slot is free and its graph will find room."""
        late = max(0, item - self.queue)
        if self.backward_slots == 0:
            return self.units * (item + 2 * late)
        if self.backward_slots == 1:
            return self.units * max(item, 2 * late - 1)
        return self.units * item

    def turns(self, item: int) -> int:
        """The time of its backward pass."""
        if self.backward_slots == 0:
            return self.units * (3 * item + self.queue + 1)
        if self.backward_slots == 1:
            return self.units * (2 * item + 1)
        return self.units * (item + 1)

    def reads(self, item: int, unit: int) -> int:
        """When its forward pass reads the weights of a unit."""
        return self.begins(item) + unit

    def lands(self, item: int, unit: int) -> int:
        """When its step of a unit is done."""
        return self.turns(item) + 2 * (self.units - unit)

    def tick(self, item: int) -> list[UnitPass]:
        """From the forward pass of an item to that of the next, in order."""
        start, end = self.begins(item), self.begins(item + 1)
        ops = [UnitPass(start + unit, True, unit, item) for unit in range(self.units)]
        for each in self._open(item):
            ops += [op for op in self._backward(each) if start < op.time <= end]
        return sorted(ops)

    def left(self, items: int, item: int) -> int:
        """Units of an item that have yet to step, when so many items have gone up."""
        end = self.begins(items)
        return sum(self.lands(item, unit) > end for unit in range(self.units))

    def under_way(self, items: int) -> list[int]:
        """Of so many items, units left of each that has yet to come home."""
        return [n for each in self._open(items - 1) if (n := self.left(items, each))]

    def delay(self, unit: int) -> int:
        """Steps of a unit by which the weights of a gradient are older than those it steps."""
        late = 2 * self.queue + 4  # by then the table repeats itself
        read = self.reads(late, unit)
        return late - sum(self.lands(item, unit) <= read for item in range(late))

    def _open(self, item: int) -> range:
        """Items up to this one that may have steps to come."""
        return range(max(0, item - self.queue - 3), item + 1)

    def _backward(self, item: int) -> list[UnitPass]:
        return [UnitPass(self.lands(item, unit), False, unit, item) for unit in range(self.units)]
