"""The kinds of rounds: serial and parallel phases by turns, and a method that trains by itself."""

from collections.abc import Sequence

from hybrid.rounds.base import Phases, Rounds, WindowPairs
from hybrid.rounds.phase_report import PhaseReport
from hybrid.solvers.base import Recorder, Recording
from hybrid.solvers.state import State
from hybrid.solvers.windows import PhaseStats, Stopwatch, Window


class AlternatingRounds(Rounds):
    """Serial and parallel phases by turns.

        round   serial phase    exact.train: W exact steps, recorded
                parallel phase  program.train: sweeps over the records

    Only every `correct_every`-th round has a serial phase. In the others, and in all of them if
    `correct_every` is 0, a forward pass makes the records. If the records of the windows are
    `carried`, they are kept from one correction to the next, and the rounds between have a parallel
    phase only. A program that records nothing needs no forward pass. If there are no corrections
    either, a forward pass over the last mini-batches of an epoch moves BatchNorm's running
    statistics, which belong to the composed network. The first `serial_steps` steps have no
    parallel phase.

    When the residual of a cut has grown by more than the solver's `return_ratio` since the last
    call, the parallel phase does harm, and one call rests: it stays serial. Residuals of windows of
    different lengths are not compared.
    """

    alternates = True

    observe = False
    """Record in a separate pass: the swept images differ from the trained ones."""
    carried = False
    """Whether records are kept from one correction to the next."""
    statistics = False
    """Whether the network has running statistics to move."""
    probe: Sequence[float] = ()
    """Residuals of the last call with whole windows, on the first rank; empty after a call that
    stayed serial."""
    length = 0
    """Mini-batches of the longest window so far."""
    resting = False
    recorded = False
    """Whether carried records have been made."""

    @property
    def return_ratio(self) -> float:
        """The growth of a residual after which a call rests; 0: none does."""
        return getattr(self.program and self.program.solver, "return_ratio", 0.0)

    @property
    def recorder(self) -> Recorder | None:
        """The program, if it takes records."""
        return self.program if isinstance(self.program, Recording) else None

    def train(self, windows: WindowPairs, phases: Phases, bn_recalibration: Window | None) -> None:
        serial, parallel = phases
        program = None if self.resting else self.program
        recorder = None if self.observe else self.recorder
        longest = max(len(swept.batches) for _, swept in windows)
        for trained, swept in windows:
            opens = self.is_serial_start(trained)
            corrected = opens or self.begin_round() or self.resting  # in this order: it counts
            if corrected:
                with self.trace.span("serial"):
                    self.add(serial, self.exact.train(trained, None if opens else recorder))
            if program is None or opens:
                continue
            self.add(serial, self._record(swept, corrected))
            with self.trace.span("parallel"):
                part = program.train(swept)
            if len(swept.batches) < longest:
                part.squares = []
            parallel.add(part)
        unmoved = self.statistics and self.recorder is None and not self.correct_every
        if bn_recalibration is not None and unmoved and not opens:
            serial.watch += self._propagate(bn_recalibration, None).watch

    def _record(self, swept: Window, corrected: bool) -> PhaseStats:
        """Make the records that the serial phase has not made."""
        if self.recorder is None:
            return PhaseStats()
        fresh = corrected or not (self.carried and self.recorded)
        self.recorded = True
        if corrected and self.observe:
            with self.trace.span("observe"):
                return PhaseStats(watch=self.exact.observe(swept, self.recorder).watch)
        if corrected or not (fresh or self.statistics):
            return PhaseStats()
        return self._propagate(swept, self.recorder if fresh else None)

    def _propagate(self, window: Window, recorder: Recorder | None) -> PhaseStats:
        with self.trace.span("propagate"):
            return self.exact.propagate(window, recorder)

    def has_grown(self, reports: list[PhaseReport]) -> bool:
        return any(
            now > self.return_ratio * before > 0
            for now, before in zip(_swept_residual(reports), self.probe, strict=False)
        )

    def plan_next_call(self, reports: list[PhaseReport], windows: WindowPairs, grown: bool) -> None:
        length = max(len(swept.batches) for _, swept in windows)
        if length < self.length:
            # the weights drift less over a shorter window: its residual compares with no other
            self.resting = False
            return
        self.length = length
        self.resting = self.return_ratio > 0 and grown and self.correct_every == 1
        self.returns += self.resting
        self.probe = [] if self.resting else _swept_residual(reports)

    def state(self) -> State:
        state = super().state()
        state.shared |= {k: getattr(self, k) for k in ("resting", "length", "recorded")}
        state.shared["probe"] = list(self.probe)
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


def _swept_residual(reports: list[PhaseReport]) -> list[float]:
    return reports[-1].residual if reports[-1].phase == "parallel" else []


class MiniBatchRounds(Rounds):
    """The program trains every mini-batch once; every `correct_every`-th round is serial instead.

    The first `serial_steps` steps are serial, too. Before a serial round and at the end of an epoch
    the program is drained; the time counts as the program's. The phase of an exact method is called
    serial.
    """

    alternates = False
    serial_end = False
    """Whether the last round of an epoch is serial, too."""

    def train(self, windows: WindowPairs, phases: Phases, bn_recalibration: Window | None) -> None:
        assert self.program is not None
        exact, ends_epoch = self.program.solver.exact, bn_recalibration is not None
        phase, stats = ("serial", phases.serial) if exact else ("parallel", phases.parallel)
        last = windows[-1][0] if self.serial_end and ends_epoch else None
        for trained, _ in windows:
            if self.is_serial_start(trained) or self.begin_round() or trained is last:
                self._drain_into(stats)
                with self.trace.span("serial"):
                    self.add(phases.serial, self.exact.train(trained))
            else:
                with self.trace.span(phase):
                    self.add(stats, self.program.train(trained))
        if ends_epoch:
            self._drain_into(stats)
        if not stats.samples:
            phases.serial.watch += stats.watch  # there was nothing but a drain
        if (local := self.local_work) is not None:
            stats.squares += local.stats.squares
            self.local_steps, self.local_seconds = local.stats.steps, local.watch.seconds()
            local.stats, local.watch = PhaseStats(), Stopwatch()

    def _drain_into(self, stats: PhaseStats) -> None:
        with stats.timed(self.links):
            stats.add(self.drain())
