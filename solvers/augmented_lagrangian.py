"""Augmented Lagrangian: penalty and multipliers at every cut (Sun et al., arXiv 2009.01462)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from solvers.base import Rows
from solvers.penalty import Penalty


@dataclass
class AugmentedLagrangian(Penalty):
    r"""min_w phi(x_{K-1}, y)   s.t.   lam_k = x_{k-1},   k = 1..K-1.

    Local loss of block k < K-1, per sample:
        beta ||S lam_{k+1} - S x_k||^2 + <kappa_{k+1}, S lam_{k+1} - S x_k>
    so that  p_out = S^T (-2 beta (S lam_{k+1} - S x_k) - kappa_{k+1}).  Between sweeps
        lam_k   <- lam_k - eta (p_in + S^T (2 beta (S lam_k - S x_{k-1}) + kappa_k))
        kappa_k <- kappa_k + kappa_step 2 beta (S lam_k - S x_{k-1})
    with the new lam_k in the second line; everything else is as in `Penalty`.

    kappa starts at zero (the classical choice) or at minus the recorded adjoint: kappa_k = -p_k
    makes the first sub-problem gradient of every block the exact one. Under a filter it is
    -filter^2 S p_k, for which S^T kappa_k is p_k's mean over each square, negated.
    """

    name: ClassVar[str] = "augmented-lagrangian"

    multiplier_start: Literal["zero", "adjoint"] = "adjoint"
    """Where the multipliers start: zero, or minus the adjoint of the last exact pass."""
    kappa_step: float = 1.0
    """Step of the multipliers between sweeps, in units of 2 beta."""
    lam_start: Literal["feasible", "stepped"] = "feasible"
    """Where lam starts: the recorded activations, or one lam step from them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kappa_step < 0:
            raise ValueError(f"kappa_step is {self.kappa_step}; it must be 0 or positive")

    def buffers(self, exchanges: bool) -> tuple[list[str], list[str]]:
        before, after = super().buffers(exchanges)
        return before + (["kappa_in"] if exchanges else []), [*after, "kappa_out"]

    def _record(
        self,
        rows: slice,
        lam: Tensor | None,
        p_in: Tensor | None,
        out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        super()._record(rows, lam, p_in, out, p_out)
        if lam is not None and self._exchange:
            self._store.put("kappa_in", rows, self._start_multiplier(lam, p_in))
        if out is not None:
            self._store.put("kappa_out", rows, self._start_multiplier(out, p_out))

    def _start_multiplier(self, x: Tensor, p: Tensor | None) -> Tensor:
        if p is None or self.multiplier_start == "zero":
            return torch.zeros_like(self._pool(x))
        return -(self.filter**2) * self._pool(p)

    def _multiplier(self, name: str, rows: Rows) -> Tensor | None:
        return self._store.raw(name, rows)

    @property
    def _ascent(self) -> float:
        return self.kappa_step
