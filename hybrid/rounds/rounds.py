"""The hybrid schedule: serial correction over a window, then sweeps of its sub-problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

from torch import Tensor

from hybrid.links import AgreedError, RankLinks
from hybrid.training.trace import Trace
from solvers.backprop import Backprop
from solvers.base import Block, PhaseStats, Solver, Window
from solvers.passes.bubble import BubbleFill

_FILL = "fill."
"""Before the names of what the solver in the gaps keeps."""


class DivergedError(AgreedError):
    """The loss is no longer a number; every rank knows."""


@dataclass
class PhaseReport:
    """One phase over some rounds, as all ranks agree on it."""

    phase: str
    samples: int
    loss: float
    accuracy: float
    seconds: float
    """Of the slowest rank."""
    residual: list[float] = field(default_factory=list)
    """Relative primal residual ||lam_{k+1} - x_k|| / ||x_k|| at each cut."""
    primal: list[float] = field(default_factory=list)
    """||lam - x|| at each cut over the samples of the last sweep; empty without an exchange."""
    dual: list[float] = field(default_factory=list)
    """||rho (lam - old lam)||, rho = 2 beta, likewise."""
    notices: list[str] = field(default_factory=list)


@dataclass
class Rounds:
    """Drives one rank through its rounds.

        round   serial phase    correction.train: W exact steps, recorded; `fill` works in its gaps
                parallel phase  solver.train: sweeps over the records

    Only every `correct_every`-th round has a serial phase; in the others, and in all of them if it
    is 0, a forward pass alone makes the records. If the windows' records are `kept`, they live on
    from one correction to the next, and those rounds are parallel phases only.

    A standalone solver trains alone in the rounds without a serial phase, and not at all in those
    with one, before which it is drained, as at the end of an epoch.

    Without a solver there is no parallel phase. The ranks agree on losses and residuals at the end
    of every call of `run`, not in between. When the residual of a cut has grown by more than
    `return_ratio` since the last call, the parallel phase does harm: one call stays serial.
    """

    block: Block
    links: RankLinks
    correction: Backprop
    solver: Solver | None
    fill: BubbleFill | None = None
    observe: bool = False
    """Record in a pass of its own (the windows' images differ from the trained ones)."""
    correct_every: int = 1
    statistics: bool = False
    """Move BatchNorm's running statistics in rounds over kept records, by a forward pass."""
    return_ratio: float = 0.0
    news: Callable[[], Any] = str
    """What this rank has to tell the others when they report."""
    trace: Trace = field(default_factory=Trace)
    probe: list[float] = field(default_factory=list)
    """Residuals of the last call with whole windows; empty after a call that stayed serial."""
    length: int = 0
    """Mini-batches of the longest window so far."""
    resting: bool = False
    count: int = 0
    """Rounds so far."""
    recorded: bool = False
    """Whether kept records have been made."""
    heard: list[Any] = field(default_factory=list)
    """Every rank's news, as of the last call."""
    returns: int = 0
    """Calls that stayed serial because of the residual."""

    def run(
        self,
        windows: Sequence[tuple[Window, Window]],
        first_step: int,
        epoch: int,
        ends_epoch: bool = False,
    ) -> list[PhaseReport]:
        """Run one round for each (trained, swept) pair of windows; report their phases.

        What a standalone solver has under way at the end of an epoch is finished in its time.

        Raises DivergedError on all ranks, naming the step, if a loss is not finite.
        """
        serial, parallel = PhaseStats(), PhaseStats()
        sweeping = self.solver is not None and not self.resting
        fill = None if self.resting else self.fill
        length = max(len(swept.batches) for _, swept in windows)
        for trained, swept in windows:
            corrected = bool(self.correct_every) and self.count % self.correct_every == 0
            self.count += 1
            if corrected:
                with parallel.timed(self.links):
                    self.drain()
                with self.trace.span("serial"):
                    _add(serial, self.correction.train(self.block, self.links, trained, fill))
            if sweeping and self.solver is not None and not (corrected and self.alone):
                if not self.alone:
                    _add(serial, self._record(swept, corrected))
                with self.trace.span("parallel"):
                    own = trained if self.alone else swept
                    part = self.solver.train(self.block, self.links, own)
                if len(swept.batches) < length:
                    part.squares = []
                _add(parallel, part)
        if ends_epoch:
            with parallel.timed(self.links):
                self.drain()
        if self.alone and not parallel.samples:
            serial.seconds += parallel.seconds  # of a drain alone
        if fill is not None:
            _add(parallel, fill.stats)
            fill.stats = PhaseStats()
        worked = bool(parallel.samples) if self.alone else sweeping or fill is not None
        mine = [_summary(serial, self.block), _summary(parallel, self.block)]
        gathered = self.links.all_gather((mine, self.news()))
        everyone = [phases for phases, _ in gathered]
        self.heard = [news for _, news in gathered]
        reports = [
            _merge(phase, [rank[i] for rank in everyone])
            for i, phase in enumerate(("serial", "parallel"))
            if (worked if i else serial.samples)
        ]
        _check_finite(everyone, first_step, epoch)
        self._watch(reports, length)
        return reports

    def _record(self, swept: Window, corrected: bool) -> PhaseStats:
        """Make the records that the serial phase has not made."""
        fresh = corrected or not (swept.kept and self.recorded)
        self.recorded = True
        if corrected and self.observe:
            with self.trace.span("observe"):
                observed = self.correction.observe(self.block, self.links, swept)
            return PhaseStats(seconds=observed.seconds)
        if corrected or not (fresh or self.statistics):
            return PhaseStats()
        with self.trace.span("forward"):
            window = swept if fresh else replace(swept, recorder=None)
            return self.correction.propagate(self.block, self.links, window)

    @property
    def alone(self) -> bool:
        """Whether the solver needs no serial phase."""
        return self.solver is not None and self.solver.standalone

    def end_epoch(self) -> None:
        """Forget the epoch's records."""
        if self.fill is not None:
            self.fill.begin()

    def drain(self) -> None:
        """Finish what is under way between blocks; all ranks call it."""
        if self.solver is not None and self.alone:
            with self.trace.span("drain"):
                self.solver.drain(self.block, self.links)

    def _watch(self, reports: list[PhaseReport], length: int) -> None:
        if length < self.length:
            # the weights drift less over a shorter window: its residual compares with no other
            self.resting = False
            return
        self.length = length
        residual = reports[-1].residual if reports[-1].phase == "parallel" else []
        grown = any(
            now > self.return_ratio * before > 0
            for now, before in zip(residual, self.probe, strict=False)
        )
        self.resting = self.return_ratio > 0 and grown and self.correct_every == 1
        if self.resting:
            self.end_epoch()
        self.returns += self.resting
        self.probe = [] if self.resting else residual

    def state(self) -> dict[str, Any]:
        """JSON-able state for a checkpoint."""
        return {
            "probe": self.probe,
            "resting": self.resting,
            "returns": self.returns,
            "count": self.count,
            "length": self.length,
            "recorded": self.recorded,
        }

    def load_state(self, state: dict[str, Any], same_cuts: bool) -> None:
        """Take back `state`; residuals of other cuts mean nothing here."""
        self.resting, self.returns = state["resting"], state["returns"]
        self.count, self.length = state["count"], state["length"]
        self.probe = state["probe"] if same_cuts else []

    def flight_state(self) -> dict[str, Tensor]:
        """What the solver has under way on this block, for a checkpoint; all ranks call it."""
        return {} if self.solver is None else self.solver.flight_state(self.block, self.links)

    def load_flight_state(self, state: dict[str, Tensor]) -> None:
        """Take back what `flight_state` gave, by the same cuts."""
        if self.solver is not None:
            self.solver.load_flight_state(self.block, state)

    def cut_state(self) -> dict[str, Tensor]:
        """Tensors that the solvers keep at the cut before this block, for a checkpoint."""
        kept = {} if self.solver is None else self.solver.cut_state()
        filling = {} if self.fill is None else self.fill.solver.cut_state()
        return kept | {_FILL + name: tensor for name, tensor in filling.items()}

    def load_cut_state(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        """Take back what `cut_state` gave here (`before`) and on the next block (`after`).

        Empty for a cut that was not there.
        """
        sides = (before, after)
        if self.solver is not None:
            own = [{k: v for k, v in side.items() if not k.startswith(_FILL)} for side in sides]
            self.solver.load_cut_state(*own)
        if self.fill is not None:
            length = len(_FILL)
            own = [
                {k[length:]: v for k, v in side.items() if k.startswith(_FILL)} for side in sides
            ]
            self.fill.solver.load_cut_state(*own)


def _add(total: PhaseStats, part: PhaseStats) -> None:
    total.samples += part.samples
    total.steps += part.steps
    total.seconds += part.seconds
    total.losses += part.losses
    total.correct += part.correct
    total.squares += part.squares
    total.exchanged += part.exchanged
    total.notices += part.notices


def _summary(stats: PhaseStats, block: Block) -> dict[str, Any]:
    losses = stats.per_step_losses()
    bad = next((i for i, loss in enumerate(losses) if not isfinite(loss)), -1)
    return {
        "samples": stats.samples,
        "loss": sum(losses) / len(losses) if losses else 0.0,
        "bad": bad,
        "correct": int(sum(int(c) for c in stats.correct)),
        "seconds": stats.seconds,
        "residual": stats.residual(),
        "norms": stats.residual_norms(),
        "notices": stats.notices,
    }


def _merge(phase: str, ranks: list[dict[str, Any]]) -> PhaseReport:
    last = ranks[-1]
    norms = [rank["norms"] for rank in ranks[1:] if rank["norms"] is not None]
    return PhaseReport(
        phase=phase,
        samples=last["samples"],
        loss=last["loss"],
        accuracy=last["correct"] / max(1, last["samples"]),
        seconds=max(rank["seconds"] for rank in ranks),
        residual=[rank["residual"] for rank in ranks[:-1]] if phase == "parallel" else [],
        primal=[primal for primal, _ in norms],
        dual=[dual for _, dual in norms],
        notices=last["notices"],
    )


def _check_finite(everyone: list[list[dict[str, Any]]], first_step: int, epoch: int) -> None:
    for i, phase in enumerate(("serial", "parallel")):
        bad = [rank[i]["bad"] for rank in everyone if rank[i]["bad"] >= 0]
        if bad:
            what = "the loss" if phase == "serial" else "a sub-problem's loss"
            raise DivergedError(
                f"{what} is not finite at {phase} step {first_step + min(bad)} (epoch {epoch + 1})"
            )


def as_json(report: PhaseReport) -> dict[str, Any]:
    """A report as a line of metrics.jsonl."""
    return {k: v for k, v in asdict(report).items() if v or k not in ("primal", "dual", "notices")}
