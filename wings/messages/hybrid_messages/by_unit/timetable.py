"""A static table of forward and backward slots, each of which takes one unit at a time."""

from dataclasses import dataclass
from typing import NamedTuple

from hybrid.solvers.engine.schedule import Kind


class UnitPass(NamedTuple):
    """One entry of the table; sorted, entries are in the order in which they are taken."""

    time: int
    kind: Kind
    unit: int
    item: int
    """Which micro-batch."""


MOST_SLOTS = 2
"""Backward slots that one forward slot can feed: a backward pass takes two ticks."""


@dataclass(frozen=True)
class Timetable:
    r"""When which slot takes which unit of which micro-batch ("item"), in M-ths of a tick.

    A forward pass takes a tick, its M units one M-th each; a backward pass takes two. With one
    forward slot and two backward slots, M = 3 (a, b, c: the units; capitals: backward):

        tick              0  1  2  3  4
        forward slot      abcabcabcabcabc
        backward slot 0      CCBBAACCBBAA
        backward slot 1         CCBBAACC

    A unit's weights are read when its forward part begins, and they step when its backward part
    ends: those are the times in the table. A graph waits until a backward slot is free. At most
    `queue` graphs wait; then the forward slot waits, too. Without a backward slot one slot takes
    both passes by turns: `queue` + 1 forward passes, then backward, forward, backward, ... With a
    `lag` a step comes that number of ticks after its backward part, and is an entry of its own. The
    table has no end: how far an item is at which time follows from its number.
    """

    units: int
    """M."""
    backward_slots: int
    queue: int
    lag: int = 0

    def forward_start(self, item: int) -> int:
        """When its forward pass begins: when a slot is free and its graph will find room."""
        late = max(0, item - self.queue)
        if self.backward_slots == 0:
            return self.units * (item + 2 * late)
        if self.backward_slots == 1:
            return self.units * max(item, 2 * late - 1)
        return self.units * item

    def backward_start(self, item: int) -> int:
        if self.backward_slots == 0:
            return self.units * (3 * item + self.queue + 1)
        if self.backward_slots == 1:
            return self.units * (2 * item + 1)
        return self.units * (item + 1)

    def backward_end(self, item: int, unit: int) -> int:
        return self.backward_start(item) + 2 * (self.units - unit)

    def step_time(self, item: int, unit: int) -> int:
        """When its step of a unit is made."""
        return self.backward_end(item, unit) + self.units * self.lag

    def passes_of_tick(self, item: int) -> list[UnitPass]:
        """What begins with an item's forward pass and before the next item's, in order."""
        start, end = self.forward_start(item), self.forward_start(item + 1)
        ops = [UnitPass(start + unit, Kind.FORWARD, unit, item) for unit in range(self.units)]
        ends = {Kind.BACKWARD: self.backward_end} | (
            {Kind.STEP: self.step_time} if self.lag else {}
        )
        for each in self._unfinished(item):
            ops += [
                UnitPass(time(each, unit), kind, unit, each)
                for kind, time in ends.items()
                for unit in range(self.units)
                if start < time(each, unit) <= end
            ]
        # a forward part reads what steps at its time
        return sorted(ops, key=lambda op: (op.time, op.kind is Kind.FORWARD, *op))

    def units_left(self, items: int, item: int) -> int:
        """Units of an item whose backward pass is yet to come after `items` forward passes."""
        end = self.forward_start(items)
        return sum(self.backward_end(item, unit) > end for unit in range(self.units))

    def step_waits(self, items: int, item: int, unit: int) -> bool:
        """Whether an item's step of a unit is yet to come after `items` forward passes."""
        return self.step_time(item, unit) > self.forward_start(items)

    def under_way(self, items: int) -> list[int]:
        """`units_left` of each item whose backward pass is not complete after `items` of them."""
        return [n for each in self._unfinished(items - 1) if (n := self.units_left(items, each))]

    def delay(self, unit: int) -> int:
        """Steps of a unit by which the weights of a gradient are older than those it steps."""
        late = 2 * self.queue + 4 + self.lag  # by then the table repeats itself
        read = self.forward_start(late) + unit  # when its weights are read
        return late - sum(self.step_time(item, unit) <= read for item in range(late))

    def _unfinished(self, item: int) -> range:
        """Items up to this one whose steps may not be complete."""
        return range(max(0, item - self.queue - 3 - self.lag), item + 1)
