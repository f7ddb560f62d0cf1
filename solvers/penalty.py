"""Quadratic penalty: blocks coupled by beta ||lam - x||^2 at every cut (Sun et al., 2009.01462)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from solvers.base import (
    Setup,
    Shape,
    Solver,
    SubProblems,
    check_choices,
    check_momentum,
    check_numbers,
    program_of,
    values_of,
)
from solvers.blocks.draws import Key
from solvers.blocks.norms import frozen_statistics
from solvers.kernels import Held, Stepped, ascend, pool, step, upsample
from solvers.state import State, Tensors
from solvers.variables.store import FORMATS, Store, channels_last
from solvers.variables.subproblem import approach, classify
from solvers.windows import Batch, Classified, PhaseStats, Record, Rows, Window


@dataclass(frozen=True)
class Penalty(Solver):
    r"""min_{w, lam}  phi(x_{K-1}, y) + sum_k beta ||S lam_k - S x_{k-1}||^2,   k = 1..K-1.

    Local loss per sample, block k < K-1:  beta ||S lam_{k+1} - S x_k||^2,   block K-1:  phi
    A sweep, for each mini-batch of the window:
        p_out = -2 beta S^T (S lam_{k+1} - S x_k)   (k < K-1),   d phi / d x   (k = K-1)
        w_k   <- optimiser step with (1/N) sum over samples of (d x_k / d w_k)^T p_out
    and, if another sweep follows, with p_in = (d x_k / d lam_k)^T p_out:
        lam_k <- lam_k - eta (p_in + 2 beta S^T (S lam_k - S x_{k-1})),    eta = lam_step / (2 beta)

    lam starts at the activations an exact pass recorded ("feasible"), or one lam step from them
    ("stepped"): lam_{k+1} = x_k - eta p_{k+1}, which both ranks of a cut know without a message.
    The two sides of a cut exchange S x_{k-1} (up) and the new S lam_k (down) between sweeps; a
    single sweep sends nothing. S averages over filter x filter pixels.
    """

    name: ClassVar[str] = "penalty"
    alternates: ClassVar[bool] = True
    fills: ClassVar[bool] = True
    captures: ClassVar[bool] = True

    beta: float = 5e-4
    """Penalty coefficient, of the squared norm over one sample's C, H, W."""
    lam_step: float = 0.1
    """Step of lam between sweeps, in units of 1 / (2 beta)."""
    lam_start: Literal["feasible", "stepped"] = "stepped"
    """Where lam starts: the recorded activations, or one lam step from them."""
    local_lr: float = 0.6
    """Learning rate of the parallel phase, relative to the schedule's."""
    momentum: float | None = None
    """Momentum of the parallel phase's own SGD; unset: it shares the exact pass's optimiser."""
    clip_norm: float = 0.0
    """Largest norm of one block's gradient in the parallel phase; 0: no clipping."""
    filter: int = 1
    """Side of the squares that the coupling averages over (the downsampling filter S)."""
    filter_mode: Literal["coupling", "input"] = "coupling"
    """Keep lam_k exact and filter the coupling only, or store S lam_k and feed its upsampling."""
    storage: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of what is stored and exchanged."""
    return_ratio: float = 3.0
    """Growth of a cut's relative residual between probes at which training returns to serial."""

    def __post_init__(self) -> None:
        check_numbers(
            self,
            positive=("beta", "local_lr", "return_ratio"),
            not_negative=("lam_step", "clip_norm"),
        )
        if self.filter < 1:
            raise ValueError(f"filter is {self.filter}; it must be at least 1 (1: no filter)")
        check_momentum(self.momentum)
        check_choices(self)

    def check(self, setup: Setup) -> None:
        if setup.fills and not setup.window and not setup.own_fill:
            why = "gaps are filled with rounds.fill_step=added, which has no step of its own"
            self.refuse_inert(why, "momentum")
        if not setup.correct_every:
            self.refuse_inert("no correction gives the adjoint for a first step", "lam_start")
        if not setup.exchanges and (self.lam_start == "feasible" or not setup.correct_every):
            self.refuse_inert("lam stays where it starts in a single sweep or a gap", "lam_step")
        if setup.correct_every != 1 and setup.sweeps < 4:
            why = "it compares whole rounds, or a fourth sweep's residual with the third's"
            self.refuse_inert(why, "return_ratio")
        if self.filter == 1:
            self.refuse_inert("solver.filter is 1", "filter_mode")

    def buffers(self, exchanges: bool) -> tuple[list[str], list[str]]:
        """Names of what is stored per sample at the cut before and at the cut after a block."""
        return ["lam"], ["target"] + (["sent"] if exchanges else [])

    def memory(self, setup: Setup, index: int) -> int:
        before, after = self.buffers(setup.exchanges)
        lam, out = values_of(setup.shape_before(index)), values_of(setup.shape_after(index))
        values = len(after) * (out // self.filter**2)
        for name in before:
            whole = name == "lam" and self.filter_mode == "coupling"
            values += lam // (1 if whole else self.filter**2)
        return setup.samples * values * FORMATS[self.storage].itemsize

    def layout(self) -> list[object]:
        return [self.filter, self.filter_mode]


@program_of(Penalty)
class PenaltyProgram(SubProblems):
    """One rank's auxiliary variables, and its steps on its local loss."""

    solver: Penalty

    def begin(self) -> None:
        solver, block = self.solver, self.block
        self.local_lr, self.clip_norm = solver.local_lr, solver.clip_norm
        self._store = Store(self.setup.samples, solver.storage)
        self._whole = solver.filter_mode == "coupling"
        self._carried = (False, False)
        self._sweep = 0
        if solver.momentum is not None:
            block.own_optimiser(solver.momentum)

    def record(self, record: Record) -> None:
        """Start the auxiliary variables of the record's rows.

        Without adjoints, which a forward pass alone does not give, they are the activations; and
        those that a checkpoint gave stay.
        """
        before, after = self._carried
        lam = None if before and record.p_in is None else record.lam
        out = None if after and record.p_out is None else record.out
        self._begin(replace(record, lam=lam, out=out))

    def carried_input(self, rows: Rows) -> Tensor | None:
        return self._input(rows) if self._carried[0] else None

    def _begin(self, record: Record) -> None:
        rows = record.rows
        if record.lam is not None:
            lam = self._held_in(self._start(record.lam, record.p_in))
            self._store.put("lam", rows, lam if self._whole else self._pool(lam))
        if record.out is not None:
            target = self._held_out(self._start(record.out, record.p_out))
            self._store.put("target", rows, self._pool(target))

    def records(self) -> Tensors:
        return self._store.state()

    def load_records(self, records: Tensors) -> None:
        for name, value in channels_last(records).items():
            self._store.put(name, slice(0, self._store.samples), value)

    def state(self) -> State:
        return State(cut=self._store.state(["lam", "kappa_in"]) if self.setup.carried else {})

    def load_state(self, state: State) -> None:
        everything = slice(0, self._store.samples)
        index, setup = self.block.index, self.setup
        before = self._fitting(channels_last(state.cut), setup.shape_before(index))
        after = self._fitting(channels_last(state.after), setup.shape_after(index))
        for name in ("lam", "kappa_in"):
            if name in before:
                self._store.put(name, everything, before[name])
        self._carried = ("lam" in before, "lam" in after)
        if "lam" in after:
            lam = after["lam"]
            self._store.put("target", everything, self._shared(lam) if self._whole else lam)
            if "kappa_in" in after:
                self._store.put("kappa_out", everything, after["kappa_in"])

    def _fitting(self, kept: Tensors, shape: Shape | None) -> Tensors:
        """What a cut has kept; RuntimeError unless it is nothing, or all of its shape."""
        wanted = [n for n in ("lam", "kappa_in") if n in self.solver.buffers(exchanges=True)[0]]
        found: Tensors = {name: kept[name] for name in wanted if name in kept}
        if found and sorted(found) != sorted(wanted):
            raise RuntimeError(f"{' and '.join(found)} without the rest of {', '.join(wanted)}")
        for name, tensor in found.items():
            channels, *pixels = shape or (0,)
            side = 1 if name == "lam" and self._whole else self.solver.filter
            expected = (self._store.samples, channels, *(size // side for size in pixels))
            if tensor.shape != expected or not tensor.is_floating_point():
                raise RuntimeError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}")
        return found

    def train(self, window: Window) -> PhaseStats:
        """Sweep the window; with several sweeps, stop early when a cut's residual grows.

        Losses, answers and residuals are the last sweep's.
        """
        total = PhaseStats()
        before: list[float] = []
        links, carried = self.links, self.setup.carried
        self._carried = (False, False)
        with total.timed(links.now), frozen_statistics(self.block.module):
            for number in range(window.sweeps):
                exchange = carried or number < window.sweeps - 1
                stats = self.sweep(window, number, exchange)
                total.losses, total.correct = stats.losses, stats.correct
                total.samples, total.squares = stats.samples, stats.squares
                total.exchanged = stats.exchanged or total.exchanged
                total.steps += stats.steps
                if exchange:
                    residuals = links.all_gather(stats.residual())
                    limits = [self.solver.return_ratio * b for b in before]
                    if not all(r <= limit for r, limit in zip(residuals, limits, strict=False)):
                        total.notices += self._dropped(window.sweeps - number - 1)
                        break
                    # the first sweep meets feasible lam: its residual is no measure for the next
                    before = residuals if number else []
            links.flush()
        return total

    def sweep(self, window: Window, number: int, exchange: bool) -> PhaseStats:
        """Solve every sub-problem of the window once; exchange lam (and kappa) if asked to."""
        stats = PhaseStats()
        self._sweep = number
        awaited: Rows | None = None
        for rows, batch in window.sweep(number):
            self._visit(batch, rows, exchange, stats)
            if exchange and not self.block.last:
                # one mini-batch behind, so that nobody waits and nothing piles up
                if awaited is not None:
                    self._receive(awaited, self.links.from_next())
                awaited = rows
        if awaited is not None:
            self._receive(awaited, self.links.from_next())
        return stats

    def _dropped(self, sweeps: int) -> list[str]:
        """What to say of sweeps that are left out."""
        if not sweeps:
            return []
        return [
            f"{self.solver.name}: a cut's residual grew more than solver.return_ratio "
            f"({self.solver.return_ratio:g}) times from one sweep to the next: "
            f"{sweeps} sweep{'s' if sweeps > 1 else ''} left out"
        ]

    def _visit(self, batch: Batch, rows: Rows, exchange: bool, stats: PhaseStats) -> None:
        """Solve one mini-batch's sub-problem; with an exchange, step lam_k and hand x_k up."""
        x, p_in = self.gradient(batch, rows, exchange, stats)
        self._step(batch)
        if exchange and not self.block.last:
            self._hand_up(rows, x)
        if exchange and p_in is not None:
            new = self._stepped(rows, self._raw_own(rows), self.links.from_previous(), p_in)
            self._hand_down(rows, new, stats)

    def gradient(
        self, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats, visit: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Leave the local loss's gradient in the parameters; give x_k and, if asked, p_in."""
        block = self.block
        lam = batch.images() if block.first else self._input(rows)
        with_input = with_input and not block.first
        key = (1, batch.step, self._sweep, visit)
        if block.last:
            run = self._computed(classify, key, block, with_input)
            x, p_in, loss, correct = run(lam, batch.labels())
            stats.classified(Classified(loss, correct))
        else:
            target, kappa = self._store.raw("target", rows), self._multiplier("kappa_out", rows)
            factor = self.solver.filter
            run = self._computed(approach, key, block, with_input, self._beta_out, factor)
            x, p_in, loss, squares = run(lam, target, kappa)
            stats.losses.append(loss)
            stats.squares.append(squares)
        stats.samples += len(batch)
        stats.steps += 1
        return x, p_in

    def _computed(self, compute: Callable[..., Any], key: Key, *given: Any) -> Callable[..., Any]:
        """`compute` with its constants, as a graph where there are graphs."""
        graphs = self.block.graphs
        run = partial(compute, key, *given)
        return run if graphs is None else partial(graphs, (compute, *given[1:]), run)

    def _step(self, batch: Batch) -> None:
        self.block.step("local", batch.learning_rate * self.local_lr, self.clip_norm)

    def _hand_up(self, rows: Rows, x: Tensor) -> None:
        """Send S x_k to the owner of lam_{k+1}."""
        sent = self._store.message(self._pool(x))
        self._store.put("sent", rows, sent)
        self.links.to_next(sent)

    def _stepped(self, rows: Rows, lam: Tensor, x: Tensor, p_in: Tensor) -> Stepped:
        return step(
            lam,
            x,
            self._multiplier("kappa_in", rows),
            p_in,
            self._beta_in,
            self._eta_in,
            self._ascent * 2 * self._beta_in,
            self.solver.filter,
            flat=not self._whole,
            held=self._held,
        )

    def _hand_down(self, rows: Rows, new: Stepped, stats: PhaseStats) -> None:
        """Keep the stepped lam_k and kappa_k, hand S lam_k back."""
        self._store.put("lam", rows, new.lam if self._whole else new.shared)
        self.links.to_previous(new.shared)
        if new.kappa is not None:
            self._store.put("kappa_in", rows, new.kappa)
        stats.exchanged.append(new.squares)

    def _receive(self, rows: Rows, lam: Tensor) -> None:
        """Take the stepped S lam_{k+1} from its owner."""
        self._store.put("target", rows, lam)
        kappa = self._multiplier("kappa_out", rows)
        if kappa is not None:
            x, rate = self._store.raw("sent", rows), self._ascent * 2 * self._beta_out
            self._store.put("kappa_out", rows, ascend(kappa, lam, x, rate))

    def _multiplier(self, name: str, rows: Rows) -> Tensor | None:
        """kappa as it is stored, where the method has it."""
        return None

    def _held_in(self, lam: Tensor) -> Tensor:
        """lam within what the cut before this block holds it to."""
        return lam

    def _held_out(self, lam: Tensor) -> Tensor:
        """lam within what the cut after this block holds it to."""
        return lam

    @property
    def _held(self) -> Held | None:
        """The set that lam_k is held to; None: no constraint."""
        return None

    @property
    def _ascent(self) -> float:
        """Step of the multipliers, in units of 2 beta."""
        return 0.0

    @property
    def _beta_in(self) -> float:
        """Penalty at the cut before this block."""
        return self.solver.beta

    @property
    def _beta_out(self) -> float:
        """Penalty at the cut after this block."""
        return self.solver.beta

    @property
    def _eta_in(self) -> float:
        return self.solver.lam_step / (2 * self._beta_in)

    def _start(self, x: Tensor, p: Tensor | None) -> Tensor:
        if p is None or self.solver.lam_start == "feasible":
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) - self.solver.lam_step / (2 * self.solver.beta) * p.to(wide)

    def _input(self, rows: Rows) -> Tensor:
        """What this block computes from."""
        return self._own(rows)

    def _own(self, rows: Rows) -> Tensor:
        """lam_k, which this rank owns."""
        lam = self._store.get("lam", rows)
        return lam if self._whole else upsample(lam, self.solver.filter)

    def _raw_own(self, rows: Rows) -> Tensor:
        """lam_k in the store's number format."""
        lam = self._store.raw("lam", rows)
        return lam if self._whole else upsample(lam, self.solver.filter)

    def _pool(self, x: Tensor) -> Tensor:
        return pool(x, self.solver.filter)

    def _shared(self, lam: Tensor) -> Tensor:
        """S lam as it travels: of lam as it is kept, so that a checkpoint of lam holds it too."""
        return self._store.message(self._pool(self._store.rounded(lam)))
