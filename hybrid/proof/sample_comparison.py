"""Whether all ranks read the same samples."""

from collections.abc import Sequence
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

TOLERANCE = 1e-2
"""The largest difference of two float tensors over their norm: processors round differently."""
READINGS = 4
"""How often a sample that differs is read again: a random one is not compared."""
Prints = dict[str, list[Any]]
"""What ranks tell each other of samples: for inputs and for targets, an entry for each tensor."""


class SampleComparison:
    """Compares the ranks' samples at the start and once an epoch; ValueError on all ranks.

    The first block reads inputs and the last one targets, which have to belong together. The number
    and the order of samples are compared exactly, and the numbers of a few samples up to rounding.
    """

    def __init__(self, links: RankLinks, sets: Sequence[Data]) -> None:
        self.links = links
        self.varied: set[str] = set()
        """"inputs" or "targets", where a sample differs from one reading to the next."""
        for data in () if links.in_one_process else sets:
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
        """Compare one sample: a copy of the data may have changed since the run began."""
        if not self.links.in_one_process:
            self._compare(data, epoch)

    def _compare(self, data: Data, one: int | None = None) -> None:
        # later a block in the middle reads nothing
        reads = one is None or self.links.rank in (0, self.links.size - 1)
        prints = _prints(data.some(one)) if reads else {}
        first = self.links.broadcast(prints)
        compared = (first.keys() & prints.keys()) - self.varied
        unlike = sorted(n for n in compared if not _same_samples(prints[n], first[n]))
        if not any(self.links.all_gather_grid(unlike)):
            return
        again = [_prints(data.some(one)) for _ in range(READINGS * reads)]
        varied = {
            n for n in prints for each in again if not _same_samples(prints[n], each.get(n, []))
        }
        self.varied |= varied.union(*self.links.all_gather_grid(varied))
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


def _prints(items: Sequence[Any]) -> Prints:
    prints: Prints = {}
    for item in items:
        inputs, targets = item, None
        if isinstance(item, dict):
            inputs = {key: x for key, x in item.items() if key not in TARGETS}
            targets = [item[key] for key in TARGETS if key in item]
        elif isinstance(item, tuple | list) and len(item) > 1:
            *inputs, targets = item
        for name, part in (("inputs", inputs), ("targets", targets)):
            prints.setdefault(name, []).extend(map(_print, tree_leaves(part)))
    return prints


def _print(x: Any) -> Any:
    """Type, shape and a sketch of real numbers, a hash of others, and nothing of objects."""
    if isinstance(x, np.ndarray | np.generic) and x.dtype != object:
        x = torch.as_tensor(x) if x.dtype.kind in "fiub" else str(x)
    if isinstance(x, float):
        x = torch.tensor(x, dtype=torch.float64)
    if isinstance(x, Tensor) and x.is_floating_point():
        return [f"{x.dtype} {tuple(x.shape)}", sketch("sample", x.double()).tolist()]
    return digest(x) if isinstance(x, Tensor | str | bytes | int | None) else ""


def _same_samples(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_same_tensor, one, other))


def _same_tensor(x: Any, y: Any) -> bool:
    if isinstance(x, str) or isinstance(y, str) or x[0] != y[0]:
        return bool(x == y)
    a, b = torch.tensor(x[1]), torch.tensor(y[1])
    if not (a.isfinite().all() and b.isfinite().all()):
        return bool((a.isfinite() == b.isfinite()).all())
    return distance(a, b) <= TOLERANCE * float(max(a[0], b[0]))
