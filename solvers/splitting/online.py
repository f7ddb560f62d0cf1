"""Sweeps of block-ADMM over windows whose auxiliary variables are not kept."""

from __future__ import annotations

from torch import Tensor

from hybrid.solvers.kernels.operations import Stepped, ascend
from hybrid.solvers.splitting.block_updates import BlockUpdates
from hybrid.solvers.splitting.coefficients import Coefficients
from hybrid.solvers.windows import Batch, PhaseStats, Rows, Window


class OnlineSweeps(BlockUpdates):
    """Sweeps of one block over a window: Z steps, then w, and with an exchange U."""

    def online_sweep(self, window: Window, number: int, exchange: bool) -> PhaseStats:
        """Solve every sub-problem once."""
        stats = PhaseStats()
        self._sweep = number
        for rows, batch in window.sweep(number):
            if self.solver.order == "jacobi":
                for left in reversed(range(self.solver.z_steps)):
                    # the norms are those of the last step
                    self._jacobi_step(batch, rows, PhaseStats() if left else stats)
            else:
                self._gauss_seidel_step(batch, rows, stats)
            self.gradient(batch, rows, False, stats)
            self._weight_steps(batch, rows)
        if exchange:
            self._dual_steps(window, number)
        return stats

    def _jacobi_step(self, batch: Batch, rows: Rows, stats: PhaseStats) -> None:
        """Step Z_k once from the old values of all blocks, and exchange Z and x."""
        block, links = self.block, self.links
        if block.first and not block.last:
            self._send_output(rows, self._output(batch, rows))
        elif not block.first:
            x, p_in = self._adjoint(batch, rows, self._input(rows))
            if x is not None:
                self._send_output(rows, x)
            self._store.put("x", rows, links.from_previous())
            self._send_lam(rows, self._z_step(batch, rows, 1, p_in), stats)
        if not block.last:
            self._store.put("target", rows, links.from_next())

    def _gauss_seidel_step(self, batch: Batch, rows: Rows, stats: PhaseStats) -> None:
        """Step Z_k after Z_{k+1}, beginning with the last cut."""
        if not self.block.last:
            self._store.put("target", rows, self.links.from_next())
        if not self.block.first:
            self._send_lam(rows, self._z_step(batch, rows, self.solver.z_steps), stats)

    def _z_step(self, batch: Batch, rows: Rows, steps: int, p_in: Tensor | None = None) -> Stepped:
        """Z_k after `steps` steps towards the stored x; U_k stays."""
        x = self._store.raw("x", rows)
        return self._z_update(batch, rows, x, p_in, steps)._replace(kappa=None)

    def _dual_steps(self, window: Window, number: int) -> None:
        """Send x_k of the new weights up, and step U on both sides of a cut."""
        block, store = self.block, self._store
        for rows, batch in window.sweep(number):
            if not block.last:
                self._send_output(rows, self._output(batch, rows))
                self._dual_step("kappa_out", rows, store.raw("target", rows), "sent", self._after)
            if not block.first:
                store.put("x", rows, self.links.from_previous())
                # as the previous block has received it
                whole = self._whole
                shared = self._shared_lam(self._lam(rows)) if whole else store.raw("lam", rows)
                self._dual_step("kappa_in", rows, shared, "x", self._before)

    def _dual_step(self, name: str, rows: Rows, lam: Tensor, x: str, cut: Coefficients) -> None:
        kappa, rate = self._store.raw(name, rows), self._kappa_rate * 2 * cut.step_beta
        self._store.put(name, rows, ascend(kappa, lam, self._store.raw(x, rows), rate))
