"""The hybrid schedule: serial correction over a window, then sweeps of its sub-problems."""

from __future__ import annotations

from hybrid.links import RankLinks
from hybrid.rounds.base import Rounds, WindowPairs
from hybrid.rounds.controller import Controller
from hybrid.rounds.report import PhaseReport
from hybrid.rounds.trace import Trace
from hybrid.solvers.base import Program, Recorder, Recording
from hybrid.solvers.exact.exact_pass import ExactPass
from hybrid.solvers.exact.filling import BubbleFill
from hybrid.solvers.state import State
from hybrid.solvers.stopwatch import Stopwatch
from hybrid.solvers.windows import PhaseStats, Window


class AlternatingRounds(Rounds):
    """Serial and parallel phases by turns.

        round   serial phase    exact.train: W exact steps, recorded; `fill` works in its gaps
                parallel phase  program.train: sweeps over the records

    Only every `correct_every`-th round has a serial phase. In the others, and in all of them if
    `correct_every` is 0, a forward pass makes the records. If the records of the windows are
    `carried`, they are kept from one correction to the next, and the rounds between have a parallel
    phase only. A program that records nothing needs no forward pass. If there are no corrections
    either, a forward pass over the last mini-batches of an epoch moves BatchNorm's running
    statistics, which belong to the composed network. The first `serial_steps` steps have no
    parallel phase.

    When the residual of a cut has grown by more than the solver's `return_ratio` since the last
    call, the parallel phase does harm, and one call stays serial. A `controller` gets a probe from
    every call whose windows have the length that it asked for; residuals of windows of different
    lengths are not compared.
    """

    alternates = True

    def __init__(
        self,
        links: RankLinks,
        exact: ExactPass,
        program: Program | None = None,
        fill: BubbleFill | None = None,
        correct_every: int = 1,
        *,
        observe: bool = False,
        carried: bool = False,
        statistics: bool = False,
        trace: Trace | None = None,
        controller: Controller | None = None,
        serial_steps: int = 0,
    ) -> None:
        every = correct_every if controller is None else controller.now.correct_every
        super().__init__(links, exact, every, trace, serial_steps)
        self.program, self.fill, self.controller = program, fill, controller
        self.observe = observe
        """Record in a pass of its own: the swept images differ from the trained ones."""
        self.carried = carried
        self.statistics = statistics
        """Whether the network has running statistics to move."""
        solver = program or (fill and fill.program)
        self.return_ratio: float = getattr(solver and solver.solver, "return_ratio", 0.0)
        self.recorder = program if isinstance(program, Recording) else None
        self.probe: list[float] = []
        """Residuals of the last call with whole windows, on the first rank; empty after a call that
        stayed serial."""
        self.length = 0
        """Mini-batches of the longest window so far."""
        self.resting = False
        self.recorded = False
        """Whether carried records have been made."""

    def train(
        self, windows: WindowPairs, serial: PhaseStats, parallel: PhaseStats, closing: Window | None
    ) -> None:
        fill = None if self.resting else self.fill
        program = None if self.resting else self.program
        length = max(len(swept.batches) for _, swept in windows)
        recorder = None if self.observe else self.recorder
        for trained, swept in windows:
            opens = self.is_serial_start(trained)
            corrected = opens or self.begin_round() or self.resting  # in this order: it counts
            if corrected:
                with self.trace.span("serial"):
                    passed = (None, None) if opens else (recorder, fill)
                    part = self.exact.train(trained, *passed)
                serial.add(part)
                self.sample_losses += part.each
            if program is not None and not opens:
                part = self._record(swept, corrected, self.recorder)
                serial.add(part)
                self.sample_losses += part.each
                with self.trace.span("parallel"):
                    part = program.train(swept)
                if len(swept.batches) < length:
                    part.squares = []
                parallel.add(part)
        opens = self.is_serial_start(windows[-1][0])
        unmoved = self.statistics and self.recorder is None and not self.correct_every and not opens
        if closing is not None and unmoved:
            serial.watch += self._propagate(closing, None).watch
        if fill is not None:
            parallel.add(fill.stats)
            self.gap_steps, self.gap_seconds = fill.stats.steps, fill.watch.seconds()
            fill.stats, fill.watch = PhaseStats(), Stopwatch()

    def _record(self, swept: Window, corrected: bool, recorder: Recorder | None) -> PhaseStats:
        """Make the records that the serial phase has not made."""
        if recorder is None:
            return PhaseStats()
        fresh = corrected or not (self.carried and self.recorded)
        self.recorded = True
        if corrected and self.observe:
            with self.trace.span("observe"):
                observed = self.exact.observe(swept, recorder)
            return PhaseStats(watch=observed.watch)
        if corrected or not (fresh or self.statistics):
            return PhaseStats()
        return self._propagate(swept, recorder if fresh else None)

    def _propagate(self, window: Window, recorder: Recorder | None) -> PhaseStats:
        with self.trace.span("propagate"):
            return self.exact.propagate(window, recorder)

    def end_epoch(self) -> None:
        if self.fill is not None:
            self.fill.begin()

    def probe_reports(self, reports: list[PhaseReport]) -> tuple[bool, float]:
        """Whether a residual has grown too much since the last probe, and the largest."""
        residual = _swept_residual(reports)
        grown = any(
            now > self.return_ratio * before > 0
            for now, before in zip(residual, self.probe, strict=False)
        )
        return grown, max(residual, default=0.0)

    def plan_next_rounds(
        self, reports: list[PhaseReport], windows: WindowPairs, probe: tuple[bool, float]
    ) -> None:
        length = max(len(swept.batches) for _, swept in windows)
        swept = reports[-1] if reports[-1].phase == "parallel" else None
        if self.controller is not None:
            self.length = self.controller.now.window
            if swept is not None:
                swept.rounds = self.controller.now
        if length < self.length:
            # the weights drift less over a shorter window: its residual compares with no other
            self.resting = False
            return
        self.length = length
        residual, (grown, largest) = _swept_residual(reports), probe
        self.resting = self.return_ratio > 0 and grown and self.correct_every == 1
        if self.controller is not None and swept is not None:
            rate = windows[-1][0].batches[-1].learning_rate
            before = self.controller.now
            self.resting |= self.controller.probe(largest, rate)
            residual = residual if self.controller.now == before else []
            self.correct_every = self.controller.now.correct_every
        if self.resting:
            self.end_epoch()
        self.returns += self.resting
        self.probe = [] if self.resting else residual

    def state(self) -> State:
        state = super().state()
        state.shared |= {k: getattr(self, k) for k in ("probe", "resting", "length", "recorded")}
        if self.controller is not None:
            state.shared["controller"] = self.controller.state()
        return state

    def load_state(self, state: State) -> None:
        super().load_state(state)
        shared = state.shared
        if "probe" not in shared:  # a checkpoint of a method without a parallel phase
            return
        self.resting, self.length = shared["resting"], shared["length"]
        # residuals of other cuts mean nothing here
        self.probe = shared["probe"] if state.same_split else []
        self.recorded = shared["recorded"] and state.complete
        if self.controller is not None and "controller" in shared:
            self.controller.load_state(shared["controller"])
            self.correct_every = self.controller.now.correct_every


def _swept_residual(reports: list[PhaseReport]) -> list[float]:
    return reports[-1].residual if reports[-1].phase == "parallel" else []
