"""Whether all ranks read the same samples."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.data import Data
from hybrid.links import RankLinks


def check_alike(links: RankLinks, sets: Sequence[Data]) -> None:
    """ValueError on all ranks where the data give one of them other samples than the first."""
    if links.in_one_process:
        return
    found: list[dict[str, str]] = []
    with links.agreement():
        found = [data.fingerprint() for data in sets]
    _compare(links, found)


def check_next(links: RankLinks, data: Data, seed: int, epoch: int, number: int) -> None:
    """The same of one sample: a copy of the data may be stale in parts, or have changed since."""
    if links.in_one_process:
        return
    found: dict[str, str] = {}
    with links.agreement():
        if links.rank in (0, links.size - 1):
            found = data.fingerprint_of(seed, epoch, number)
    _compare(links, [found])


def _compare(links: RankLinks, found: list[dict[str, str]]) -> None:
    first = links.broadcast(found)
    with links.agreement():
        for own, theirs in zip(found, first, strict=True):
            for name in theirs:
                if name in own and own[name] != theirs[name]:
                    counts = own[name].isdecimal() and theirs[name].isdecimal()
                    said = f", {own[name]} and {theirs[name]}" if counts else ""
                    raise ValueError(
                        f"the data give rank {links.place.number} other samples than the first "
                        f"rank (by their {name}{said}), and all have to read the same: seed what "
                        "shuffles or draws, put the same files on every host in one order, and "
                        "leave it to replicas to take their shares"
                    )
