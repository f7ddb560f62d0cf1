"""Stochastic block-ADMM, with constraints at the cuts (Khorram et al., arXiv 2105.00339)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from solvers.augmented_lagrangian import AugmentedLagrangian, AugmentedLagrangianProgram
from solvers.base import Setup, check_numbers, program_of
from solvers.kernels import Held, Stepped, couple, descend, settle, upsample
from solvers.layers.factorisation import Factorisation
from solvers.layers.projection import Free, leading, passing_by, projection
from solvers.state import State
from solvers.variables.factors import FactorCut
from solvers.variables.store import channels_last
from solvers.windows import Batch, PhaseStats, Record, Rows, Window


@dataclass(frozen=True)
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
    fills: ClassVar[bool] = False
    factorises: ClassVar[bool] = True

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
    """Ratio of primal to dual residual, either way, at which rho changes, usually 10; 0: fixed."""
    dual_limit: float = 10.0
    """Growth of a dual at which it starts again from zero, with a notice; 0: never."""

    def __post_init__(self) -> None:
        check_numbers(self, positive=("rho", "factor_rho"))
        object.__setattr__(self, "beta", self.rho / 2)
        super().__post_init__()
        check_numbers(self, at_least_one=("theta_steps", "z_steps"))
        for name in ("balance_ratio", "dual_limit"):
            if getattr(self, name) != 0 and not getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be over 1, or 0 (off)")
        if self.optimiser != "sgd" and self.momentum is not None:
            raise ValueError(
                f"momentum is {self.momentum} but the optimiser is {self.optimiser!r}: momentum "
                "is of the solver's own SGD, so set optimiser=sgd"
            )
        projection(self.constraint)

    def check(self, setup: Setup) -> None:
        super().check(setup)
        if not setup.exchanges:
            why = "Z and its dual stay where they start in a single sweep"
            self.refuse_inert(why, "z_steps", "order", "balance_ratio", "dual_limit")
        if not setup.factorised or not setup.exchanges:
            self.refuse_inert("no factorisation's Z moves", "factor_rho")
        if setup.factorised and self.filter > 1:
            raise ValueError(
                f"solver.filter is {self.filter}, but a factorisation has every pixel: leave it out"
            )
        if setup.factorised and len(setup.factorised) == setup.blocks - 1:
            why = "every cut has a factorisation, whose Z has a closed form"
            self.refuse_inert(why, "z_steps", "lam_step", "constraint")

    @property
    def own_momentum(self) -> bool:
        return self.optimiser != "shared"


@program_of(BlockADMM)
class BlockADMMProgram(AugmentedLagrangianProgram):
    """`AugmentedLagrangianProgram` in either order, with constraints and factorisations."""

    solver: BlockADMM

    def begin(self) -> None:
        super().begin()
        solver, block = self.solver, self.block
        if solver.optimiser == "sgd" and solver.momentum is None:
            block.own_optimiser(0.0)
        elif solver.optimiser == "adam":
            groups = block.optimisers["exact"].param_groups
            own = [{"weight_decay": 0.0, **group} for group in groups]
            own = [{key: group[key] for key in ("params", "weight_decay")} for group in own]
            block.optimisers["local"] = torch.optim.AdamW(own, lr=0.0)
        self._layer = None if block.first else leading(block.module)
        everywhere = projection(solver.constraint)
        self._constraint_in = Free() if block.first else self._layer or everywhere
        self._constraint_out = Free() if block.last else block.cut_after or everywhere
        self._factors: FactorCut | None = None
        if isinstance(self._layer, Factorisation):
            self._constraint_in = Free()
            self._factors = FactorCut(self._layer, self._store)
        if isinstance(block.cut_after, Factorisation):
            self._constraint_out = Free()
        self._rho_in = self._rho_out = solver.rho
        self._start_norm: float | None = None

    def _begin(self, record: Record) -> None:
        super()._begin(record)
        if record.lam is not None:
            self._start_norm = None
            if self._factors is not None:
                self._factors.record(record.rows, self._own(record.rows))

    def train(self, window: Window) -> PhaseStats:
        """Sweep the window, then balance rho and watch the duals, if they moved."""
        if self._start_norm is None:
            self._start_norm = self._dual_norm()
        stats = super().train(window)
        if self.setup.exchanges:
            self._adapt(stats)
        return stats

    def gradient(
        self, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats, visit: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        if self._factors is not None:
            self._factors.update_factors(rows, self._own(rows))
        with passing_by(self._layer):
            return super().gradient(batch, rows, with_input, stats, visit)

    def _visit(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        visit = self._jacobi if self.solver.order == "jacobi" else self._gauss_seidel
        visit(batch, rows, exchange, stats)

    def _jacobi(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        x, p_in = self.gradient(batch, rows, exchange, stats)
        if exchange and not self.block.last:
            self._hand_up(rows, x)
        z = None
        if exchange and not self.block.first:
            z = self._z_update(batch, rows, p_in)
        self._weight_steps(batch, rows)
        if z is not None:
            self._hand_down(rows, z, stats)

    def _gauss_seidel(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        block = self.block
        if exchange and not block.first:
            self._hand_down(rows, self._z_update(batch, rows, None), stats)
        self.gradient(batch, rows, False, stats)
        self._weight_steps(batch, rows)
        if exchange and not block.last:
            with torch.no_grad(), passing_by(self._layer):
                lam = batch.images() if block.first else self._input(rows)
                self._hand_up(rows, block.forward(lam, (2, batch.step, self._sweep)))

    def _weight_steps(self, batch: Batch, rows: Rows) -> None:
        """The gradient at hand is the first step's."""
        for number in range(self.solver.theta_steps):
            if number:
                self.gradient(batch, rows, False, PhaseStats(), number)
            self._step(batch)

    def _z_update(self, batch: Batch, rows: Rows, p_in: Tensor | None) -> Stepped:
        """Z_k and kappa_k after a visit; `p_in` is the adjoint at the old Z_k, if it is known."""
        old, x = self._raw_own(rows), self.links.from_previous()
        kappa = self._multiplier("kappa_in", rows)
        if self._factors is not None:
            new = self._factored_step(batch, rows, x.to(self._own(rows).dtype), p_in)
        elif self.solver.z_steps == 1:
            if p_in is None:
                p_in = self._input_adjoint(batch, rows, self._own(rows))
            return self._stepped(rows, old, x, p_in)
        else:
            new = self._own(rows)
            for number in range(self.solver.z_steps):
                if number or p_in is None:
                    p_in = self._input_adjoint(batch, rows, new)
                new = descend(new, x, kappa, p_in, self._beta_in, self._eta_in, self.solver.filter)
            new = self._held_in(new)
        rate = self._ascent * 2 * self._beta_in
        return settle(new, old, x, kappa, self._beta_in, rate, self.solver.filter)

    def _factored_step(self, batch: Batch, rows: Rows, x: Tensor, p_in: Tensor | None) -> Tensor:
        assert self._factors is not None
        if p_in is None:
            p_in = self._input_adjoint(batch, rows, self._input(rows))
        kappa = self._store.get("kappa_in", rows)
        anchor = x - kappa / self._rho_in
        return self._factors.step(rows, anchor, p_in, self._rho_in, self.solver.factor_rho)

    def _input(self, rows: Rows) -> Tensor:
        return self._own(rows) if self._factors is None else self._factors.input(rows)

    def _input_adjoint(self, batch: Batch, rows: Rows, z: Tensor) -> Tensor:
        """p_in at Z_k = z; the weights' gradients stay as they are."""
        block = self.block
        z = z.detach().requires_grad_()
        with passing_by(self._layer):
            x = block.forward(z, (2, batch.step, self._sweep))
        scale = block.loss_scale
        if block.last:
            (p,) = torch.autograd.grad(block.classify(x, batch.labels()).loss * scale, z)
            return p.to(z.dtype) * (len(batch) / scale)
        target, kappa = self._store.raw("target", rows), self._multiplier("kappa_out", rows)
        coupling = couple(x.detach(), target, kappa, self._beta_out, self.solver.filter, 1 / scale)
        (p,) = torch.autograd.grad(x, z, coupling.p_out)
        return p.to(z.dtype) / scale

    def _adapt(self, stats: PhaseStats) -> None:
        """Change rho, reset duals: decided alike on both sides of a cut."""
        block, limit, mine = self.block, self.solver.dual_limit, None
        if not block.first:
            size = max(self._start_norm or 0.0, self._store.norm("lam"))
            mine = (stats.residual_norms(), self._dual_norm(), size)
        everyone = self.links.all_gather(mine)
        for k, measured in enumerate(everyone):
            if measured is None:
                continue
            norms, norm, size = measured
            here, below = k == block.index, k == block.index + 1
            if limit and not norm <= limit * size:
                stats.notices.append(
                    f"block-admm: the dual at cut {k} has grown to {norm:.3g}, its Z is "
                    f"{size:.3g} (limit: {limit:g} times); it starts again from zero"
                )
                if here or below:
                    self._store.clear("kappa_in" if here else "kappa_out")
            factor = self._rho_factor(*norms) if norms is not None else 1.0
            self._rho_in *= factor if here else 1.0
            self._rho_out *= factor if below else 1.0

    def _rho_factor(self, primal: float, dual: float) -> float:
        ratio = self.solver.balance_ratio
        if not ratio:
            return 1.0
        if primal > ratio * dual:
            return 2.0
        return 0.5 if dual > ratio * primal else 1.0

    def _dual_norm(self) -> float:
        """||U_k|| over the window."""
        known = not self.block.first and self.setup.exchanges
        return self._store.norm("kappa_in") / self._rho_in if known else 0.0

    def state(self) -> State:
        state, carried = super().state(), self.setup.carried
        if self.solver.balance_ratio:
            state.cut["rho"] = torch.tensor(self._rho_in, dtype=torch.float64)
        if carried and self._start_norm is not None:
            state.cut["start"] = torch.tensor(self._start_norm, dtype=torch.float64)
        if self._factors is not None:
            state.cut |= self._factors.state()
            state.cut |= self._store.state(["codes", "factor_dual"]) if carried else {}
        return state

    def load_state(self, state: State) -> None:
        before, after = state.cut, state.after
        if self._factors is not None and before:
            self._factors.load_state(before["factors.cross"], before["factors.gram"])
        self._rho_in = float(before.get("rho", self._rho_in))
        self._rho_out = float(after.get("rho", self._rho_out))
        if "start" in before:
            self._start_norm = float(before["start"])
        super().load_state(state)
        if self._factors is not None and "lam" in before:
            everything = slice(0, self._store.samples)
            for name in ("codes", "factor_dual"):
                self._store.put(name, everything, channels_last(before)[name])
            # RuntimeError where they are of other shapes
            self._store.get("factor_dual", everything) + self._factors.input(everything)

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
        return lam if self._whole else upsample(self._pool(lam), self.solver.filter)
