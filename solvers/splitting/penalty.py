"""Quadratic penalty beta ||lam - x||^2 at every cut (Sun et al., 2009.01462)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from hybrid.solvers.acting import Acts, NotNegative, Positive, Share
from hybrid.solvers.base import SubProblems, program_of
from hybrid.solvers.block import Block
from hybrid.solvers.kernels.operations import Coupling, Stepped, ascend, couple, step
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.numerics.optimizer_state import with_momentum
from hybrid.solvers.numerics.uncompiled import paired
from hybrid.solvers.splitting.variables import AuxiliaryVariables, Splitting, channels_last
from hybrid.solvers.state import State, Tensors
from hybrid.solvers.windows import Batch, PhaseStats, Record, Rows, Window

IN_WINDOWS, IN_IDLE_TIME = 0.6, 0.3
"""Relative learning rates of local steps: of separate steps, and of steps on a late gradient."""

RESIDUALS_COMPARED = Acts(
    "it is not the method of local work, and rounds.correct_every is 1 or rounds.sweeps at least 4",
    lambda run: (
        not run.setup.local_work and (run.setup.correct_every == 1 or run.setup.sweeps >= 4)
    ),
)
OWN_STEPS = Acts(
    "it is not the method of local work, which has no separate steps",
    lambda run: not run.setup.local_work,
)


@dataclass(frozen=True)
class Penalty(Splitting):
    r"""min_{w, lam}  phi(x_{K-1}, y) + sum_k beta ||S lam_k - S x_{k-1}||^2,   k = 1..K-1.

    Local loss per sample, block k < K-1:  beta ||S lam_{k+1} - S x_k||^2,   block K-1:  phi
    A sweep, for each mini-batch of the window:
        p_out = -2 beta S^T (S lam_{k+1} - S x_k)   (k < K-1),   d phi / d x   (k = K-1)
        w_k   <- optimizer step with (1/N) sum over samples of (d x_k / d w_k)^T p_out
    and, if another sweep follows, with p_in = (d x_k / d lam_k)^T p_out:
        lam_k <- lam_k - eta (p_in + 2 beta S^T (S lam_k - S x_{k-1})),   eta = lam_step / (2 beta)

    A large beta undoes the weights' previous step, and keeps lam close to x. With lam_step < 1 the
    error is multiplied by lam_step from each cut to the one before, and under a filter also by
    1 / filter^2, since S S^T = I / filter^2.

    lam starts at the activations that an exact pass recorded ("feasible"), or one lam step from
    them ("stepped"): lam_{k+1} = x_k - eta p_{k+1}, which both ranks of a cut know without a
    message. The two sides of a cut exchange S x_{k-1} (up) and the new S lam_k (down) between
    sweeps; a single sweep sends nothing. S averages over filter x filter pixels.
    """

    name: ClassVar[str] = "penalty"
    alternates: ClassVar[bool] = True

    local_lr: Positive | None = None
    """Learning rate of local steps, relative to the schedule; unset: 0.6, or 0.3 in idle time."""
    momentum: Annotated[Share | None, OWN_STEPS] = None
    """Momentum of a separate SGD for local steps; unset: the exact pass's optimizer."""
    clip_norm: NotNegative = 0.0
    """Clip the norm of each block's local gradient; 0: no clipping."""
    return_ratio: Annotated[Positive, RESIDUALS_COMPARED] = 3.0
    """Growth of a cut's residual at which training returns to serial."""

    @property
    def kappa_rate(self) -> float:
        """The step size of the multipliers, in units of 2 beta."""
        return 0.0


