"""Samples with numbers that are not finite, after which a loss is not finite either."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

MEANT = 0.5
"""Of the samples: where more have them, infinities are meant, as in masks, and missing targets."""


class SpoiltSamples:
    """The first sample with nan or inf, of those that one rank reads."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], int] = {}
        self._counts = Counter[tuple[str, str]]()
        self._samples = Counter[str]()

    def look(self, what: str, x: Tensor, ids: Tensor) -> None:
        """Look at "input" or "target" x (N, ...) of the samples with these numbers (N,)."""
        self._samples[what] += len(x)
        for kind, spoilt in (("nan", x.isnan()), ("inf", x.isinf())):
            rows = spoilt.reshape(len(x), -1).any(1).nonzero().flatten().cpu()
            if len(rows):
                self._first.setdefault((what, kind), int(ids[rows[0]]))
                self._counts[what, kind] += len(rows)

    def fault(self) -> str | None:
        """Which sample has what, with the remedy; None where there is none, or it may be meant."""
        certainly = ("input", "nan")
        for what, kind in sorted(self._first, key=certainly.__ne__):
            sample, certain = self._first[what, kind], (what, kind) == certainly
            if certain or self._counts[what, kind] <= MEANT * self._samples[what]:
                remedy = "correct it, or leave it out"
                other = (
                    ""
                    if certain
                    else "; if the network or its loss takes that, lower the learning rate"
                )
                return f"the {what} of sample {sample} has {kind} in it: {remedy}{other}"
        return None
