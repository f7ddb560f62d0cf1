"""Drives one rank through the rounds of a training; the ranks agree on the results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from hybrid.links import RankLinks
from hybrid.rounds.phase_report import (
    PHASES,
    DivergedError,
    PhaseReport,
    find_divergence,
    merge_shares,
    share_of_phase,
)
from hybrid.rounds.trace import Trace
from hybrid.solvers.base import Program
from hybrid.solvers.engine.engine import Engine
from hybrid.solvers.exact.exact_pass import ExactPass
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.solvers.local_work.work import LocalWork
from hybrid.solvers.state import State
from hybrid.solvers.windows import PhaseStats, Window

WindowPairs = Sequence[tuple[Window, Window]]
"""For each round: the window that is trained, and the one that is swept."""


class Phases(NamedTuple):
    """One rank's statistics of the two phases of a call."""

    serial: PhaseStats
    parallel: PhaseStats


class Status(NamedTuple):
    """A rank's report to the first rank at the end of a call, then what all ranks learn."""

    stop: str = ""
    """The signal that the rank, or the first of all, has received; empty without one."""
    due: bool = False
    """Whether, by the first rank's clock, it is time for a checkpoint."""
    failure: str = ""
    """The failure of a callback, which the first rank has; empty without one."""


@dataclass(frozen=True)
class Outcome:
    """What all ranks learn of a call; the first rank alone has whole reports."""

    reports: list[PhaseReport]
    status: Status
    grown: bool
    """Whether a residual has grown too much, so that the next call rests."""
    diverged: tuple[int, str] | None
    """The first step, and its phase, with a loss that is not finite."""


