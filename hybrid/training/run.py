"""One rank's run: its block, its rounds, its share of the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybrid.data import Dataset
from hybrid.folder.checkpoint import complete
from hybrid.folder.runfolder import RunFolder
from hybrid.folder.writer import Share, Writer
from hybrid.links import AgreedError, RankLinks
from hybrid.ranks.stopping import StoppedError, StopRequest
from hybrid.rounds.rounds import DivergedError, PhaseReport, as_json
from hybrid.rounds.schedule import Schedule
from hybrid.rounds.windows import Windows
from hybrid.training import keeping
from hybrid.training.assemble import make_block, make_rounds
from hybrid.training.evaluation import accuracy
from hybrid.training.progress import Progress
from hybrid.training.recovery import roll_back, set_rates
from hybrid.training.summary import summary as summarise
from hybrid.training.summary import title
from hybrid.training.trace import Trace
from solvers.base import Shape, Window
from solvers.passes.pipeline import records_needed

if TYPE_CHECKING:
    from hybrid.training.trainer import Trainer

_TOTALS = ("images", "serial_seconds", "parallel_seconds", "idle_seconds", "bytes_sent")


class News(NamedTuple):
    """What a rank tells the others at every report."""

    stop: str
    """The signal it has got, empty without one."""
    share: Share
    due: bool
    """Whether, by its clock, it is time for a checkpoint."""


class Run:
    """What `Trainer.fit` runs on every rank."""

    def __init__(
        self,
        trainer: Trainer,
        links: RankLinks,
        train: Dataset,
        test: Dataset,
        shapes: list[Shape],
        device: torch.device,
        stop: StopRequest,
    ) -> None:
        self.stop = stop
        self.trainer, self.links, self.train, self.test = trainer, links, train, test
        self.blocks = trainer.blocks
        self.shapes, self.device = shapes, device
        self.folder: RunFolder | None = None
        self.writer: Writer | None = None
        if trainer.out is not None:
            self.folder = RunFolder(trainer.out)
            self.writer = Writer(self.folder.checkpoints, links, trainer.checkpoint.keep_last)
        self.kept_at = monotonic()
        self.stopped = ""
        """Why any rank has been asked to stop."""
        self.rollbacks: list[dict[str, Any]] = []
        """Of each: the step it came from, the reason, the step it went to, the rates after it."""
        self.kept_since_rollback = True
        self.trace = Trace(links.rank, links.now)
        links.watch = self.trace.add
        self.totals = dict.fromkeys(_TOTALS, 0.0)
        self.epoch = self.step = 0
        self.test_accuracy: float | None = None
        """Of the newest evaluation."""
        self.residual = [0.0] * (links.size - 1)
        self.notice = ""
        """What a user should know of the checkpoint it goes on from."""
        with links.agreement():
            self.build()
            if self.folder is not None:
                self.folder.check(trainer.resume)
        if trainer.resume:
            self.go_on_from(self.checkpoints()[-1])

    def fit(self) -> dict[str, Any]:
        """Train to the last epoch; give the summary."""
        quiet = self.trainer.quiet or self.links.rank > 0
        epochs = self.trainer.train.epochs
        with self.links.agreement():
            if self.folder is not None and self.links.rank == 0:
                config = self.trainer.describe(self.blocks.cuts)
                self.folder.open(config, self.step, len(self.rollbacks))
        self.progress = Progress(epochs, self.steps_per_epoch, self.step, quiet)
        self.progress.say(title(self))
        if self.notice:
            self.progress.say(self.notice)
        try:
            if self.step == 0:
                self._keep()
            while self.epoch < epochs:
                try:
                    self._epoch()
                except DivergedError as error:
                    roll_back(self, error)
            if self.writer is not None:
                self.writer.finish()
        except AgreedError:
            self._close(None)
            raise
        finally:
            self.progress.close()
        summary = summarise(self)
        self._close(summary)
        return summary

    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first, as the first rank sees them."""
        assert self.folder is not None
        return list(self.links.all_gather(complete(self.folder.checkpoints))[0])

    def go_on_from(self, folder: Path) -> None:
        """Go on from a checkpoint; every rank calls it, on a run just built."""
        with self.links.agreement():
            keeping.take_back(self, folder)
        set_rates(self)

    def build(self) -> None:
        """Make block, rounds and windows, as at the start of a run."""
        shapes, device = self.shapes, self.device
        trainer, rank = self.trainer, self.links.rank
        batch_size = trainer.train.batch_size
        every = self.steps_per_epoch = len(self.train) // batch_size
        length = every if trainer.window == "all" else min(trainer.window, every)
        before = shapes[rank - 1] if rank > 0 else None
        after = shapes[rank] if rank < len(shapes) else None
        window = length * batch_size if trainer.sweeps else 0
        records = 0
        if trainer.fill:
            records = (records_needed([trainer.gaps[rank]], batch_size) + 1) * batch_size
        store = trainer.solver.store_bytes
        kept = trainer.window == "all" and trainer.correct_every != 1
        # what the shapes of the kept variables depend on, but for the cuts
        settings = [getattr(trainer.solver, name, None) for name in ("filter", "filter_mode")]
        self.kept_as = [window, *settings] if kept else []
        exchanges = trainer.sweeps > 1 or kept
        needed = store(before, after, window, exchanges) + store(before, after, records, False)
        self._check_budget(needed, length)
        self.block = make_block(self.blocks, rank, trainer.optimiser, device, trainer.train)
        self.rounds = make_rounds(
            self.block,
            self.links,
            trainer.solver,
            trainer.correction,
            batch_size=batch_size,
            window=length,
            sweeps=trainer.sweeps,
            fill=trainer.gaps if trainer.fill else None,
            fill_step=trainer.fill_step,
            correct_every=trainer.correct_every or 0,
            kept=kept,
            trace=self.trace,
        )
        norms = torch.nn.modules.batchnorm._BatchNorm
        self.rounds.statistics = any(isinstance(m, norms) for m in self.blocks.model.modules())
        schedule = Schedule(trainer.schedule, trainer.optimiser.lr, every, trainer.train.epochs)
        solver = self.rounds.solver
        self.windows = Windows(
            self.train,
            batch_size,
            length,
            trainer.window == "all",
            trainer.sweeps,
            trainer.train.seed,
            schedule,
            device,
            solver.recorder if solver is not None else None,
            kept,
        )
        self.rounds.observe = self.windows.records_apart
        self.rounds.news = self._news

    def _check_budget(self, needed: int, window: int) -> None:
        budget = self.trainer.memory_gb * 1e9
        if needed > budget:
            fits = int(window * budget / needed)
            shorter = f"take a window of {fits}, or " if fits else ""
            raise ValueError(
                f"a window of {window} mini-batches needs {needed / 1e9:.3g} GB of "
                f"auxiliary variables on rank {self.links.rank}, the budget is "
                f"{self.trainer.memory_gb:g} GB: {shorter}set "
                "solver.storage=bfloat16, solver.filter=2 or a larger rounds.memory_gb"
            )

    def _epoch(self) -> None:
        reports: list[PhaseReport] = []
        for pairs in self._reporting_groups():
            # dropout and the like draw from here, so a resumed run draws what an undisturbed does
            torch.manual_seed(self.trainer.train.seed + 1000003 * self.step + self.links.rank)
            reports = self._rounds(pairs)
            if self.step < (self.epoch + 1) * self.steps_per_epoch:
                if self.stopped:
                    self._stop()
                if self.rounds.heard[0].due:
                    self._keep()
        self.rounds.end_epoch()
        self.epoch += 1
        if self._due(self.trainer.train.evaluate_every):
            with self.trace.span("evaluate"):
                self.test_accuracy = accuracy(self.block, self.links, self.test)
            self.metric({"phase": "test", "accuracy": self.test_accuracy})
        self.progress.epoch(self.epoch, reports, self.test_accuracy)
        if self.stopped and self.epoch < self.trainer.train.epochs:
            self._stop()
        if self._due(self.trainer.checkpoint.every):
            self._keep()

    def _news(self) -> News:
        minutes = self.trainer.checkpoint.minutes
        due = bool(minutes) and monotonic() - self.kept_at >= 60 * minutes
        return News(self.stop(), self.writer.share if self.writer else Share(), due)

    def _hear(self, everyone: list[News]) -> None:
        self.stopped = next((news.stop for news in everyone if news.stop), "")
        if self.writer is not None:
            self.writer.settle([news.share for news in everyone])

    def _keep(self) -> None:
        """Begin a checkpoint, if there is a run folder and the weights are worth one."""
        if self.writer is None:
            return
        self._check_weights()
        with self.trace.span("checkpoint"):
            keeping.keep(self)
        self.kept_at, self.kept_since_rollback = monotonic(), True

    def _stop(self) -> None:
        """Keep a checkpoint and raise StoppedError."""
        why = f"stopped by {self.stopped} after step {self.step}"
        if self.folder is None or self.writer is None:
            self.rounds.drain()
            raise StoppedError(f"{why}; nothing is kept, because there is no run folder")
        self._keep()
        self.writer.finish()
        raise StoppedError(f"{why}; go on with --resume --out {self.folder.path}")

    def _due(self, every: int) -> bool:
        return self.epoch % every == 0 or self.epoch == self.trainer.train.epochs

    def _rounds(self, pairs: list[tuple[Window, Window]]) -> list[PhaseReport]:
        traffic = self.links.traffic
        waited, sent = traffic.total_waiting, traffic.total_bytes
        steps = sum(len(trained.batches) for trained, _ in pairs)
        ends = self.step + steps == (self.epoch + 1) * self.steps_per_epoch
        reports = self.rounds.run(pairs, self.step, self.epoch, ends)
        self._hear(self.rounds.heard)
        self.totals["idle_seconds"] += traffic.total_waiting - waited
        self.totals["bytes_sent"] += traffic.total_bytes - sent
        self.residual = reports[-1].residual or [0.0] * (self.links.size - 1)
        counted = reports if self.rounds.alone else reports[:1]
        self.totals["images"] += sum(report.samples for report in counted)
        self.step += steps
        scheduled = self.windows.schedule(self.step - 1)
        for report in reports:
            for notice in report.notices:
                self.progress.say(notice)
            self.totals[f"{report.phase}_seconds"] += report.seconds
            local = self.rounds.alone and report.phase == "parallel"
            learning_rate = scheduled * self.block.rates["local" if local else "exact"]
            self.metric({**as_json(report), "learning_rate": learning_rate})
        self.progress.step(self.step, reports, steps * self.trainer.train.batch_size)
        return reports

    def _reporting_groups(self) -> Iterator[list[tuple[Window, Window]]]:
        """The epoch's windows from this step on, in groups after which the ranks report."""
        done = self.epoch * self.steps_per_epoch
        end = done + self.steps_per_epoch
        group: list[tuple[Window, Window]] = []
        for pair in self.windows.of_epoch(self.epoch, done):
            done += len(pair[0].batches)
            if done <= self.step:
                continue
            group.append(pair)
            if done - self.step >= self.report_every or done == end:
                yield group
                group = []

    @property
    def report_every(self) -> int:
        """Mini-batches between reports: K times as many where a report empties a pipeline."""
        return self.trainer.train.report_every * (self.links.size if self.rounds.alone else 1)

    def _check_weights(self) -> None:
        """A loss is computed before its step: what the last step did shows here first."""
        tensors = self.block.module.state_dict().values()
        finite = all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())
        if not all(self.links.all_gather(finite)):
            raise DivergedError(f"the weights are not finite after step {self.step}")

    def metric(self, line: dict[str, Any]) -> None:
        if self.folder is not None and self.links.rank == 0:
            self.folder.metric({"step": self.step, "epoch": self.epoch, **line})

    def _close(self, summary: dict[str, Any] | None) -> None:
        """Write summary and trace; without a summary, after a failure, only if that is possible."""
        if self.folder is None:
            return
        everyone = self.links.all_gather(self.trace.events)
        with self.links.agreement() if summary else suppress(OSError):
            if self.links.rank == 0:
                self.folder.close(summary, [event for rank in everyone for event in rank])
