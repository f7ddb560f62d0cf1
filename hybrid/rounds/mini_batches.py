"""Rounds of a method that trains every mini-batch once, without sweeps."""

from __future__ import annotations

from hybrid.links import RankLinks
from hybrid.rounds.base import Rounds, WindowPairs
from hybrid.rounds.trace import Trace
from hybrid.solvers.base import Program
from hybrid.solvers.exact.exact_pass import ExactPass
from hybrid.solvers.windows import PhaseStats, Window


class MiniBatchRounds(Rounds):
    """The program trains every mini-batch once; every `correct_every`-th round is serial instead.

    The first `serial_steps` steps are serial, too. Before a serial round, and at the end of an
    epoch, the program is drained: the time of what it then finishes counts as its own. The phase of
    an exact method is called serial.
    """

    alternates = False

    def __init__(
        self,
        links: RankLinks,
        exact: ExactPass,
        program: Program,
        correct_every: int = 0,
        trace: Trace | None = None,
        serial_steps: int = 0,
    ) -> None:
        super().__init__(links, exact, correct_every, trace, serial_steps)
        self.program: Program = program

    def train(
        self, windows: WindowPairs, serial: PhaseStats, parallel: PhaseStats, closing: Window | None
    ) -> None:
        exact = self.program.solver.exact
        phase, own = ("serial", serial) if exact else ("parallel", parallel)
        for trained, _ in windows:
            if self.is_serial_start(trained) or self.begin_round():
                self._drain_into(own)
                with self.trace.span("serial"):
                    part = self.exact.train(trained)
                serial.add(part)
            else:
                with self.trace.span(phase):
                    part = self.program.train(trained)
                own.add(part)
            self.sample_losses += part.each
        if closing is not None:
            self._drain_into(own)
        if not own.samples:
            serial.watch += own.watch  # there was nothing but a drain

    def _drain_into(self, own: PhaseStats) -> None:
        """Finish what is under way; its time counts as the method's own."""
        with own.timed(self.links):
            own.add(self.drain())
