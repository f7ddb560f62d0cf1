"""BatchNorm over parts of a mini-batch, in a pass over all of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Parts = Sequence[Sequence[Tensor]]
"""For each replica the parts of its share, in order: row numbers (n,) of the mini-batch."""


class NoRowsError(ValueError):
    """The input of a BatchNorm has no rows of samples."""


@contextmanager
def normalized_by_parts(module: nn.Module, parts: Parts, rows: int) -> Iterator[None]:
    """Make BatchNorms in training normalize each part separately, as passes over parts would.

    Each replica's running statistics start from the module's and are moved by its parts one after
    the other. At the end the module has sum_r (n_r / N) of them, as replicas have after a step.
    NoRowsError if the rows of an input are not a whole multiple of the mini-batch's.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    passes = [_Norm(norm, parts, rows) for norm in norms]
    try:
        yield
    finally:
        for each in passes:
            each.end()


class _Norm:
    """One BatchNorm, and each replica's running statistics."""

    def __init__(self, norm: _BatchNorm, parts: Parts, rows: int) -> None:
        self.norm, self.parts, self.rows = norm, parts, rows
        self.replaced = vars(norm).get("forward")
        norm.forward = partial(self.forward, norm.forward)  # type: ignore[method-assign]
        self.statistics: list[dict[str, Any]] = [{} for _ in parts]

    def forward(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute y from the input of all rows, (N k, C, ...)."""
        if not self.norm.training:
            return forward(x)
        if len(x) != self.rows and sum(map(len, self.parts)) > 1:  # the order of rows is unknown
            raise NoRowsError(f"a BatchNorm has an input of {len(x)} rows for {self.rows} samples")
        each = torch.arange(len(x), device=x.device).view(self.rows, -1)
        before, chosen, outputs = dict(self.norm._buffers), [], []
        for buffers, groups in zip(self.statistics, self.parts, strict=True):
            if not buffers:
                buffers |= {n: b if b is None else b.clone() for n, b in before.items()}
            self.norm._buffers.update(buffers)
            for rows in groups:
                chosen.append(each[rows.to(x.device)].flatten())
                outputs.append(forward(x[chosen[-1]]))
        self.norm._buffers.update(before)
        return torch.cat(outputs)[torch.cat(chosen).argsort()]

    def end(self) -> None:
        """Restore the module's forward, and set its running statistics."""
        if self.replaced is None:
            del self.norm.forward
        else:
            self.norm.forward = self.replaced  # type: ignore[method-assign]
        if not self.statistics[0]:
            return
        sizes = [sum(map(len, groups)) / self.rows for groups in self.parts]
        for name, buffer in self.norm._buffers.items():
            if buffer is None:
                continue
            buffer.data.copy_(self.statistics[0][name])
            if buffer.is_floating_point() and len(sizes) > 1:
                terms = [s * b[name] for s, b in zip(sizes, self.statistics, strict=True)]
                buffer.data.copy_(torch.stack(terms).sum(0))