class Rounds(ABC):
    """One rank's rounds. The ranks agree on losses only at the end of every call of `run`.

        rank n   its share of the phases ->|                                   |-> outcome
        rank 0                             |-> reports, divergence, status  -->|

    What a rank sends and gets does not grow with their number: the first alone sees all shares.
    """

    alternates: bool
    """Whether the program sweeps over windows that a serial phase has gone over."""

    def __init__(
        self,
        links: RankLinks,
        exact: ExactPass,
        program: Program | None = None,
        correct_every: int = 1,
        trace: Trace | None = None,
        serial_steps: int = 0,
    ) -> None:
        self.links, self.exact, self.program = links, exact, program
        self.correct_every = correct_every
        self.serial_steps = serial_steps
        """Steps at the start, in rounds without a parallel phase, which `count` leaves out."""
        self.trace = trace or Trace(links.place, links.now)
        self.report_status: Callable[[], Status] = Status
        """Gives this rank's status at the end of a call."""
        self.status = Status()
        """The status of all at the end of the last call."""
        self.sample_losses: list[Tensor] = []
        """Losses of this rank's samples in the last call, in order, where a sampler needs them."""
        self.losses: list[list[Tensor]] = []
        """The sample losses of all replicas, on the first replica's last block; empty elsewhere."""
        self.local_budgets: list[LocalBudget] = []
        """The local work that each block has time for in a tick; empty: none is asked for."""
        self.local_steps, self.local_seconds = 0, 0.0
        """This rank's local steps in the last call, and their time within its phases."""
        self.count = 0
        """Rounds so far."""
        self.returns = 0
        """Calls that stayed serial because of the residual."""

    @property
    def why_eager(self) -> str:
        """Why passes are not recorded as graphs, where that was asked for; empty if they are."""
        engines = [each for each in (self.program, self.exact) if isinstance(each, Engine)]
        return next((each.policy.eager for each in engines if each.policy.eager), "")

    def run(
        self,
        windows: WindowPairs,
        first_step: int,
        epoch: int,
        bn_recalibration: Window | None = None,
    ) -> list[PhaseReport]:
        """Run one round for each (trained, swept) pair of windows; report their phases.

        `bn_recalibration`, where they end an epoch, has its last mini-batches once more. The lists
        of a report by rank, block or cut, and its notices, are complete on the first rank alone.
        Raises DivergedError on all ranks, naming the step, if a loss is not finite.
        """
        phases = Phases(PhaseStats(), PhaseStats())
        self.sample_losses, self.local_steps, self.local_seconds = [], 0, 0.0
        before = self.links.traffic.total_waiting
        self.train(windows, phases, bn_recalibration)
        waited = self.links.traffic.total_waiting - before
        shares = [share_of_phase(stats) for stats in phases]
        everyone = self.links.gather((shares, waited, self.report_status()))
        merged = None if everyone is None else self._merge(*zip(*everyone, strict=True))
        brief = merged and replace(merged, reports=[report.brief() for report in merged.reports])
        outcome = self.links.broadcast(brief)
        assert outcome is not None
        reports = (merged or outcome).reports
        if self.exact.block.objective.each:
            self.losses = self._gather_losses()
        self.status = outcome.status
        if outcome.diverged is not None:
            raise DivergedError.at(*outcome.diverged, first_step, epoch)
        self.plan_next_call(reports, windows, outcome.grown)
        return reports

    def _merge(
        self,
        shares: Sequence[list[dict[str, Any]]],
        waited: Sequence[float],
        statuses: Sequence[Status],
    ) -> Outcome:
        """Merge all ranks' reports of a call; the first rank calls it."""
        size = self.links.size
        chains = [shares[start : start + size] for start in range(0, len(shares), size)]
        reports = [
            merge_shares(phase, [[rank[i] for rank in ranks] for ranks in chains])
            for i, phase in enumerate(PHASES)
            if any(rank[i]["samples"] for rank in shares)
        ]
        seconds = sum(report.seconds for report in reports)
        if seconds and len(shares) > 1:
            reports[0].idle = [min(1.0, each / seconds) for each in waited]
        stop = next((each.stop for each in statuses if each.stop), "")
        return Outcome(
            reports,
            statuses[0]._replace(stop=stop),
            self.has_grown(reports),
            find_divergence(shares),
        )

    def _gather_losses(self) -> list[list[Tensor]]:
        """The losses of all samples of the last blocks, by replica, where a sampler may live."""
        links = self.links
        last = links.rank == links.size - 1
        each = [losses.cpu() for losses in self.sample_losses] if last else []
        everyone = links.gather(each, at=links.size - 1)
        return [] if everyone is None else everyone[links.size - 1 :: links.size]

    @abstractmethod
    def train(self, windows: WindowPairs, phases: Phases, bn_recalibration: Window | None) -> None:
        """Run the rounds; add this rank's work to the statistics of both phases."""

    def has_grown(self, reports: list[PhaseReport]) -> bool:
        """Whether a residual says that the next call rests; the first rank has whole reports."""
        return False

    def plan_next_call(  # noqa: B027
        self, reports: list[PhaseReport], windows: WindowPairs, grown: bool
    ) -> None:
        """Decide from the reports how the next call goes, the same on every rank."""

    def add(self, phase: PhaseStats, part: PhaseStats) -> None:
        """Count a part of a phase that has trained the network's mini-batches."""
        phase.add(part)
        self.sample_losses += part.each

    def begin_round(self) -> bool:
        """Whether the next round has a serial phase; it counts as begun."""
        self.count += 1
        return bool(self.correct_every) and (self.count - 1) % self.correct_every == 0

    def is_serial_start(self, window: Window) -> bool:
        """Whether a round is one of the first, which have no parallel phase."""
        return window.batches[0].step < self.serial_steps

    def drain(self) -> PhaseStats:
        """Finish the mini-batches that are under way between blocks; all ranks call it."""
        if self.program is None:
            return PhaseStats()
        with self.trace.span("drain"):
            return self.program.drain()

    @property
    def local(self) -> bool:
        """Whether the training takes local steps beside exact ones."""
        return self.program is not None and not isinstance(self.program, ExactPass)

    @property
    def local_work(self) -> LocalWork | None:
        """This rank's local work in idle time; None without any."""
        return getattr(self.program, "local_work", None)

    def state(self) -> State:
        return State(shared={"count": self.count, "returns": self.returns})

    def load_state(self, state: State) -> None:
        self.count, self.returns = state.shared["count"], state.shared["returns"]
