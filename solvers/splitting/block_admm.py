"""Stochastic block-ADMM, with constraints at the cuts (Khorram et al., arXiv 2105.00339)."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from hybrid.solvers.acting import Acts, Count, NotNegative, Positive
from hybrid.solvers.base import Setup, program_of, values_of
from hybrid.solvers.kernels.operations import Stepped, ascend, complete_step, couple, descend
from hybrid.solvers.layers.projection import leading_projection, projection, skipping
from hybrid.solvers.numerics.uncompiled import paired
from hybrid.solvers.splitting.augmented_lagrangian import (
    AugmentedLagrangian,
    AugmentedLagrangianProgram,
)
from hybrid.solvers.splitting.variables import FORMATS
from hybrid.solvers.windows import Batch, PhaseStats, Rows, Window

EXCHANGES = Acts(
    "a later sweep uses the dual (several sweeps, or window 'all')", lambda run: run.setup.exchanges
)


@dataclass(frozen=True)
class BlockADMM(AugmentedLagrangian):
    r"""min_{w, Z} phi(f_{K-1}(Z_{K-1}), y)   s.t.   Z_k = f_{k-1}(Z_{k-1}),   Z_k in C_k.

    With scaled duals U_k, for one sample (Z_k is `lam`; stored is `kappa` = rho U_k):

        L = phi(x_{K-1}, y) + sum_k rho/2 ||Z_k - x_{k-1} + U_k||^2 - rho/2 ||U_k||^2
        w_k:  theta_steps optimizer steps on rho/2 ||Z_{k+1} - x_k + U_{k+1}||^2  (last: phi)
        Z_k:  z_steps times  Z_k <- Z_k - lam_step/rho (p_in + rho (Z_k - x_{k-1} + U_k)),
              then Z_k <- P_k(Z_k), the projection onto C_k
        U_k <- U_k + kappa_step (Z_k - x_{k-1})

    **Online**, in windows that do not keep Z, Z starts from one forward pass and U = 0 (after a
    correction U = -p/rho). In a sweep Z and then w step, for each mini-batch:

        gauss-seidel  Z_{K-1} first, then Z_{K-2} with the new Z_{K-1}, ...: the loss reaches every
                      block in one visit; block k works K-1-k mini-batches behind the last
        jacobi        z_steps times, every Z_k steps from the same old values, then Z and x are
                      exchanged; the loss goes down by one block each time
        then          w_k, all blocks at once, from the new Z_k towards the new Z_{k+1}

    Before another sweep, x_{k-1} is recomputed and U_k steps. **Batch**, with the window "all"
    unless every round is corrected, keeps Z and U of every sample, and a visit is

        jacobi        every w_k and Z_k steps from the same old values, all blocks at once; with
                      one step each, lam_step = 1, it is the augmented Lagrangian with beta = rho/2
        gauss-seidel  w_0, Z_1, U_1, w_1, Z_2, ... with the newest values (classical ADMM); block k
                      works k mini-batches behind the first, so all blocks work concurrently
    """

    name: ClassVar[str] = "block-admm"

    sweeps: ClassVar[int] = 2

    beta: float = field(init=False, repr=False, default=0.0)
    lam_move: Literal["step", "limit"] = field(init=False, repr=False, default="step")
    rho: Positive = 1e-3
    """Penalty coefficient; 2 beta of the augmented Lagrangian."""
    order: Literal["jacobi", "gauss-seidel"] = "gauss-seidel"
    """Update blocks from the same old values, or in turn from the newest."""
    lam_step: NotNegative = 2e-3
    """Step size of Z, in units of 1 / rho."""
    kappa_step: Annotated[NotNegative, EXCHANGES] = 1.0
    """Step size of the scaled dual U."""
    theta_steps: Count = 1
    """Weight steps per visit of a mini-batch."""
    z_steps: Count = 1
    """Gradient steps of Z per visit."""
    constraint: str = "none"
    """Constraint on Z: none, non-negative, box:LOW:HIGH, quantized:BITS:LOW:HIGH or sign."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", self.rho / 2)
        super().__post_init__()
        projection(self.constraint)

    def moves(self, setup: Setup) -> bool:
        return setup.stored_batches > 0

    def buffers(self, setup: Setup) -> tuple[list[str], list[str]]:
        before, after = super().buffers(setup)
        return before + ([] if setup.carried else ["x"]), after

    def memory(self, setup: Setup, index: int) -> int:
        """Add to `Penalty.memory` Z in transit to a block that is behind, in "gauss-seidel"."""
        bytes_ = super().memory(setup, index)
        if self.order == "gauss-seidel" and not setup.carried:
            values = values_of(setup.shape_before(index)) // self.filter**2
            bytes_ += setup.samples * values * FORMATS[self.storage].itemsize
        return bytes_

    @property
    def kappa_rate(self) -> float:
        return self.kappa_step


