"""Stochastic block-ADMM, with constraints at the cuts (Khorram et al., arXiv 2105.00339)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch

from hybrid.solvers.acting import Acts, Count, Needs, NotNegative, Positive
from hybrid.solvers.base import Setup, program_of, values_of
from hybrid.solvers.layers.projection import projection
from hybrid.solvers.splitting.augmented_lagrangian import AugmentedLagrangian
from hybrid.solvers.splitting.online import OnlineSweeps
from hybrid.solvers.splitting.store import FORMATS, channels_last
from hybrid.solvers.state import State
from hybrid.solvers.windows import Batch, PhaseStats, Record, Rows, Window

EXCHANGES = Acts(
    "another sweep uses the dual of the first (rounds.sweeps is above 1, or Z are carried)",
    lambda run: run.setup.exchanges,
)
CARRIED = Acts(
    "duals outlive a window (rounds.window is all, rounds.correct_every not 1)",
    lambda run: run.setup.carried,
)
FACTORIZED = Acts("a cut has a factorization", lambda run: run.setup.factorized)
PLAIN_CUT = Acts(
    "a cut has no factorization, whose Z has a closed form",
    lambda run: _has_plain_cut(run),
)
STEPS_OF_Z = Acts(
    "a cut has no factorization, or solver.order is 'jacobi' in a window whose Z are not kept",
    lambda run: _has_plain_cut(run) or (run.solver.order == "jacobi" and not run.setup.carried),
)


@dataclass(frozen=True)
class BlockADMM(AugmentedLagrangian):
    r"""min_{w, Z} phi(f_{K-1}(Z_{K-1}), y)   s.t.   Z_k = f_{k-1}(Z_{k-1}),   Z_k in C_k.

    With scaled duals U_k, for one sample (Z_k is `lam`; stored is `kappa` = rho U_k):

        L = phi(x_{K-1}, y) + sum_k rho_k/2 ||Z_k - x_{k-1} + U_k||^2 - rho_k/2 ||U_k||^2
        w_k:  theta_steps optimizer steps on rho_{k+1}/2 ||Z_{k+1} - x_k + U_{k+1}||^2  (last: phi)
        Z_k:  z_steps times  Z_k <- Z_k - lam_step/rho_k (p_in + rho_k (Z_k - x_{k-1} + U_k)),
              then Z_k <- P_k(Z_k), the projection onto C_k
        U_k <- U_k + kappa_step (Z_k - x_{k-1})

    **Online**, in windows whose Z are not kept, Z starts from one forward pass and U = 0 (after a
    correction U = -p/rho). In a sweep Z and then w step, for each mini-batch:

        gauss-seidel  Z_{K-1} first, then Z_{K-2} with the new Z_{K-1}, ...: the loss reaches every
                      block in one visit; block k works K-1-k mini-batches behind the last
        jacobi        z_steps times, every Z_k steps from the same old values, then Z and x are
                      exchanged; the loss goes down by one block each time
        then          w_k, all blocks at once, from the new Z_k towards the new Z_{k+1}

    and, before another sweep, x_{k-1} is computed anew and U_k steps. **Batch**, with the window
    "all" unless every round is corrected, keeps Z and U of every sample, and a visit is

        jacobi        every w_k and Z_k steps from the same old values, all blocks at once; with
                      one step each, lam_step = 1, it is the augmented Lagrangian with beta = rho/2
        gauss-seidel  w_0, Z_1, U_1, w_1, Z_2, ... with the newest values (classical ADMM); block k
                      works k mini-batches behind the first, so all blocks work at the same time

    Residual balancing changes rho_k; kappa stays, so U is rescaled with it. A dual that grows
    beyond `dual_limit` times its start and its Z is reset to zero, with a notice.
    """

    name: ClassVar[str] = "block-admm"
    fills: ClassVar[bool] = False
    factorizes: ClassVar[bool] = True

    sweeps: ClassVar[int] = 2
    acts: ClassVar = {
        "solver.filter": Needs(
            "no cut has a factorization, which has every pixel",
            lambda run: not run.setup.factorized,
        )
    }

    beta: float = field(init=False, repr=False, default=0.0)
    lam_beta: float | None = field(init=False, repr=False, default=None)
    lam_move: Literal["step", "limit"] = field(init=False, repr=False, default="step")
    rho: Positive = 1e-3
    """Penalty coefficient; 2 beta of the augmented Lagrangian."""
    order: Literal["jacobi", "gauss-seidel"] = "gauss-seidel"
    """All blocks from the same old values, or one after the other with the newest."""
    lam_step: Annotated[NotNegative, PLAIN_CUT] = 2e-3
    """Gradient step of Z, in units of 1 / rho."""
    kappa_step: Annotated[NotNegative, EXCHANGES] = 1.0
    """Step of the scaled dual U."""
    theta_steps: Count = 1
    """Optimizer steps of the weights in each visit of a mini-batch."""
    z_steps: Annotated[Count, STEPS_OF_Z] = 1
    """Gradient steps of Z in each visit."""
    optimizer: Literal["shared", "sgd", "adam"] = "shared"
    """The optimizer of the weights' steps: the exact pass's, or one of the solver's own."""
    constraint: Annotated[str, PLAIN_CUT] = "none"
    """Constraint on Z: none, non-negative, box:LOW:HIGH, quantized:BITS:LOW:HIGH or sign."""
    factor_rho: Annotated[Positive, FACTORIZED] = 1e-3
    """Penalty coefficient of Z = M S at a cut with a factorization."""
    dual_limit: Annotated[NotNegative, CARRIED] = 10.0
    """Growth of a dual at which it starts again from zero, with a notice; 0: never."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", self.rho / 2)
        super().__post_init__()
        if self.optimizer != "sgd" and self.momentum is not None:
            raise ValueError(
                f"momentum is {self.momentum} but the optimizer is {self.optimizer!r}: momentum "
                "is of the solver's own SGD, so set optimizer=sgd"
            )
        projection(self.constraint)

    def moves(self, setup: Setup) -> bool:
        return setup.stored_batches > 0

    def buffers(self, setup: Setup) -> tuple[list[str], list[str]]:
        before, after = super().buffers(setup)
        return before + ([] if setup.carried else ["x"]), after

    def memory(self, setup: Setup, index: int) -> int:
        """As `Penalty`'s, with the codes and the dual of a factorization, each about as large as Z.

        In the order "gauss-seidel" a window of Z may be on its way to a block that is behind.
        """
        bytes_, lam = super().memory(setup, index), values_of(setup.shape_before(index))
        more = 2 * lam if index in setup.factorized else 0
        if self.order == "gauss-seidel" and not setup.carried:
            more += lam // self.filter**2
        return bytes_ + setup.samples * more * FORMATS[self.storage].itemsize

    @property
    def own_momentum(self) -> bool:
        return self.optimizer != "shared"


@program_of(BlockADMM)
class BlockADMMProgram(OnlineSweeps):
    """`AugmentedLagrangianProgram` in either order, with constraints and factorizations."""

    solver: BlockADMM

    def begin(self) -> None:
        super().begin()
        solver, block = self.solver, self.block
        if solver.optimizer == "sgd" and solver.momentum is None:
            block.own_optimizer(0.0)
        elif solver.optimizer == "adam":
            groups = block.optimizers["exact"].param_groups
            own = [{"weight_decay": 0.0, **group} for group in groups]
            own = [{key: group[key] for key in ("params", "weight_decay")} for group in own]
            block.optimizers["local"] = torch.optim.AdamW(own, lr=0.0)
        self._start_norm: float | None = None

    def _start_variables(self, record: Record) -> None:
        super()._start_variables(record)
        if record.lam is not None:
            self._start_norm = None
            if not self.setup.carried:
                self._store.put("x", record.rows, self._pool(record.lam))
            if self._factors is not None:
                self._factors.record(record.rows, self._lam(record.rows))

    def train(self, window: Window) -> PhaseStats:
        """Sweep the window, then limit the duals if they outlive it."""
        if self._start_norm is None:
            self._start_norm = self._dual_norm()
        stats = super().train(window)
        if self.setup.carried and self.solver.dual_limit:
            self._limit_duals(stats)
        return stats

    def sweep(self, window: Window, number: int, exchange: bool) -> PhaseStats:
        """Solve every sub-problem once: Z, then w, and with an exchange U."""
        if self.setup.carried:
            return super().sweep(window, number, exchange)
        return self.online_sweep(window, number, exchange)

    def _visit(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        visit = self._jacobi if self.solver.order == "jacobi" else self._gauss_seidel
        visit(batch, rows, exchange, stats)

    def _jacobi(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        x, p_in = self.gradient(batch, rows, exchange, stats)
        if exchange and not self.block.last:
            self._send_output(rows, x)
        z = None
        if exchange and not self.block.first:
            z = self._z_update(batch, rows, self.links.from_previous(), p_in)
        self._weight_steps(batch, rows)
        if z is not None:
            self._send_lam(rows, z, stats)

    def _gauss_seidel(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        block = self.block
        if exchange and not block.first:
            x = self.links.from_previous()
            self._send_lam(rows, self._z_update(batch, rows, x), stats)
        self.gradient(batch, rows, False, stats)
        self._weight_steps(batch, rows)
        if exchange and not block.last:
            self._send_output(rows, self._output(batch, rows))

    def _limit_duals(self, stats: PhaseStats) -> None:
        """Reset duals that have grown too large; both sides of a cut decide alike."""
        block, limit, mine = self.block, self.solver.dual_limit, None
        if not block.first:
            mine = self._dual_norm(), max(self._start_norm or 0.0, self._store.norm("lam"))
        for k, measured in enumerate(self.links.agree(mine)):
            if measured is None:
                continue
            norm, size = measured
            if not norm <= limit * size:
                stats.notices.append(
                    f"block-admm: the dual at cut {k} has grown to {norm:.3g}, its Z is "
                    f"{size:.3g} (limit: {limit:g} times); it starts again from zero"
                )
                if k in (block.index, block.index + 1):
                    self._store.clear("kappa_in" if k == block.index else "kappa_out")

    def _dual_norm(self) -> float:
        """||U_k|| over the window."""
        rho = 2 * self._before.step_beta
        return 0.0 if self.block.first else self._store.norm("kappa_in") / rho

    def state(self) -> State:
        state, carried = super().state(), self.setup.carried
        if carried and self._start_norm is not None:
            state.cut["start"] = torch.tensor(self._start_norm, dtype=torch.float64)
        if self._factors is not None:
            state.cut |= self._factors.state()
            state.cut |= self._store.state(["codes", "factor_dual"]) if carried else {}
        return state

    def load_state(self, state: State) -> None:
        before = state.cut
        if self._factors is not None and "factors.cross" in before:
            self._factors.load_state(before["factors.cross"], before["factors.gram"])
        if "start" in before:
            self._start_norm = float(before["start"])
        super().load_state(state)
        if self._factors is not None and "lam" in before:
            everything = slice(0, self._store.samples)
            for name in ("codes", "factor_dual"):
                self._store.put(name, everything, channels_last(before)[name])
            # RuntimeError if their shapes do not fit
            self._store.get("factor_dual", everything) + self._factors.input(everything)


def _has_plain_cut(run: Any) -> bool:
    """Whether a cut has no factorization."""
    setup = run.setup
    return not setup.factorized or len(setup.factorized) < setup.blocks - 1
