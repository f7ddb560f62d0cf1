"""Quadratic penalty: blocks coupled by beta ||lam - x||^2 at every cut (Sun et al., 2009.01462)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from solvers.base import (
    Batch,
    Block,
    Links,
    PhaseStats,
    Recorder,
    Rows,
    Shape,
    Solver,
    Window,
)
from solvers.blocks.clipping import clip_gradients, gradient_norms
from solvers.blocks.graphs import StepGraphs
from solvers.blocks.norms import frozen_statistics
from solvers.kernels import Held, Stepped, ascend, pool, step, upsample
from solvers.variables.store import FORMATS, Store, channels_last
from solvers.variables.subproblem import approach, classify


@dataclass
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
        for name in ("beta", "local_lr", "return_ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("lam_step", "clip_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or positive")
        if self.filter < 1:
            raise ValueError(f"filter is {self.filter}; it must be at least 1 (1: no filter)")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it must lie in [0, 1)")
        for name, hint in get_type_hints(type(self)).items():
            choices = get_args(hint)
            if get_origin(hint) is Literal and getattr(self, name) not in choices:
                value = getattr(self, name)
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")

    def prepare(self, block: Block, window_samples: int, exchanges: bool) -> None:
        """Make the store, and the phase's own optimiser if it has one."""
        self._store = Store(window_samples, self.storage)
        self._exchange = exchanges
        self._kept = False
        self._graphs: StepGraphs | None = None
        self._carried = (False, False)
        if self.momentum is not None:
            block.own_sgd(self.momentum)

    def buffers(self, exchanges: bool) -> tuple[list[str], list[str]]:
        """Names of what is stored per sample at the cut before and at the cut after a block."""
        return ["lam"], ["target"] + (["sent"] if exchanges else [])

    def store_bytes(
        self, lam: Shape | None, out: Shape | None, samples: int, exchanges: bool
    ) -> int:
        before, after = self.buffers(exchanges)
        size = FORMATS[self.storage].itemsize
        values = 0
        for name in before if lam is not None else ():
            assert lam is not None
            whole = name == "lam" and self.filter_mode == "coupling"
            values += prod(lam) // (1 if whole else self.filter**2)
        for _ in after if out is not None else ():
            assert out is not None
            values += prod(out) // self.filter**2
        return samples * values * size

    @property
    def recorder(self) -> Recorder:
        return self

    def record(
        self,
        rows: slice,
        lam: Tensor | None,
        p_in: Tensor | None,
        out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        """Start the auxiliary variables of `rows` from an exact pass.

        Without adjoints, which a forward pass alone does not give, they are the activations; and
        those that a checkpoint gave stay.
        """
        before, after = self._carried
        self._record(
            rows,
            None if before and p_in is None else lam,
            p_in,
            None if after and p_out is None else out,
            p_out,
        )

    def carried_input(self, rows: Rows) -> Tensor | None:
        return self._input(rows) if self._carried[0] else None

    def _record(
        self,
        rows: slice,
        lam: Tensor | None,
        p_in: Tensor | None,
        out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        if lam is not None:
            lam = self._held_in(self._start(lam, p_in))
            self._store.put("lam", rows, lam if self.filter_mode == "coupling" else self._pool(lam))
        if out is not None:
            self._store.put("target", rows, self._pool(self._held_out(self._start(out, p_out))))

    def records(self) -> dict[str, Tensor]:
        """All that is stored, by name."""
        return self._store.state()

    def load_records(self, records: dict[str, Tensor]) -> None:
        """Take back what `records` gave."""
        for name, value in channels_last(records).items():
            self._store.put(name, slice(0, self._store.samples), value)

    def cut_state(self) -> dict[str, Tensor]:
        return self._store.state(["lam", "kappa_in"]) if self._kept else {}

    def load_cut_state(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        everything = slice(0, self._store.samples)
        before, after = channels_last(before), channels_last(after)
        for name, value in before.items():
            self._store.put(name, everything, value)
        self._carried = ("lam" in before, "lam" in after)
        if "lam" in after:
            lam = after["lam"]
            whole = self.filter_mode == "coupling"
            self._store.put("target", everything, self._shared(lam) if whole else lam)
            if "kappa_in" in after:
                self._store.put("kappa_out", everything, after["kappa_in"])

    def train(self, block: Block, links: Links, window: Window) -> PhaseStats:
        """Sweep the window; with several sweeps, stop early when a cut's residual grows.

        Losses, answers and residuals are the last sweep's.
        """
        total = PhaseStats()
        before: list[float] = []
        self._kept, self._graphs = window.kept, block.graphs
        self._carried = (False, False)
        with total.timed(links), frozen_statistics(block.module):
            for number in range(window.sweeps):
                exchange = window.kept or number < window.sweeps - 1
                stats = self.sweep(block, links, window, number, exchange)
                total.losses, total.correct = stats.losses, stats.correct
                total.samples, total.squares = stats.samples, stats.squares
                total.exchanged = stats.exchanged or total.exchanged
                total.steps += stats.steps
                if exchange:
                    residuals = links.all_gather(stats.residual())
                    limits = [self.return_ratio * b for b in before]
                    if not all(r <= limit for r, limit in zip(residuals, limits, strict=False)):
                        break
                    # the first sweep meets feasible lam: its residual is no measure for the next
                    before = residuals if number else []
            links.flush()
        return total

    def sweep(
        self, block: Block, links: Links, window: Window, number: int, exchange: bool
    ) -> PhaseStats:
        """Solve every sub-problem of the window once; exchange lam (and kappa) if asked to."""
        stats = PhaseStats()
        awaited: Rows | None = None
        for rows, batch in window.sweep(number):
            self._visit(block, links, batch, rows, exchange, stats)
            if exchange and not block.last:
                # one mini-batch behind, so that nobody waits and nothing piles up
                if awaited is not None:
                    self._receive(awaited, links.from_next())
                awaited = rows
        if awaited is not None:
            self._receive(awaited, links.from_next())
        return stats

    def _visit(
        self,
        block: Block,
        links: Links,
        batch: Batch,
        rows: Rows,
        exchange: bool,
        stats: PhaseStats,
    ) -> None:
        """Solve one mini-batch's sub-problem; with an exchange, step lam_k and hand x_k up."""
        x, p_in = self._local_step(block, batch, rows, exchange, stats)
        if exchange and not block.last:
            self._hand_up(links, rows, x)
        if exchange and p_in is not None:
            self._update(links, rows, p_in, stats)

    def gradient(
        self, block: Block, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats
    ) -> tuple[Tensor, Tensor | None]:
        """Leave the local loss's gradient in the parameters; give x_k and, if asked, p_in."""
        lam = batch.images() if block.first else self._input(rows)
        with_input = with_input and not block.first
        if block.last:
            labels = batch.labels()
            x, p_in, loss = self._computed(classify, block, with_input)(lam, labels)
            stats.classified(x, labels)
        else:
            target, kappa = self._store.raw("target", rows), self._multiplier("kappa_out", rows)
            run = self._computed(approach, block, with_input, self._beta_out, self.filter)
            x, p_in, loss, squares = run(lam, target, kappa)
            stats.squares.append(squares)
        stats.losses.append(loss)
        stats.samples += len(batch)
        stats.steps += 1
        return x, p_in

    def _computed(self, compute: Callable[..., Any], *constants: Any) -> Callable[..., Any]:
        """`compute` with its constants, as a graph where there are graphs."""
        run = partial(compute, *constants)
        if self._graphs is None:
            return run
        return partial(self._graphs, (compute, *constants[1:]), run)

    def _local_step(
        self, block: Block, batch: Batch, rows: Rows, with_input: bool, stats: PhaseStats
    ) -> tuple[Tensor, Tensor | None]:
        x, p_in = self.gradient(block, batch, rows, with_input, stats)
        self._step(block, batch)
        return x, p_in

    def _step(self, block: Block, batch: Batch) -> None:
        if self.clip_norm:
            block.unscale("local")
            gradients = block.gradients()
            clip_gradients(gradients, self.clip_norm, gradient_norms(gradients))
        block.step("local", batch.learning_rate * self.local_lr)

    def _hand_up(self, links: Links, rows: Rows, x: Tensor) -> None:
        """Send S x_k to the owner of lam_{k+1}."""
        sent = self._store.message(self._pool(x))
        self._store.put("sent", rows, sent)
        links.to_next(sent)

    def _update(self, links: Links, rows: Rows, p_in: Tensor, stats: PhaseStats) -> None:
        """Step lam_k, which this rank owns, and hand S lam_k back."""
        x = links.from_previous()
        self._settle(links, rows, self._stepped(rows, self._raw_own(rows), x, p_in), stats)

    def _stepped(self, rows: Rows, lam: Tensor, x: Tensor, p_in: Tensor) -> Stepped:
        return step(
            lam,
            x,
            self._multiplier("kappa_in", rows),
            p_in,
            self._beta_in,
            self._eta_in,
            self._ascent * 2 * self._beta_in,
            self.filter,
            flat=self.filter_mode == "input",
            held=self._held,
        )

    def _settle(self, links: Links, rows: Rows, new: Stepped, stats: PhaseStats) -> None:
        """Keep the stepped lam_k and kappa_k, hand S lam_k back."""
        self._store.put("lam", rows, new.lam if self.filter_mode == "coupling" else new.shared)
        links.to_previous(new.shared)
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
        return self.beta

    @property
    def _beta_out(self) -> float:
        """Penalty at the cut after this block."""
        return self.beta

    @property
    def _eta_in(self) -> float:
        return self.lam_step / (2 * self._beta_in)

    def _start(self, x: Tensor, p: Tensor | None) -> Tensor:
        if p is None or self.lam_start == "feasible":
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) - self.lam_step / (2 * self.beta) * p.to(wide)

    def _input(self, rows: Rows) -> Tensor:
        """What this block computes from."""
        return self._own(rows)

    def _own(self, rows: Rows) -> Tensor:
        """lam_k, which this rank owns."""
        lam = self._store.get("lam", rows)
        return lam if self.filter_mode == "coupling" else upsample(lam, self.filter)

    def _raw_own(self, rows: Rows) -> Tensor:
        """lam_k in the store's number format."""
        lam = self._store.raw("lam", rows)
        return lam if self.filter_mode == "coupling" else upsample(lam, self.filter)

    def _pool(self, x: Tensor) -> Tensor:
        return pool(x, self.filter)

    def _shared(self, lam: Tensor) -> Tensor:
        """S lam as it travels: of lam as it is kept, so that a checkpoint of lam holds it too."""
        return self._store.message(self._pool(self._store.rounded(lam)))
