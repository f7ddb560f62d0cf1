"""Whether all ranks read the same samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybrid.data import Data
from hybrid.data.dataset import digest
from hybrid.data.items import TARGETS
from hybrid.links import RankLinks
from hybrid.proof.undivided import distance, sketch

NEAR = 1e-2
"""The largest difference of two float tensors over their norm: processors round otherwise."""
READINGS = 4
"""Of a sample that differs: what differs from one reading to the next is not compared."""
Prints = dict[str, list[Any]]
"""What ranks tell each other of samples: of inputs, and of targets, an entry for each tensor."""


class Alike:
    """Compares what ranks read, at the start and once an epoch; ValueError on all of them.

    The first block reads inputs and the last one targets, which have to belong together. Compared
    are the number and the order of samples exactly, and a few samples' numbers but for rounding.
    """

    def __init__(self, links: RankLinks, sets: Sequence[Data]) -> None:
        self.links = links
        self.varied: set[str] = set()
        """What of samples differs whenever they are read."""
        if links.in_one_process:
            return
        for data in sets:
            exact: dict[str, Any] = {"number": len(data)}
            with links.agreement():
                exact["content"] = data.fingerprint()
                if data.order is not None:
                    exact["order"] = digest(data.order.of_epoch(0, 0))
            first = links.broadcast(exact)
            with links.agreement():
                for name in first:
                    if first[name] != exact.get(name):
                        counts = f", {exact[name]} and {first[name]}" if name == "number" else ""
                        self._refuse(name + counts)
            self._compare(data)

    def check_next(self, data: Data, epoch: int) -> None:
        """The same of one sample: a copy of the data may have changed since the run has begun."""
        if not self.links.in_one_process:
            self._compare(data, epoch)

    def _compare(self, data: Data, one: int | None = None) -> None:
        # later a block in the middle reads nothing
        reads = one is None or self.links.rank in (0, self.links.size - 1)
        own = _prints(data.some(one)) if reads else {}
        first = self.links.broadcast(own)
        names = [n for n in first if n in own and n not in self.varied]
        unlike = [name for name in names if not _are_alike(own[name], first[name])]
        if not any(self.links.everyone(unlike)):
            return
        again = [_prints(data.some(one)) for _ in range(READINGS * reads)]
        varied = {n for n in own for each in again if not _are_alike(own[n], each.get(n, []))}
        self.varied |= varied.union(*self.links.everyone(varied))
        with self.links.agreement():
            for name in unlike:
                if name not in self.varied:
                    self._refuse(name)

    def _refuse(self, name: str) -> None:
        raise ValueError(
            f"the data give rank {self.links.place.number} other samples than the first rank (by "
            f"their {name}), and all have to read the same: seed what shuffles or draws, put the "
            "same files on every host in one order, and leave it to replicas to take their shares"
        )


def _prints(items: Iterable[Any]) -> Prints:
    """What is told of samples; nothing of none."""
    found: Prints = {}
    for item in items:
        for name, part in zip(("inputs", "targets"), _halves(item), strict=True):
            found.setdefault(name, []).extend(map(_printed, tree_leaves(part)))
    return found


def _halves(item: Any) -> tuple[Any, Any]:
    """Inputs and targets of an item, as `Items` takes them apart."""
    if isinstance(item, dict):
        keys = [key for key in TARGETS if key in item]
        return {k: x for k, x in item.items() if k not in keys}, [item[k] for k in keys]
    if isinstance(item, tuple | list) and len(item) > 1:
        return item[:-1], item[-1]
    return item, None


def _printed(x: Any) -> Any:
    """Of real numbers a type, a shape and a sketch, of others a hash, and of objects nothing."""
    if isinstance(x, np.ndarray | np.generic) and x.dtype != object:
        x = torch.as_tensor(x) if x.dtype.kind in "fiub" else str(x)
    if isinstance(x, float):
        x = torch.tensor(x, dtype=torch.float64)
    if isinstance(x, Tensor) and x.is_floating_point():
        return [f"{x.dtype} {tuple(x.shape)}", sketch("sample", x.double()).tolist()]
    return digest(x) if isinstance(x, Tensor | str | bytes | int | None) else ""


def _are_alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_are_like, one, other))


def _are_like(x: Any, y: Any) -> bool:
    if isinstance(x, str) or isinstance(y, str):
        return bool(x == y)
    if x[0] != y[0]:
        return False
    a, b = torch.tensor(x[1]), torch.tensor(y[1])
    if not (a.isfinite().all() and b.isfinite().all()):
        return bool((a.isfinite() == b.isfinite()).all())
    return distance(a, b) <= NEAR * float(max(a[0], b[0]))
