"""What joins the parts of a run: each part has a port to the one before it and to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hybrid.links import RankLinks


class Port(NamedTuple):
    """One side of a part: what is sent first arrives first."""

    send: Callable[[Tensor], None]
    receive: Callable[[], Tensor]


def parts_of(rank: int, ranks: int, parts: int) -> range:
    """The parts that a rank has: one each, and the last rank has all that are left."""
    return range(rank, rank + 1 if rank < ranks - 1 else parts)


def ports(links: RankLinks, parts: int) -> dict[int, tuple[Port, Port]]:
    """The left and the right port of every part of this rank: queues within it, links outside.

    The outer ports of the whole chain are never used.
    """
    own = parts_of(links.rank, links.size, parts)
    left, right = [Port(links.to_previous, links.from_previous)], list[Port]()
    for _ in own[:-1]:
        to_right, to_left = deque[Tensor](), deque[Tensor]()
        right.append(Port(to_right.append, to_left.popleft))
        left.append(Port(to_left.append, to_right.popleft))
    right.append(Port(links.to_next, links.from_next))
    return dict(zip(own, zip(left, right, strict=True), strict=True))
