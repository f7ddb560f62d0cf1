"""What one rank of a run trains with: its block, its rounds and their mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybrid.data import Data
from hybrid.links import RankLinks
from hybrid.method.blocks import peak_rate
from hybrid.method.method import Method
from hybrid.method.schedule import make_schedule
from hybrid.rounds.report import PhaseReport
from hybrid.rounds.trace import Trace
from hybrid.samplers.batch_sampler import BatchSampler
from hybrid.solvers.blocks.optimizer_state import optimizer_state
from hybrid.solvers.state import Stateful
from hybrid.solvers.windows import Window
from hybrid.training.options import RunOptions


class RankTraining:
    """Made at the start of a run, and anew by every roll-back.

    Raises ValueError if the run folder could not keep all of the optimizer's state.
    """

    def __init__(
        self, method: Method, options: RunOptions, links: RankLinks, data: Data, trace: Trace
    ) -> None:
        self.method, self.options, self.links = method, options, links
        train, place = options.train, links.place
        self.block = method.block(links)
        if self.block.sync is not None:
            self.block.sync.start_alike()
        exact = self.block.optimizers["exact"]
        if options.out is not None:
            self.block.watch = trace.span
            for group in exact.param_groups:
                optimizer_state(exact, group["params"][0])
        self.rounds = method.start(self.block, links, trace)
        self.sampler = BatchSampler(options.sampler, data, train.seed, train.batch_size, links)
        self.peak = peak_rate(exact)
        schedule = make_schedule(options.schedule, self.peak, method.steps, train.epochs)
        self.windows = method.windows(data, schedule, self.sampler, place)

    @property
    def gaps(self) -> list[list[int]]:
        """[middle, turn] of each block; empty where no gaps are filled."""
        return [list(pair) for pair in self.method.gaps]

    def parts(self, manifest: Mapping[str, Any] | None) -> dict[str, Stateful]:
        """What a checkpoint keeps beside weights; of another solver's only what is common."""
        mine = {
            "solver": self.options.names["solver"],
            "gaps": self.gaps,
            "sync": self.options.sync.name,
        }
        of_checkpoint = manifest or mine
        same = {key for key, value in mine.items() if of_checkpoint[key] == value}
        parts: dict[str, Stateful] = {
            "rounds": self.rounds,
            "block": self.block,
            "sampler": self.sampler,
        }
        if "solver" not in same:
            return parts
        if self.rounds.program is not None:
            parts["program"] = self.rounds.program
        if self.rounds.fill is not None and "gaps" in same:
            parts["fill"] = self.rounds.fill
        if self.block.sync is not None and "sync" in same:
            parts["sync"] = self.block.sync  # after the program, whose weights it may keep
        return parts

    def groups(self, epoch: int, step: int) -> Iterator[list[tuple[Window, Window]]]:
        """The windows of an epoch from a step on, as many together as are reported together."""
        return self.windows.groups(epoch, step, self._report_every)

    def learning_rate(self, report: PhaseReport, step: int) -> float:
        """Of the last step of a phase that has just ended, after `step` steps of the run."""
        local = not self.rounds.alternates and report.phase == "parallel"
        return self.windows.schedule(step - 1) * self.block.rates["local" if local else "exact"]

    @property
    def _report_every(self) -> int:
        """Mini-batches between reports: K times as many where a report empties a pipeline.

        At most as many as a sampler waits for that learns from reports.
        """
        flushed = self.rounds.alternates or self.method.solver.exact
        every = self.options.train.report_every * (1 if flushed else self.links.size)
        lag = getattr(self.options.sampler, "lag", every)
        return min(every, max(1, lag - self.method.setup.window + 1))
