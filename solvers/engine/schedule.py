"""Schedules: what a block does, in order, as lists of actions that print themselves as a table."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from hybrid.solvers.local_work.budget import LocalBudget


class Kind(IntEnum):
    """What an action does."""

    BACKWARD = 0
    FORWARD = 1
    LOCAL = 2
    """Local work, in a tick in which the rank would wait."""
    STEP = 3


class Action(NamedTuple):
    """One entry of a schedule."""

    kind: Kind
    micro_batch: int
    """Its number, counted since the pipeline was empty."""
    start: int = 0
    """Of local work: its first sample among those of the tick."""
    samples: int = 0
    """Of local work: how many samples it takes."""

    def __str__(self) -> str:
        return f"{self.kind.name[0]}{self.micro_batch}"


class Span(NamedTuple):
    """Consecutive micro-batches that begin their forward pass, counted since the start."""

    first: int
    stop: int
    ends: frozenset[int]
    """The last micro-batch of each mini-batch that is in the span or still under way."""
    drains: bool = False
    """Whether the pipeline is emptied afterwards."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "Span":
        """Mini-batches with these numbers of micro-batches; empty before and after."""
        ends = [*accumulate(sizes)]
        return cls(0, ends[-1], frozenset(end - 1 for end in ends), drains=True)


def flushed(index: int, count: int, span: Span) -> list[Action]:
    """One forward, one backward (Narayanan et al., arXiv 2006.09503), flushed by every step.

    Block `index` of `count` takes its first forward passes, then backward and forward passes in
    turns, each as soon as it can. With K = 3 and m = 4, a star for the step:

        block 0   F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3*
        block 1       F0  F1  .   B0  F2  B1  F3  B2  .   B3*
        block 2           F0  B0  F1  B1  F2  B2  F3  B3*
    """
    actions, first = list[Action](), span.first
    for stop in sorted(end + 1 for end in span.ends):
        warm_up = min(stop - first, count - 1 - index)
        actions += [Action(Kind.FORWARD, n) for n in range(first, first + warm_up)]
        for n in range(first, stop):
            if n + warm_up < stop:
                actions.append(Action(Kind.FORWARD, n + warm_up))
            actions.append(Action(Kind.BACKWARD, n))
        actions.append(Action(Kind.STEP, stop - 1))
        first = stop
    return actions


def never_flushed(delay: int, span: Span, budget: LocalBudget | None = None) -> list[Action]:
    """One forward and one backward pass a tick, the latter of the micro-batch `delay` ticks older.

    Where a block would wait in a tick it does local work, before or after its backward pass: L1 is
    a part of the step that B1 is a part of. Delays 2, 1, 0 and two mini-batches of two; the first
    block has local work where it waits for an adjoint, the last where it waits for an activation:

        block 0   F0  F1  F2  L0  .   B0  F3  L1  B1* L2  .   B2  L3  .   B3*
        block 1       F0  F1  .   B0  F2  .   B1* F3  .   B2  .   .   B3*
        block 2           F0  B0  L0  F1  B1  L1* F2  B2  L2  F3  B3  L3*
    """
    adjoint, activation = budget or LocalBudget()
    actions = list[Action]()
    for n in range(span.first, span.stop + delay * span.drains):
        if n < span.stop:
            actions.append(Action(Kind.FORWARD, n))
        if (due := n - delay) < 0:
            continue
        if adjoint:
            actions.append(Action(Kind.LOCAL, due, 0, adjoint))
        actions.append(Action(Kind.BACKWARD, due))
        if activation:
            actions.append(Action(Kind.LOCAL, due, adjoint, activation))
        if due in span.ends:
            actions.append(Action(Kind.STEP, due))
    return actions


def table(schedules: Sequence[Sequence[Action]]) -> str:
    """All blocks' schedules as they are drawn above: a slot for each pass, a star for a step.

    A forward pass waits for that of the previous block, a backward pass for that of the next block
    and for its forward pass. Raises ValueError with the table if no block can go on, where a `?`
    marks what each block waits for, or if neighbors pass micro-batches in different orders.
    """
    ends: dict[tuple[Kind, int, int], int] = {}
    rows: list[dict[int, str]] = [{} for _ in schedules]
    places, last = [0] * len(schedules), len(schedules) - 1
    while any(place < len(each) for place, each in zip(places, schedules, strict=True)):
        before = [*places]
        for k, schedule in enumerate(schedules):
            for action in schedule[places[k] :]:
                kind, n = action.kind, action.micro_batch
                needs = []
                if kind is Kind.FORWARD and k > 0:
                    needs = [(Kind.FORWARD, k - 1, n)]
                elif kind is Kind.BACKWARD:
                    needs = [(Kind.FORWARD, k, n), (Kind.BACKWARD, k + 1, n)]
                if not all(need in ends for need in needs if need[1] <= last):
                    break
                newest = max(rows[k], default=-1)
                if kind is Kind.STEP:
                    rows[k][newest] = rows[k].get(newest, "") + "*"
                else:
                    start = max([newest + 1, *(ends.get(need, 0) for need in needs)])
                    rows[k][start] = str(action)
                    ends[kind, k, n] = start + 1
                places[k] += 1
        if places == before:
            for k, schedule in enumerate(schedules):
                waiting = schedule[places[k] :][:1]
                rows[k] |= {max(rows[k], default=-1) + 1: f"{action}?" for action in waiting}
            raise ValueError("the schedules stand still, no block can go on:\n" + _lines(rows))
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        orders = [[a.micro_batch for a in each if a.kind is kind] for each in schedules]
        for k in range(last):
            if orders[k] != orders[k + 1]:
                raise ValueError(
                    f"blocks {k} and {k + 1} take their {kind.name.lower()} passes in different "
                    "orders, and messages arrive in the order in which they leave:\n" + _lines(rows)
                )
    return _lines(rows)


def _lines(rows: Sequence[Mapping[int, str]]) -> str:
    """A line for each block; a dot stands for an idle slot."""
    width = 1 + max((len(text) for row in rows for text in row.values()), default=0)
    return "\n".join(
        f"block {k}   "
        + "".join(
            row.get(slot, "." if slot > min(row) else "").ljust(width)
            for slot in range(max(row, default=-1) + 1)
        ).rstrip()
        for k, row in enumerate(rows)
    )
