"""Stochastic block-ADMM, with constraints at the cuts (Khorram et al., arXiv 2105.00339)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from solvers.augmented_lagrangian import AugmentedLagrangian
from solvers.base import Batch, Block, Links, PhaseStats, Rows, Window
from solvers.kernels import Held, Stepped, couple, descend, settle, upsample
from solvers.layers.factorisation import Factorisation
from solvers.layers.projection import Free, leading, passing_by, projection
from solvers.variables.factors import FactorCut


@dataclass
class BlockADMM(AugmentedLagrangian):
    r"""min_{w, Z} phi(f_{K-1}(Z_{K-1}), y)   s.t.   Z_k = f_{k-1}(Z_{k-1}),   Z_k in C_k.

    With scaled duals U_k, for one sample (Z_k is `lam`, and `kappa` = rho U_k is what is stored):

        L = phi(x_{K-1}, y) + sum_k rho_k/2 ||Z_k - x_{k-1} + U_k||^2 - rho_k/2 ||U_k||^2
        w_k:  theta_steps optimiser steps on rho_{k+1}/2 ||Z_{k+1} - x_k + U_{k+1}||^2  (last: phi)
        Z_k:  z_steps times  Z_k <- Z_k - lam_step/rho_k (p_in + rho_k (Z_k - x_{k-1} + U_k)),
              then Z_k <- P_k(Z_k), the projection onto C_k
        U_k <- U_k + kappa_step (Z_k - x_{k-1})

    jacobi        every w_k and Z_k steps from the same old values, all blocks at once; with one
                  step each it is the augmented Lagrangian with beta = rho/2
    gauss-seidel  w_0, Z_1, U_1, w_1, Z_2, ... with the newest values (classical ADMM); block k
                  works k mini-batches behind the first, so the blocks are at work all the same

    Batch setting: window "all" without corrections keeps Z and U of every sample. Online: a shorter
    window starts from one forward pass and U = 0 (after a correction U = -p/rho); nothing is kept.

    Residual balancing multiplies rho_k by 2 after a window where the primal residual's norm is more
    than `balance_ratio` times the dual's, and halves it in the opposite case (Boyd et al., 2011,
    section 3.4.1); kappa stays, so U is rescaled with it. A dual that outgrows `dual_limit` times
    its start and its Z is reset to zero, with a notice.
    """

    name: ClassVar[str] = "block-admm"

    beta: float = field(init=False, repr=False, default=0.0)
    rho: float = 1e-3
    """Penalty coefficient; 2 beta of the augmented Lagrangian."""
    order: Literal["jacobi", "gauss-seidel"] = "jacobi"
    """All blocks from the same old values, or one after the other with the newest."""
    theta_steps: int = 1
    """Optimiser steps of the weights a visit of a mini-batch."""
    z_steps: int = 1
    """Gradient steps of Z a visit."""
    optimiser: Literal["shared", "sgd", "adam"] = "shared"
    """Of the weights' steps: the exact pass's, or one of the solver's own."""
    constraint: str = "none"
    """What Z is held to: none, non-negative, box:LOW:HIGH, quantised:BITS:LOW:HIGH or sign."""
    factor_rho: float = 1e-3
    """Penalty coefficient of Z = M S at a cut with a factorisation."""
    balance_ratio: float = 0.0
    """Ratio of primal to dual residual, either way, at which rho changes; 0: rho is fixed."""
    dual_limit: float = 10.0
    """Growth of a dual variable at which it is reset; 0: never."""

    def __post_init__(self) -> None:
        for name in ("rho", "factor_rho"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        self.beta = self.rho / 2
        super().__post_init__()
        for name in ("theta_steps", "z_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("balance_ratio", "dual_limit"):
            if getattr(self, name) != 0 and not getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be over 1, or 0 (off)")
        if self.optimiser != "sgd" and self.momentum is not None:
            raise ValueError(
                f"momentum is {self.momentum} but the optimiser is {self.optimiser!r}: momentum "
                "is of the solver's own SGD, so set optimiser=sgd"
            )
        projection(self.constraint)

    def prepare(self, block: Block, window_samples: int, exchanges: bool) -> None:
        if self.optimiser == "sgd" and self.momentum is None:
            self.momentum = 0.0
        super().prepare(block, window_samples, exchanges)
        if self.optimiser == "adam":
            block.optimisers["local"] = torch.optim.AdamW(block.parameter_groups(), lr=0.0)
        self._layer = None if block.first else leading(block.module)
        everywhere = projection(self.constraint)
        self._constraint_in = Free() if block.first else self._layer or everywhere
        self._constraint_out = Free() if block.last else block.cut_after or everywhere
        self._factors: FactorCut | None = None
        if isinstance(self._layer, Factorisation):
            self._constraint_in = Free()
            self._factors = FactorCut(self._layer, self._store)
        if isinstance(block.cut_after, Factorisation):
            self._constraint_out = Free()
        self._rho_in = self._rho_out = self.rho
        self._start_norm: float | None = None

    def _record(
        self,
        rows: slice,
        lam: Tensor | None,
        p_in: Tensor | None,
        out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        super()._record(rows, lam, p_in, out, p_out)
        if lam is not None:
            self._start_norm = None
            if self._factors is not None:
                self._factors.record(rows, self._own(rows))

    def train(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """Sweep the window, then balance rho and watch the duals, if they moved."""
        if self._start_norm is None:
            self._start_norm = self._dual_norm(block)
        stats = super().train(block, links, window)
        if window.kept or window.sweeps > 1:
            self._adapt(block, links, stats)
        return stats

    def gradient(
        self, block: Block, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats
    ) -> tuple[Tensor, Tensor | None]:
        if self._factors is not None:
            self._factors.update_factors(rows, self._own(rows))
        with passing_by(self._layer):
            return super().gradient(block, batch, rows, with_input, stats)

    def _visit(
        self,
        block: Block,
        links: Links,
        batch: Batch,
        rows: Rows,
        exchange: bool,
        stats: PhaseStats,
    ) -> None:
        visit = self._jacobi if self.order == "jacobi" else self._gauss_seidel
        visit(block, links, batch, rows, exchange, stats)

    def _jacobi(
        self,
        block: Block,
        links: Links,
        batch: Batch,
        rows: Rows,
        exchange: bool,
        stats: PhaseStats,
    ) -> None:
        x, p_in = self.gradient(block, batch, rows, exchange, stats)
        if exchange and not block.last:
            self._hand_up(links, rows, x)
        z = None
        if exchange and not block.first:
            z = self._z_update(block, links, batch, rows, p_in)
        self._weight_steps(block, batch, rows)
        if z is not None:
            self._settle(links, rows, z, stats)

    def _gauss_seidel(
        self,
        block: Block,
        links: Links,
        batch: Batch,
        rows: Rows,
        exchange: bool,
        stats: PhaseStats,
    ) -> None:
        if exchange and not block.first:
            self._settle(links, rows, self._z_update(block, links, batch, rows, None), stats)
        self.gradient(block, batch, rows, False, stats)
        self._weight_steps(block, batch, rows)
        if exchange and not block.last:
            with torch.no_grad(), passing_by(self._layer):
                lam = batch.images() if block.first else self._input(rows)
                self._hand_up(links, rows, block.forward(lam))

    def _weight_steps(self, block: Block, batch: Batch, rows: Rows) -> None:
        """The gradient at hand is the first step's."""
        for number in range(self.theta_steps):
            if number:
                self.gradient(block, batch, rows, False, PhaseStats())
            self._step(block, batch)

    def _z_update(
        self, block: Block, links: Links, batch: Batch, rows: Rows, p_in: Tensor | None
    ) -> Stepped:
        """Z_k and kappa_k after a visit; `p_in` is the adjoint at the old Z_k, if it is known."""
        old, x = self._raw_own(rows), links.from_previous()
        kappa = self._multiplier("kappa_in", rows)
        if self._factors is not None:
            new = self._factored_step(block, batch, rows, x.to(self._own(rows).dtype), p_in)
        elif self.z_steps == 1:
            if p_in is None:
                p_in = self._input_adjoint(block, batch, rows, self._own(rows))
            return self._stepped(rows, old, x, p_in)
        else:
            new = self._own(rows)
            for number in range(self.z_steps):
                if number or p_in is None:
                    p_in = self._input_adjoint(block, batch, rows, new)
                new = descend(new, x, kappa, p_in, self._beta_in, self._eta_in, self.filter)
            new = self._held_in(new)
        rate = self._ascent * 2 * self._beta_in
        return settle(new, old, x, kappa, self._beta_in, rate, self.filter)

    def _factored_step(
        self, block: Block, batch: Batch, rows: Rows, x: Tensor, p_in: Tensor | None
    ) -> Tensor:
        assert self._factors is not None
        if p_in is None:
            p_in = self._input_adjoint(block, batch, rows, self._input(rows))
        kappa = self._store.get("kappa_in", rows)
        anchor = x - kappa / self._rho_in
        return self._factors.step(rows, anchor, p_in, self._rho_in, self.factor_rho)

    def _input(self, rows: Rows) -> Tensor:
        return self._own(rows) if self._factors is None else self._factors.input(rows)

    def _input_adjoint(self, block: Block, batch: Batch, rows: Rows, z: Tensor) -> Tensor:
        """p_in at Z_k = z; the weights' gradients stay as they are."""
        z = z.detach().requires_grad_()
        with passing_by(self._layer):
            x = block.forward(z)
        scale = block.loss_scale
        if block.last:
            (p,) = torch.autograd.grad(block.loss(x, batch.labels()) * scale, z)
            return p.to(z.dtype) * (len(batch) / scale)
        target, kappa = self._store.raw("target", rows), self._multiplier("kappa_out", rows)
        coupling = couple(x.detach(), target, kappa, self._beta_out, self.filter, 1 / scale)
        (p,) = torch.autograd.grad(x, z, coupling.p_out)
        return p.to(z.dtype) / scale

    def _adapt(self, block: Block, links: Links, stats: PhaseStats) -> None:
        """Change rho, reset duals: decided alike on both sides of a cut."""
        mine = None
        if not block.first:
            size = max(self._start_norm or 0.0, self._store.norm("lam"))
            mine = (stats.residual_norms(), self._dual_norm(block), size)
        everyone = links.all_gather(mine)
        for k, measured in enumerate(everyone):
            if measured is None:
                continue
            norms, norm, size = measured
            here, below = k == block.index, k == block.index + 1
            if self.dual_limit and not norm <= self.dual_limit * size:
                stats.notices.append(
                    f"block-admm: the dual at cut {k} has grown to {norm:.3g}, its Z is "
                    f"{size:.3g} (limit: {self.dual_limit:g} times); it starts again from zero"
                )
                if here or below:
                    self._store.clear("kappa_in" if here else "kappa_out")
            factor = self._rho_factor(*norms) if norms is not None else 1.0
            self._rho_in *= factor if here else 1.0
            self._rho_out *= factor if below else 1.0

    def _rho_factor(self, primal: float, dual: float) -> float:
        if not self.balance_ratio:
            return 1.0
        if primal > self.balance_ratio * dual:
            return 2.0
        return 0.5 if dual > self.balance_ratio * primal else 1.0

    def _dual_norm(self, block: Block) -> float:
        """||U_k|| over the window."""
        known = not block.first and self._exchange
        return self._store.norm("kappa_in") / self._rho_in if known else 0.0

    def cut_state(self) -> dict[str, Tensor]:
        kept = super().cut_state()
        if self.balance_ratio:
            kept["rho"] = torch.tensor(self._rho_in, dtype=torch.float64)
        if self._kept and self._start_norm is not None:
            kept["start"] = torch.tensor(self._start_norm, dtype=torch.float64)
        if self._factors is None:
            return kept
        names = ["codes", "factor_dual"] if self._kept else []
        return {**kept, **self._store.state(names), **self._factors.state()}

    def load_cut_state(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        if self._factors is not None and "factors.cross" in before:
            self._factors.load_state(before["factors.cross"], before["factors.gram"])
        self._rho_in = float(before.get("rho", self._rho_in))
        self._rho_out = float(after.get("rho", self._rho_out))
        if "start" in before:
            self._start_norm = float(before["start"])
        sampled = ("lam", "kappa_in", "codes", "factor_dual")
        before = {k: v for k, v in before.items() if k in sampled}
        super().load_cut_state(before, after)

    @property
    def _beta_in(self) -> float:
        return self._rho_in / 2

    @property
    def _beta_out(self) -> float:
        return self._rho_out / 2

    @property
    def _held(self) -> Held | None:
        return self._constraint_in

    def _held_in(self, lam: Tensor) -> Tensor:
        return self._constraint_in.project(self._fed(lam))

    def _held_out(self, lam: Tensor) -> Tensor:
        return self._constraint_out.project(self._fed(lam))

    def _fed(self, lam: Tensor) -> Tensor:
        """What a block sees of lam: in the filter mode "input" the upsampling of S lam."""
        return lam if self.filter_mode == "coupling" else upsample(self._pool(lam), self.filter)