@program_of(Penalty)
class PenaltyProgram(SubProblems):
    """One rank's auxiliary variables, and its steps on its local loss."""

    solver: Penalty

    def begin(self) -> None:
        solver, block = self.solver, self.block
        self.variables = AuxiliaryVariables(solver, block.index, self.setup)
        self.store = self.variables.store
        usual = IN_IDLE_TIME if self.setup.local_work else IN_WINDOWS
        self.local_lr, self.clip_norm = solver.local_lr or usual, solver.clip_norm
        self._sweep = 0
        if solver.momentum is not None:
            block.optimizers["local"] = with_momentum(block.optimizers["exact"], solver.momentum)

    def train(self, window: Window) -> PhaseStats:
        """Sweep the window; with several sweeps, stop early when a cut's residual grows.

        Losses, scores and residuals are the last sweep's.
        """
        total = PhaseStats()
        before: list[float] = []
        links, carried = self.links, self.setup.carried
        self.variables.carried = (False, False)
        with total.timed(links), frozen_statistics(self.block.module):
            for number in range(window.sweeps):
                exchange = carried or number < window.sweeps - 1
                stats = self.sweep(window, number, exchange)
                total.losses, total.correct = stats.losses, stats.correct
                total.samples, total.squares = stats.samples, stats.squares
                total.exchanged = stats.exchanged or total.exchanged
                total.steps += stats.steps
                if exchange:
                    residuals = links.agree(stats.residual())
                    limits = [self.solver.return_ratio * b for b in before]
                    if not all(r <= limit for r, limit in zip(residuals, limits, strict=False)):
                        if left := window.sweeps - number - 1:
                            total.notices.append(
                                f"{self.solver.name}: a cut's residual grew more than "
                                f"solver.return_ratio ({self.solver.return_ratio:g}) times from "
                                f"one sweep to the next: {left} sweep{'s' * (left > 1)} left out"
                            )
                        break
                    # in the first sweep lam is feasible, so its residual sets no limit
                    before = residuals if number else []
            links.flush()
        return total

    def sweep(self, window: Window, number: int, exchange: bool) -> PhaseStats:
        """Solve every sub-problem of the window once; with `exchange`, lam and kappa step."""
        stats = PhaseStats()
        self._sweep = number
        pending: Rows | None = None
        for rows, batch in window.sweep(number):
            self._visit(batch, rows, exchange, stats)
            if exchange and not self.block.last:
                # one mini-batch later, so that no rank waits and no messages pile up
                if pending is not None:
                    self._receive(pending, self.links.from_next())
                pending = rows
        if pending is not None:
            self._receive(pending, self.links.from_next())
        return stats

    def _visit(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        """Step on one mini-batch's sub-problem; with `exchange`, step lam_k and send x_k up."""
        x, p_in = self.gradient(batch, rows, exchange, stats)
        self._step(batch)
        if exchange and not self.block.last:
            self._send_output(rows, x)
        if exchange and p_in is not None:
            lam = self.store.raw("lam", rows)
            self._send_lam(rows, self._step_lam(rows, lam, self.links.from_previous(), p_in), stats)

    def gradient(
        self, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats, visit: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the local loss's gradient; return x_k and, `with_input`, p_in."""
        block, size = self.block, batch.size
        lam = (batch.images() if block.first else self.variables.lam(rows)).detach()
        if with_input and not block.first:
            lam.requires_grad_()
        key = (1, batch.step, self._sweep, visit)
        with block.span("local step", key):
            x = block.forward(lam, key)
            if block.last:
                labels = batch.labels()
                result = block.compute_loss(x, labels, block.part_weight(batch, labels))
                loss = result.loss if batch.share == 1 else result.loss * batch.share
                block.backward(loss, key=key)
                stats.count_loss(result)
            else:
                target = self.store.raw("target", rows)
                kappa = self.variables.multiplier("kappa_out", rows)
                beta, factor = self.solver.beta, self.solver.filter
                coupling = couple_backward(key, block, x, target, kappa, beta, factor, size)
                stats.losses.append(coupling.loss / len(batch))
                stats.squares.append(coupling.squares)
            p_in = block.sample_adjoint(lam, size)
        stats.samples += len(batch)
        stats.steps += 1
        return x if block.last else x.detach(), p_in  # a network may give more than a tensor

    def _step(self, batch: Batch) -> None:
        self.block.step("local", batch.learning_rate * self.local_lr, self.clip_norm)

    def _step_lam(self, rows: Rows, lam: Tensor, x: Tensor, p_in: Tensor) -> Stepped:
        variables, solver, beta = self.variables, self.solver, self.solver.beta
        kappa, rate = variables.multiplier("kappa_in", rows), solver.kappa_rate * 2 * beta
        terms = lam, x, kappa, p_in, beta, self._eta, rate
        return step(*terms, solver.filter, constraint=variables.constraint_before)

    @property
    def _eta(self) -> float:
        return self.solver.lam_step / (2 * self.solver.beta)

    def _send_output(self, rows: Rows, x: Tensor) -> None:
        """Send S x_k to the owner of lam_{k+1}."""
        sent = self.store.message(self.variables.pool(x))
        self.store.put("sent", rows, sent)
        self.links.to_next(sent)

    def _send_lam(self, rows: Rows, new: Stepped, stats: PhaseStats) -> None:
        """Store the new lam_k and kappa_k, and send S lam_k down."""
        self.store.put("lam", rows, new.lam)
        self.links.to_previous(self._message(new))
        if new.kappa is not None:
            self.store.put("kappa_in", rows, new.kappa)
        stats.exchanged.append(new.squares)

    def _message(self, new: Stepped) -> Tensor:
        """Return the part of a step that the other side of a cut needs."""
        return new.shared

    def _receive(self, rows: Rows, lam: Tensor) -> None:
        """Store the new S lam_{k+1} from its owner, and step kappa_{k+1} as the owner does."""
        self.store.put("target", rows, lam)
        if (kappa := self.variables.multiplier("kappa_out", rows)) is not None:
            rate = self.solver.kappa_rate * 2 * self.solver.beta
            stepped = ascend(kappa, lam, self.store.raw("sent", rows), rate)
            self.store.put("kappa_out", rows, stepped)

    def record(self, record: Record) -> None:
        self.variables.record(record)

    def carried_input(self, rows: Rows) -> Tensor | None:
        return self.variables.lam(rows) if self.variables.carried[0] else None

    def records(self) -> Tensors:
        return self.store.state()

    def load_records(self, records: Tensors) -> None:
        for name, value in channels_last(records).items():
            self.store.put(name, slice(0, self.store.samples), value)

    def state(self) -> State:
        return self.variables.state()

    def load_state(self, state: State) -> None:
        self.variables.load_state(state)


def couple_backward(
    key: Key,
    block: Block,
    x: Tensor,
    target: Tensor,
    kappa: Tensor | None,
    beta: float,
    factor: int,
    size: int,
) -> Coupling:
    """Couple x to its target, and back-propagate the coupling's mean over `size` samples."""
    # scale before rounding to x's format
    samples = size / block.loss_scale
    coupling = couple(x.detach(), target, kappa, beta, factor, samples)
    if x.requires_grad:
        with block.span("backward", key):
            paired(x, coupling.p_out).backward()
    return coupling
