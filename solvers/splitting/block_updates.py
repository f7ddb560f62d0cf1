"""The updates of a visit in block-ADMM: weights, Z with its constraint, and the adjoint of Z."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid.solvers.kernels.operations import (
    Constraint,
    Stepped,
    complete_step,
    couple,
    descend,
    upsample,
)
from hybrid.solvers.layers.projection import (
    Factorization,
    Free,
    leading_projection,
    projection,
    skipping,
)
from hybrid.solvers.splitting.augmented_lagrangian import AugmentedLagrangianProgram
from hybrid.solvers.splitting.factors import FactorCut
from hybrid.solvers.uncompiled import paired
from hybrid.solvers.windows import Batch, PhaseStats, Rows


class BlockUpdates(AugmentedLagrangianProgram):
    """One block's updates, and the constraints at its two cuts."""

    solver: Any
    """Its settings, those of block-ADMM."""

    def begin(self) -> None:
        super().begin()
        block = self.block
        self._layer = None if block.first else leading_projection(block.module)
        everywhere = projection(self.solver.constraint)
        self._constraint_in = Free() if block.first else self._layer or everywhere
        self._constraint_out = Free() if block.last else block.cut_after or everywhere
        self._factors: FactorCut | None = None
        if isinstance(self._layer, Factorization):
            self._constraint_in = Free()
            self._factors = FactorCut(self._layer, self._store)
        if isinstance(block.cut_after, Factorization):
            self._constraint_out = Free()

    def gradient(
        self, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats, visit: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        if self._factors is not None:
            self._factors.update_factors(rows, self._lam(rows))
        with skipping(self._layer):
            return super().gradient(batch, rows, with_input, stats, visit)

    def _weight_steps(self, batch: Batch, rows: Rows) -> None:
        """Take theta_steps steps, the first on the gradient at hand."""
        for number in range(self.solver.theta_steps):
            if number:
                self.gradient(batch, rows, False, PhaseStats(), number)
            self._step(batch)

    def _z_update(
        self,
        batch: Batch,
        rows: Rows,
        x: Tensor,
        p_in: Tensor | None = None,
        steps: int | None = None,
    ) -> Stepped:
        """Z_k and kappa_k after a visit; `p_in`: the adjoint at the old Z_k, if it is known."""
        old, kappa, cut = self._stored_lam(rows), self._multiplier("kappa_in", rows), self._before
        steps = self.solver.z_steps if steps is None else steps
        if self._factors is not None:
            new = self._factored_step(batch, rows, x.to(self._lam(rows).dtype), p_in)
        elif steps == 1:
            if p_in is None:
                p_in = self._adjoint(batch, rows, self._lam(rows))[1]
            return self._lam_update(rows, old, x, p_in)
        else:
            new = self._lam(rows)
            for number in range(steps):
                if number or p_in is None:
                    p_in = self._adjoint(batch, rows, new)[1]
                new = descend(new, x, kappa, p_in, cut.step_beta, self._eta, self.solver.filter)
            new = self._project_in(new)
        rate = self._kappa_rate * 2 * cut.step_beta
        return complete_step(new, old, x, kappa, cut.step_beta, rate, self.solver.filter)

    def _factored_step(self, batch: Batch, rows: Rows, x: Tensor, p_in: Tensor | None) -> Tensor:
        assert self._factors is not None
        if p_in is None:
            p_in = self._adjoint(batch, rows, self._input(rows))[1]
        kappa, rho = self._store.get("kappa_in", rows), 2 * self._before.step_beta
        return self._factors.step(rows, x - kappa / rho, p_in, rho, self.solver.factor_rho)

    def _input(self, rows: Rows) -> Tensor:
        return self._lam(rows) if self._factors is None else self._factors.input(rows)

    def _output(self, batch: Batch, rows: Rows) -> Tensor:
        """x_k."""
        with torch.no_grad(), skipping(self._layer):
            lam = batch.images() if self.block.first else self._input(rows)
            x: Tensor = self.block.forward(lam, (2, batch.step, self._sweep))
            return x

    def _adjoint(self, batch: Batch, rows: Rows, z: Tensor) -> tuple[Tensor | None, Tensor]:
        """(x_k, p_in) at Z_k = z, without the network's output; the weights' gradients stay."""
        block = self.block
        z = z.detach().requires_grad_()
        with skipping(self._layer):
            x = block.forward(z, (2, batch.step, self._sweep))
        scale = block.loss_scale
        if block.last:
            with block.span("backward"):
                labels = batch.labels()
                found = block.classify(x, labels, block.part_weight(batch, labels))
                (p,) = torch.autograd.grad(found.loss * scale, z)
            return None, block.stored_adjoint(p.to(z.dtype) * (len(batch) / scale))
        target, kappa = self._store.raw("target", rows), self._multiplier("kappa_out", rows)
        beta, factor = self._after.weight_beta, self.solver.filter
        samples = len(batch) / scale  # scaled before it is rounded to x's format
        coupling = couple(x.detach(), target, kappa, beta, factor, samples)
        with block.span("backward"):
            (p,) = torch.autograd.grad(paired(x, coupling.p_out), z)
        return x.detach(), block.stored_adjoint(p.to(z.dtype) * samples)

    @property
    def _kappa_rate(self) -> float:
        return float(self.solver.kappa_step)

    @property
    def _constraint(self) -> Constraint | None:
        return self._constraint_in

    def _project_in(self, lam: Tensor) -> Tensor:
        return self._constraint_in.project(self._as_block_input(lam))

    def _project_out(self, lam: Tensor) -> Tensor:
        return self._constraint_out.project(self._as_block_input(lam))

    def _as_block_input(self, lam: Tensor) -> Tensor:
        """lam as the block's input: in the filter mode "input" the upsampling of S lam."""
        return lam if self._whole else upsample(self._pool(lam), self.solver.filter)
