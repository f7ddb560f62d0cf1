"""What joins the parts of a run: each to the next, within a rank or across links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hybrid.links import RankLinks


@dataclass(frozen=True)
class Port:
    """One side of a part: first in, first out."""

    send: Callable[[Tensor], None]
    receive: Callable[[], Tensor]


def parts_of(rank: int, ranks: int, parts: int) -> range:
    """The parts that a rank has: one, the last rank all that are left."""
    return range(rank, rank + 1 if rank < ranks - 1 else parts)


def ports(links: RankLinks, parts: int) -> dict[int, tuple[Port, Port]]:
    """The left and the right port of every part of this rank.

    The outer ones of the whole chain are never used.
    """
    own = parts_of(links.rank, links.size, parts)
    inner = {i: (deque[Tensor](), deque[Tensor]()) for i in own[:-1]}
    """Between a part and the next: what goes right, what goes left."""

    def left(part: int) -> Port:
        if part == own[0]:
            return Port(links.to_previous, links.from_previous)
        right_going, left_going = inner[part - 1]
        return Port(left_going.append, right_going.popleft)

    def right(part: int) -> Port:
        if part == own[-1]:
            return Port(links.to_next, links.from_next)
        right_going, left_going = inner[part]
        return Port(right_going.append, left_going.popleft)

    return {part: (left(part), right(part)) for part in own}