@program_of(BlockADMM)
class BlockADMMProgram(AugmentedLagrangianProgram):
    """`AugmentedLagrangianProgram` in either order, with constraints."""

    solver: BlockADMM

    def begin(self) -> None:
        super().begin()
        solver, block, variables = self.solver, self.block, self.variables
        self._layer = None if block.first else leading_projection(block.module)
        everywhere = projection(solver.constraint)
        if not block.first:
            variables.constraint_before = self._layer or everywhere
        if not block.last:
            variables.constraint_after = block.cut_after or everywhere

    def sweep(self, window: Window, number: int, exchange: bool) -> PhaseStats:
        """Solve every sub-problem once: Z, then w, then with an exchange U."""
        if self.setup.carried:
            return super().sweep(window, number, exchange)
        stats, jacobi = PhaseStats(), self.solver.order == "jacobi"
        self._sweep = number
        for rows, batch in window.sweep(number):
            for left in reversed(range(self.solver.z_steps if jacobi else 0)):
                # the norms are those of the last step
                self._jacobi_step(batch, rows, PhaseStats() if left else stats)
            if not jacobi:
                self._gauss_seidel_step(batch, rows, stats)
            self.gradient(batch, rows, False, stats)
            self._weight_steps(batch, rows)
        if exchange:
            self._dual_steps(window, number)
        return stats

    def _visit(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        visit = self._jacobi_visit if self.solver.order == "jacobi" else self._gauss_seidel_visit
        visit(batch, rows, exchange, stats)

    def _jacobi_visit(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        x, p_in = self.gradient(batch, rows, exchange, stats)
        if exchange and not self.block.last:
            self._send_output(rows, x)
        z = None
        if exchange and not self.block.first:
            z = self._z_update(batch, rows, self.links.from_previous(), p_in)
        self._weight_steps(batch, rows)
        if z is not None:
            self._send_lam(rows, z, stats)

    def _gauss_seidel_visit(
        self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats
    ) -> None:
        if exchange and not self.block.first:
            new = self._z_update(batch, rows, self.links.from_previous())
            self._send_lam(rows, new, stats)
        self.gradient(batch, rows, False, stats)
        self._weight_steps(batch, rows)
        if exchange and not self.block.last:
            self._send_output(rows, self._output(batch, rows))

    def _jacobi_step(self, batch: Batch, rows: Rows, stats: PhaseStats) -> None:
        """Step Z_k once from the old values of all blocks, and exchange Z and x."""
        block, links = self.block, self.links
        if block.first and not block.last:
            self._send_output(rows, self._output(batch, rows))
        elif not block.first:
            x, p_in = self._adjoint(batch, rows, self.variables.lam(rows))
            if x is not None:
                self._send_output(rows, x)
            self.store.put("x", rows, links.from_previous())
            self._send_lam(rows, self._z_step(batch, rows, 1, p_in), stats)
        if not block.last:
            self.store.put("target", rows, links.from_next())

    def _gauss_seidel_step(self, batch: Batch, rows: Rows, stats: PhaseStats) -> None:
        """Step Z_k after Z_{k+1}, from the last cut to the first."""
        if not self.block.last:
            self.store.put("target", rows, self.links.from_next())
        if not self.block.first:
            self._send_lam(rows, self._z_step(batch, rows, self.solver.z_steps), stats)

    def _z_step(self, batch: Batch, rows: Rows, steps: int, p_in: Tensor | None = None) -> Stepped:
        """Take `steps` steps of Z_k towards the stored x, without a step of U_k."""
        x = self.store.raw("x", rows)
        return self._z_update(batch, rows, x, p_in, steps)._replace(kappa=None)

    def _z_update(
        self,
        batch: Batch,
        rows: Rows,
        x: Tensor,
        p_in: Tensor | None = None,
        steps: int | None = None,
    ) -> Stepped:
        """Step Z_k and kappa_k; `p_in` is the adjoint at the old Z_k, if it is known."""
        variables, beta, filter_ = self.variables, self.solver.beta, self.solver.filter
        old, new = self.store.raw("lam", rows), variables.lam(rows)
        kappa = variables.multiplier("kappa_in", rows)
        steps = self.solver.z_steps if steps is None else steps
        if steps == 1:
            if p_in is None:
                p_in = self._adjoint(batch, rows, new)[1]
            return self._step_lam(rows, old, x, p_in)
        for number in range(steps):
            if number or p_in is None:
                p_in = self._adjoint(batch, rows, new)[1]
            new = descend(new, x, kappa, p_in, beta, self._eta, filter_)
        new = variables.constraint_before.project(new)
        rate = self.solver.kappa_rate * 2 * beta
        return complete_step(new, old, x, kappa, beta, rate, filter_)

    def _weight_steps(self, batch: Batch, rows: Rows) -> None:
        """Take theta_steps steps, the first on the present gradient."""
        for number in range(self.solver.theta_steps):
            if number:
                self.gradient(batch, rows, False, PhaseStats(), number)
            self._step(batch)

    def _dual_steps(self, window: Window, number: int) -> None:
        """Send x_k with the new weights up, and step U on both sides of a cut."""
        block, store, variables = self.block, self.store, self.variables
        for rows, batch in window.sweep(number):
            if not block.last:
                self._send_output(rows, self._output(batch, rows))
                self._receive(rows, store.raw("target", rows))
            if not block.first:
                x = self.links.from_previous()
                # rounded as in the message to the previous block
                lam = variables.shared_lam(variables.lam(rows))
                rate = self.solver.kappa_rate * 2 * self.solver.beta
                store.put("x", rows, x)
                store.put("kappa_in", rows, ascend(store.raw("kappa_in", rows), lam, x, rate))

    def gradient(
        self, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats, visit: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        with skipping(self._layer):
            return super().gradient(batch, rows, with_input, stats, visit)

    def _output(self, batch: Batch, rows: Rows) -> Tensor:
        """x_k."""
        with torch.no_grad(), skipping(self._layer):
            lam = batch.images() if self.block.first else self.variables.lam(rows)
            x: Tensor = self.block.forward(lam, (2, batch.step, self._sweep))
            return x

    def _adjoint(self, batch: Batch, rows: Rows, z: Tensor) -> tuple[Tensor | None, Tensor]:
        """Compute (x_k, p_in) at Z_k = z, with no x_k of the last block; weight gradients stay."""
        block, scale = self.block, self.block.loss_scale
        z = z.detach().requires_grad_()
        with skipping(self._layer):
            x = block.forward(z, (2, batch.step, self._sweep))
        samples = len(batch) / scale  # scale before rounding to x's format
        with block.span("backward"):
            if block.last:
                labels = batch.labels()
                end = block.compute_loss(x, labels, block.part_weight(batch, labels)).loss * scale
            else:
                target, kappa = (self.store.raw(name, rows) for name in ("target", "kappa_out"))
                beta, filter_ = self.solver.beta, self.solver.filter
                end = paired(x, couple(x.detach(), target, kappa, beta, filter_, samples).p_out)
            (p,) = torch.autograd.grad(end, z)
        p_in = block.stored_adjoint(p.to(z.dtype) * samples)
        return None if block.last else x.detach(), p_in
