"""Augmented Lagrangian: penalty and multipliers at every cut (Sun et al., arXiv 2009.01462)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from hybrid.solvers.acting import Acts, NotNegative
from hybrid.solvers.base import Setup, program_of
from hybrid.solvers.kernels.operations import Stepped, step_limit
from hybrid.solvers.splitting.penalty import Penalty, PenaltyProgram
from hybrid.solvers.splitting.variables import CORRECTED
from hybrid.solvers.windows import Rows

MOVES = Acts(
    "multipliers move (several sweeps, or window 'all')", lambda run: run.solver.moves(run.setup)
)


@dataclass(frozen=True)
class AugmentedLagrangian(Penalty):
    r"""min_w phi(x_{K-1}, y)   s.t.   lam_k = x_{k-1},   k = 1..K-1.

    Local loss of block k < K-1, per sample:
        beta ||S lam_{k+1} - S x_k||^2 + <kappa_{k+1}, S lam_{k+1} - S x_k>
    so that  p_out = S^T (-2 beta (S lam_{k+1} - S x_k) - kappa_{k+1}).  Between sweeps
        lam_k   <- lam_k - lam_step/(2 beta) (p_in + S^T (2 beta (S lam_k - S x_{k-1}) + kappa_k))
        kappa_k <- kappa_k + kappa_step lam_step 2 beta (S lam_k - S x_{k-1})
    with the new lam_k in the second line; everything else is as in `Penalty`.

    kappa's step is proportional to lam's. At full steps (and filter 1) an exchange leaves
    kappa_k = -p_in. With lam_step s < 1 and an independent step, kappa would add up residuals that
    lam has followed only by the fraction s. The distance of lam from x is
    (p_in - old p_in) / (2 beta): a large beta keeps the block's input close to the previous block's
    output, and in the limit lam_k = x_{k-1}, kappa_k = -p_in. Sweeps are then delayed gradients
    with replay, which lag one sweep for each block and are coupled by beta. This limit is the
    default: if lam leaves x, several sweeps are worth less than one.

    kappa starts at zero (the classical choice) or at minus the recorded adjoint: with
    kappa_k = -p_k the first sub-problem gradient of every block is the exact one. Under a filter it
    starts at -filter^2 S p_k, so that S^T kappa_k is minus p_k's mean over each square.
    """

    name: ClassVar[str] = "augmented-lagrangian"

    multiplier_start: Annotated[Literal["zero", "adjoint"], CORRECTED] = "adjoint"
    """Initial multipliers: zero (classical), or minus the last exact pass's adjoint."""
    kappa_step: Annotated[NotNegative, MOVES] = 1.0
    """Step size of the multipliers, in units of lam_step 2 beta."""
    lam_move: Annotated[Literal["step", "limit"], MOVES] = "limit"
    """Move lam and kappa by a step, or to the step's limit for large beta."""
    lam_start: Annotated[Literal["feasible", "stepped"], CORRECTED] = "feasible"
    """Initial lam: the recorded activations, or one step from them."""

    def steps_lam(self, setup: Setup) -> bool:
        return self.moves(setup) and self.lam_move == "step"

    def buffers(self, setup: Setup) -> tuple[list[str], list[str]]:
        before, after = super().buffers(setup)
        return before + (["kappa_in"] if self.moves(setup) else []), [*after, "kappa_out"]

    def first_multiplier(self, x: Tensor, p: Tensor | None) -> Tensor:
        if p is None or self.multiplier_start == "zero":
            return torch.zeros_like(x)
        return -(self.filter**2) * p

    @property
    def kappa_rate(self) -> float:
        return self.kappa_step * self.lam_step


@program_of(AugmentedLagrangian)
class AugmentedLagrangianProgram(PenaltyProgram):
    """`PenaltyProgram` with multipliers, which may move to the limit of their step."""

    solver: AugmentedLagrangian

    def _step_lam(self, rows: Rows, lam: Tensor, x: Tensor, p_in: Tensor) -> Stepped:
        if self.solver.lam_move == "step":
            return super()._step_lam(rows, lam, x, p_in)
        kappa, solver = self.store.raw("kappa_in", rows), self.solver
        return step_limit(lam, x, kappa, p_in, solver.beta, solver.kappa_step, solver.filter)

    def _message(self, new: Stepped) -> Tensor:
        if self.solver.lam_move == "step":
            return super()._message(new)
        assert new.kappa is not None
        return new.kappa

    def _receive(self, rows: Rows, message: Tensor) -> None:
        if self.solver.lam_move == "step":
            super()._receive(rows, message)
            return
        self.store.put("target", rows, self.store.raw("sent", rows))
        self.store.put("kappa_out", rows, message)
