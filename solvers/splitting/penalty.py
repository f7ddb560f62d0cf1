"""Quadratic penalty: blocks coupled by beta ||lam - x||^2 at every cut (Sun et al., 2009.01462)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from hybrid.solvers.acting import Acts, Count, NotNegative, OverOne, Positive, Share
from hybrid.solvers.base import Setup, Solver, SubProblems, program_of, values_of
from hybrid.solvers.blocks.buffers import frozen_statistics
from hybrid.solvers.blocks.draws import Key
from hybrid.solvers.kernels import Constraint, Stepped, ascend, step
from hybrid.solvers.splitting.auxiliary_store import AuxiliaryStore
from hybrid.solvers.splitting.coefficients import Coefficients
from hybrid.solvers.splitting.store import FORMATS
from hybrid.solvers.splitting.subproblem import classification_step, coupling_step
from hybrid.solvers.windows import Batch, Classified, PhaseStats, Rows, Window

CORRECTED = Acts(
    "corrections give the adjoint to start from (rounds.correct_every is above 0)",
    lambda run: run.setup.correct_every,
)
LAM_STEPS = Acts(
    "lam takes steps, between several sweeps or from carried records",
    lambda run: run.solver.steps_lam(run.setup),
)
LAM_STEPS_OR_STARTS = Acts(
    "lam takes steps, between several sweeps or as it starts (solver.lam_start 'stepped')",
    lambda run: (
        run.solver.steps_lam(run.setup)
        or (run.solver.lam_start == "stepped" and run.setup.correct_every)
    ),
)
COMPARED = Acts(
    "whole rounds, or the residuals of a third sweep and the second, can be compared "
    "(rounds.correct_every is 1, or rounds.sweeps at least 4)",
    lambda run: run.setup.correct_every == 1 or run.setup.sweeps >= 4,
)
OWN_STEPS = Acts(
    "local steps are their own, in a window or with rounds.fill_step 'own'",
    lambda run: run.setup.stored_batches or run.setup.own_fill or not run.setup.fills,
)
FILTERED = Acts("solver.filter is above 1", lambda run: run.solver.filter > 1)


@dataclass(frozen=True)
class Penalty(Solver):
    r"""min_{w, lam}  phi(x_{K-1}, y) + sum_k beta ||S lam_k - S x_{k-1}||^2,   k = 1..K-1.

    Local loss per sample, block k < K-1:  beta ||S lam_{k+1} - S x_k||^2,   block K-1:  phi
    A sweep, for each mini-batch of the window:
        p_out = -2 beta S^T (S lam_{k+1} - S x_k)   (k < K-1),   d phi / d x   (k = K-1)
        w_k   <- optimizer step with (1/N) sum over samples of (d x_k / d w_k)^T p_out
    and, if another sweep follows, with p_in = (d x_k / d lam_k)^T p_out:
        lam_k <- lam_k - eta (p_in + 2 b S^T (S lam_k - S x_{k-1})),    eta = lam_step / (2 b)

    where b is beta, or the separate lam_beta: a large beta undoes the step that the weights have
    just made, and a large b keeps lam close to x. With lam_step < 1 the error is multiplied by
    lam_step each time it goes from a cut to the one before, and under a filter by 1 / filter^2,
    too, since S S^T = I / filter^2. With beta_unit "energy" both are divided by the mean
    ||S lam_k||^2 of the window's first record, rounded to a power of two, so that they mean the
    same at every cut. Residual balancing doubles both at a cut after a window where the primal
    residual's norm is more than balance_ratio times the dual's, and halves them in the opposite
    case.

    lam starts at the activations that an exact pass recorded ("feasible"), or one lam step from
    them ("stepped"): lam_{k+1} = x_k - eta p_{k+1}, which both ranks of a cut know without a
    message. The two sides of a cut exchange S x_{k-1} (up) and the new S lam_k (down) between
    sweeps; a single sweep sends nothing. S averages over filter x filter pixels.
    """

    name: ClassVar[str] = "penalty"
    alternates: ClassVar[bool] = True
    fills: ClassVar[bool] = True
    captures: ClassVar[bool] = True

    beta: Positive = 5e-4
    """Penalty coefficient, of the squared norm over one sample's C, H, W."""
    beta_unit: Literal["square", "energy"] = "square"
    """What beta multiplies: squared norms, or squared norms over the activations' energy."""
    lam_beta: Annotated[Positive | None, LAM_STEPS_OR_STARTS] = None
    """Penalty coefficient of the steps of lam (and of kappa); unset: beta."""
    lam_step: Annotated[NotNegative, LAM_STEPS_OR_STARTS] = 1.0
    """Step of lam between sweeps, in units of 1 / (2 lam_beta)."""
    lam_start: Annotated[Literal["feasible", "stepped"], CORRECTED] = "stepped"
    """Where lam starts: the recorded activations, or one lam step from them."""
    local_lr: Positive = 0.6
    """Learning rate of the parallel phase, relative to the schedule's."""
    momentum: Annotated[Share | None, OWN_STEPS] = None
    """Momentum of the parallel phase's own SGD; unset: it shares the exact pass's optimizer."""
    clip_norm: NotNegative = 0.0
    """Largest norm of one block's gradient in the parallel phase; 0: no clipping."""
    filter: Count = 1
    """Side of the squares that the coupling averages over (the downsampling filter S)."""
    filter_mode: Annotated[Literal["coupling", "input"], FILTERED] = "coupling"
    """Keep lam_k exact and filter the coupling only, or store S lam_k and feed its upsampling."""
    storage: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of what is stored and exchanged."""
    balance_ratio: Annotated[OverOne, LAM_STEPS] = 0.0
    """Ratio of primal to dual residual, either way, at which beta changes, usually 10; 0: never."""
    return_ratio: Annotated[Positive, COMPARED] = 3.0
    """Growth of a cut's relative residual between probes at which training returns to serial."""

    def moves(self, setup: Setup) -> bool:
        """Whether auxiliary variables move, not only weights."""
        return setup.exchanges

    def steps_lam(self, setup: Setup) -> bool:
        """Whether lam takes steps of `lam_step` once it has started."""
        return self.moves(setup)

    def buffers(self, setup: Setup) -> tuple[list[str], list[str]]:
        """Names of what is stored per sample at the cut before and at the cut after a block."""
        return ["lam"], ["target"] + (["sent"] if self.moves(setup) else [])

    def memory(self, setup: Setup, index: int) -> int:
        before, after = self.buffers(setup)
        lam, out = values_of(setup.shape_before(index)), values_of(setup.shape_after(index))
        values = len(after) * (out // self.filter**2)
        for name in before:
            whole = name == "lam" and self.filter_mode == "coupling"
            values += lam // (1 if whole else self.filter**2)
        return setup.samples * values * FORMATS[self.storage].itemsize

    def coefficients(self) -> Coefficients:
        """Those of a cut at the start."""
        return Coefficients(self.beta, self.beta if self.lam_beta is None else self.lam_beta)

    def layout(self) -> list[object]:
        return [self.filter, self.filter_mode]


@program_of(Penalty)
class PenaltyProgram(AuxiliaryStore, SubProblems):
    """One rank's auxiliary variables, and its steps on its local loss."""

    solver: Penalty

    def begin(self) -> None:
        super().begin()
        solver, block = self.solver, self.block
        self.local_lr, self.clip_norm = solver.local_lr, solver.clip_norm
        self._sweep = 0
        if solver.momentum is not None:
            block.own_optimizer(solver.momentum)

    def train(self, window: Window) -> PhaseStats:
        """Sweep the window; with several sweeps, stop early when a cut's residual grows.

        Losses, scores and residuals are the last sweep's. Where lam has moved, beta is balanced.
        """
        total = PhaseStats()
        before: list[float] = []
        links, carried = self.links, self.setup.carried
        self._carried = (False, False)
        with total.timed(links), frozen_statistics(self.block.module):
            if self.solver.moves(self.setup) and self.solver.beta_unit == "energy":
                # that of lam's owner: if messages are rounded, the two sides measured differently
                energies = [*links.agree(self._before.energy), 1.0]
                self._after.energy = energies[self.block.index + 1]
            for number in range(window.sweeps):
                exchange = carried or number < window.sweeps - 1
                stats = self.sweep(window, number, exchange)
                total.losses, total.correct = stats.losses, stats.correct
                total.seen = stats.seen
                total.samples, total.squares = stats.samples, stats.squares
                total.exchanged = stats.exchanged or total.exchanged
                total.steps += stats.steps
                if exchange:
                    residuals = links.agree(stats.residual())
                    limits = [self.solver.return_ratio * b for b in before]
                    if not all(r <= limit for r, limit in zip(residuals, limits, strict=False)):
                        total.notices += self._early_return_notice(window.sweeps - number - 1)
                        break
                    # in the first sweep lam is feasible: its residual is no measure for the next
                    before = residuals if number else []
            links.flush()
        if self.solver.moves(self.setup) and self.solver.balance_ratio:
            self._balance(total)
        return total

    def _balance(self, stats: PhaseStats) -> None:
        """Change beta at a cut; both its sides decide alike."""
        index = self.block.index
        for k, norms in enumerate(self.links.agree(stats.residual_norms())):
            if norms is not None and k in (index, index + 1):
                cut = self._before if k == index else self._after
                cut.balance(*norms, self.solver.balance_ratio)

    def sweep(self, window: Window, number: int, exchange: bool) -> PhaseStats:
        """Solve every sub-problem of the window once; with `exchange`, lam and kappa step."""
        stats = PhaseStats()
        self._sweep = number
        awaited: Rows | None = None
        for rows, batch in window.sweep(number):
            self._visit(batch, rows, exchange, stats)
            if exchange and not self.block.last:
                # one mini-batch later, so that no rank waits and no messages pile up
                if awaited is not None:
                    self._receive(awaited, self.links.from_next())
                awaited = rows
        if awaited is not None:
            self._receive(awaited, self.links.from_next())
        return stats

    def _early_return_notice(self, sweeps: int) -> list[str]:
        """A notice that sweeps are left out."""
        if not sweeps:
            return []
        return [
            f"{self.solver.name}: a cut's residual grew more than solver.return_ratio "
            f"({self.solver.return_ratio:g}) times from one sweep to the next: "
            f"{sweeps} sweep{'s' if sweeps > 1 else ''} left out"
        ]

    def _visit(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        """Solve one mini-batch's sub-problem; with `exchange`, step lam_k and send x_k up."""
        x, p_in = self.gradient(batch, rows, exchange, stats)
        self._step(batch)
        if exchange and not self.block.last:
            self._send_output(rows, x)
        if exchange and p_in is not None:
            new = self._lam_update(rows, self._stored_lam(rows), self.links.from_previous(), p_in)
            self._send_lam(rows, new, stats)

    def gradient(
        self, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats, visit: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Leave the local loss's gradient in the parameters; gives x_k and, if asked for, p_in."""
        block = self.block
        lam = batch.images() if block.first else self._input(rows)
        with_input = with_input and not block.first
        key = (1, batch.step, self._sweep, visit)
        if block.last:
            run = self._captured(classification_step, key, block, with_input, batch.size)
            labels = batch.labels()
            with block.span("local step", key):
                x, p_in, loss, correct, *seen = run(lam, labels, block.part_weight(batch, labels))
            stats.classified(Classified(loss, correct, seen=tuple(seen) or None))
        else:
            target, kappa = self._store.raw("target", rows), self._multiplier("kappa_out", rows)
            factor = self.solver.filter
            given = with_input, batch.size, self._after.weight_beta, factor
            run = self._captured(coupling_step, key, block, *given)
            with block.span("local step", key):
                x, p_in, loss, squares = run(lam, target, kappa)
            stats.losses.append(loss)
            stats.squares.append(squares)
        stats.samples += len(batch)
        stats.steps += 1
        return x, p_in

    def _captured(self, compute: Callable[..., Any], key: Key, *given: Any) -> Callable[..., Any]:
        """`compute` with its constants; a replay of its CUDA graph where there are graphs."""
        graphs = self.block.graphs
        run = partial(compute, key, *given)
        return run if graphs is None else partial(graphs, (compute, *given[1:]), run)

    def _step(self, batch: Batch) -> None:
        self.block.step("local", batch.learning_rate * self.local_lr, self.clip_norm)

    def _send_output(self, rows: Rows, x: Tensor) -> None:
        """Send S x_k to the owner of lam_{k+1}."""
        sent = self._store.message(self._pool(x))
        self._store.put("sent", rows, sent)
        self.links.to_next(sent)

    def _lam_update(self, rows: Rows, lam: Tensor, x: Tensor, p_in: Tensor) -> Stepped:
        return step(
            lam,
            x,
            self._multiplier("kappa_in", rows),
            p_in,
            self._before.step_beta,
            self._eta,
            self._kappa_rate * 2 * self._before.step_beta,
            self.solver.filter,
            flat=not self._whole,
            constraint=self._constraint,
        )

    def _send_lam(self, rows: Rows, new: Stepped, stats: PhaseStats) -> None:
        """Store the new lam_k and kappa_k, and send S lam_k down."""
        self._store.put("lam", rows, new.lam if self._whole else new.shared)
        self.links.to_previous(self._message(new))
        if new.kappa is not None:
            self._store.put("kappa_in", rows, new.kappa)
        stats.exchanged.append(new.squares)

    def _message(self, new: Stepped) -> Tensor:
        """What the other side of a cut needs to know of a step."""
        return new.shared

    def _receive(self, rows: Rows, lam: Tensor) -> None:
        """Store the new S lam_{k+1}, which its owner has sent."""
        self._store.put("target", rows, lam)
        kappa = self._multiplier("kappa_out", rows)
        if kappa is not None:
            x, rate = self._store.raw("sent", rows), self._kappa_rate * 2 * self._after.step_beta
            self._store.put("kappa_out", rows, ascend(kappa, lam, x, rate))

    def _multiplier(self, name: str, rows: Rows) -> Tensor | None:
        """kappa as it is stored; None: the method has none."""
        return None

    @property
    def _constraint(self) -> Constraint | None:
        """The set in which lam_k must lie; None: no constraint."""
        return None

    @property
    def _kappa_rate(self) -> float:
        """Step of the multipliers, in units of 2 beta."""
        return 0.0

    @property
    def _eta(self) -> float:
        eta: float = self.solver.lam_step / (2 * self._before.step_beta)
        return eta
