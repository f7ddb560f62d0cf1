"""A sum over threads of one process, in place of the collective of a library."""

from __future__ import annotations

import threading

from torch import Tensor


class SharedSum:
    """The sum of one vector of each of R threads, made once, by pairs as in a tree."""

    def __init__(self, replicas: int) -> None:
        self._vectors: list[Tensor | None] = [None] * replicas
        self._begun = [0.0] * replicas
        self._lock = threading.Lock()
        self._missing = self.readers = replicas
        self.complete = threading.Event()
        """Set once all vectors are there."""
        self._total: Tensor | None = None

    def put(self, replica: int, vector: Tensor, now: float) -> None:
        """Give a thread's vector, at a time by its clock."""
        self._vectors[replica], self._begun[replica] = vector, now
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self.complete.set()

    def total(self) -> tuple[Tensor, float]:
        """The sum, and the time by the clocks when the last vector was given."""
        with self._lock:
            if self._total is None:
                self._total = sum_of_pairs([v for v in self._vectors if v is not None])
                self._vectors.clear()
        return self._total, max(self._begun)


def sum_of_pairs(vectors: list[Tensor]) -> Tensor:
    """((x_0 + x_1) + (x_2 + x_3)) + ..."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        left_over = vectors[len(vectors) // 2 * 2 :]
        vectors = [a + b for a, b in pairs] + left_over
    return vectors[0]
