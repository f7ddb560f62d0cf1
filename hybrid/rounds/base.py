"""Drives one rank through the rounds of a training; the ranks agree on the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hybrid.links import RankLinks
from hybrid.rounds.controller import Controller
from hybrid.rounds.report import PHASES, PhaseReport, check_finite, merge_shares, share_of_phase
from hybrid.rounds.scores import accuracies_in_training
from hybrid.rounds.trace import Trace
from hybrid.solvers.base import Program
from hybrid.solvers.exact.exact_pass import ExactPass
from hybrid.solvers.exact.filling import BubbleFill
from hybrid.solvers.state import State
from hybrid.solvers.windows import PhaseStats, Window

WindowPairs = Sequence[tuple[Window, Window]]
"""Of each round: the window that is trained, and the one that is swept."""


class Rounds(ABC):
    """One rank's rounds. The ranks agree on losses only at the end of every call of `run`."""

    alternates: bool
    """Whether the program sweeps over windows that a serial phase has gone over."""

    def __init__(
        self,
        links: RankLinks,
        exact: ExactPass,
        correct_every: int,
        trace: Trace | None = None,
        serial_steps: int = 0,
    ) -> None:
        self.links, self.exact, self.correct_every = links, exact, correct_every
        self.serial_steps = serial_steps
        """Steps at the start, in rounds without a parallel phase, which `count` leaves out."""
        self.trace = trace or Trace(links.place, links.now)
        self.program: Program | None = None
        self.fill: BubbleFill | None = None
        self.controller: Controller | None = None
        """What changes the rounds as they go; None: nothing does."""
        self.report_status: Callable[[], Any] = str
        """Gives what this rank reports to the others at the end of a call."""
        self.rank_statuses: list[Any] = []
        """What every rank reported at the end of the last call."""
        self.sample_losses: list[Tensor] = []
        """Losses of this rank's samples in the last call, in order, where a sampler needs them."""
        self.losses: list[list[Tensor]] = []
        """Those of every replica's last block."""
        self.gap_steps, self.gap_seconds = 0, 0.0
        """This rank's local steps in gaps in the last call, and their time within its phases."""
        self.count = 0
        """Rounds so far."""
        self.returns = 0
        """Calls that stayed serial because of the residual."""

    def run(
        self, windows: WindowPairs, first_step: int, epoch: int, closing: Window | None = None
    ) -> list[PhaseReport]:
        """Run one round for each (trained, swept) pair of windows; report their phases.

        `closing`, where they end an epoch, is its last mini-batches once more.
        Raises DivergedError on all ranks, naming the step, if a loss is not finite.
        """
        serial, parallel = PhaseStats(), PhaseStats()
        self.sample_losses, self.gap_steps, self.gap_seconds = [], 0, 0.0
        before = self.links.traffic.total_waiting
        self.train(windows, serial, parallel, closing)
        waited = self.links.traffic.total_waiting - before
        mine = [share_of_phase(stats) for stats in (serial, parallel)]
        last = self.links.rank == self.links.size - 1
        each = [losses.cpu() for losses in self.sample_losses] if last else []
        gathered = self.links.everyone((mine, waited, self.report_status(), each))
        everyone = [shares for shares, *_ in gathered]
        self.rank_statuses = [status for _, _, status, _ in gathered]
        self.losses = [each for *_, each in gathered[self.links.size - 1 :: self.links.size]]
        reports = [
            merge_shares(phase, self._chains([rank[i] for rank in everyone]))
            for i, phase in enumerate(PHASES)
            if any(rank[i]["samples"] for rank in everyone)
        ]
        objective = self.exact.block.objective
        if objective.accumulates_in_training:
            found = accuracies_in_training(self.links, objective, [serial.seen, parallel.seen])
            for report in reports:
                report.accuracy = found[PHASES.index(report.phase)]
        seconds = sum(report.seconds for report in reports)
        if seconds and len(gathered) > 1:
            reports[0].idle = [min(1.0, waited / seconds) for _, waited, *_ in gathered]
        check_finite(everyone, first_step, epoch)
        self.plan_next_rounds(reports, windows)
        return reports

    def _chains(self, everyone: list[Any]) -> list[list[Any]]:
        """What all ranks reported, one list for each replica."""
        size = self.links.size
        return [everyone[start : start + size] for start in range(0, len(everyone), size)]

    @abstractmethod
    def train(
        self, windows: WindowPairs, serial: PhaseStats, parallel: PhaseStats, closing: Window | None
    ) -> None:
        """Run the rounds; add to both phases what this rank did."""

    def plan_next_rounds(self, reports: list[PhaseReport], windows: WindowPairs) -> None:  # noqa: B027
        """Decide from the reports how the next rounds go, the same on every rank."""

    def begin_round(self) -> bool:
        """Whether the next round has a serial phase; it counts as begun."""
        self.count += 1
        return bool(self.correct_every) and (self.count - 1) % self.correct_every == 0

    def is_serial_start(self, window: Window) -> bool:
        """Whether a round is one of the first, which have no parallel phase."""
        return window.batches[0].step < self.serial_steps

    def end_epoch(self) -> None:  # noqa: B027
        """Forget the epoch's records."""

    def drain(self) -> PhaseStats:
        """Finish what is under way between blocks; all ranks call it."""
        if self.program is None:
            return PhaseStats()
        with self.trace.span("drain"):
            return self.program.drain()

    @property
    def local(self) -> bool:
        """Whether there are local steps beside exact ones."""
        return self.fill is not None or (
            self.program is not None and not isinstance(self.program, ExactPass)
        )

    def state(self) -> State:
        return State(shared={"count": self.count, "returns": self.returns})

    def load_state(self, state: State) -> None:
        self.count, self.returns = state.shared["count"], state.shared["returns"]
