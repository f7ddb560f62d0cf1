"""One rank's run: its block, its rounds, its share of the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hybrid.data import Dataset
from hybrid.errors import AgreedError
from hybrid.folder import checkpoint
from hybrid.folder.manifest import Progress as Kept
from hybrid.folder.manifest import check
from hybrid.folder.writer import Share
from hybrid.links import RankLinks
from hybrid.ranks.stopping import StoppedError, StopRequest
from hybrid.rounds.report import DivergedError, PhaseReport
from hybrid.rounds.schedule import Schedule
from hybrid.rounds.trace import Trace
from hybrid.rounds.windows import Windows
from hybrid.training import keeping, recovery
from hybrid.training.evaluation import accuracy
from hybrid.training.progress import Progress
from hybrid.training.setup import RunSetup
from hybrid.training.shared import SharedFolder
from hybrid.training.summary import share, summary, title
from solvers.state import Stateful
from solvers.windows import Window


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
        self, setup: RunSetup, links: RankLinks, train: Dataset, test: Dataset, stop: StopRequest
    ) -> None:
        self.setup, self.links, self.train, self.test, self.stop = setup, links, train, test, stop
        self.folder = SharedFolder(setup.out, links, setup.checkpoint)
        self.stopped = ""
        """Why any rank has been asked to stop."""
        self.rollbacks: list[dict[str, Any]] = []
        """Of each: the step it came from, the reason, the step it went to, the rates after it."""
        self.trace = Trace(links.rank, links.now)
        links.watch = self.trace.add
        self.totals = dict.fromkeys(keeping.TOTALS, 0.0)
        self.epoch = self.step = 0
        self.test_accuracy: float | None = None
        """Of the newest evaluation."""
        self.residual = [0.0] * (links.size - 1)
        self.notices: list[str] = []
        """What a user should know of the checkpoint it goes on from."""
        self.place = keeping.Place(
            links.rank, setup.blocks.cuts, setup.blocks.of(links.rank)[-1].name
        )
        with links.agreement():
            self._build()

    def fit(self) -> dict[str, Any]:
        """Train to the last epoch; give the summary. Meanwhile the run folder is this run's."""
        try:
            self.notices = self.folder.claim(self.setup.resume)
            if self.setup.resume:
                self._go_on_from(self.folder.checkpoints()[-1])
            return self._fit()
        finally:
            self.folder.release()

    def _fit(self) -> dict[str, Any]:
        epochs, setup = self.setup.train.epochs, self.setup
        every = setup.train.evaluate_every
        self.progress = Progress(
            epochs,
            setup.steps_per_epoch,
            self.step,
            setup.quiet or self.links.rank > 0,
            tests=-(-epochs // every) - self.epoch // every,
            test_steps=len(self.test) / setup.train.batch_size / 3,  # forward passes alone
        )
        ended = self._ended()
        if ended is not None:
            return ended
        self.folder.open(setup.describe(setup.blocks.cuts), self.step, len(self.rollbacks))
        self.progress.say(title(setup, self.block.device, self.step))
        for notice in self.notices:
            self.progress.say(notice)
        try:
            if self.step == 0:
                self._keep()
            while self.epoch < epochs:
                try:
                    self._epoch()
                except DivergedError as error:
                    self._roll_back(error)
            self.folder.finish()
        except AgreedError:
            self.folder.close(None, self.trace)
            raise
        finally:
            self.progress.close()
            if self.block.draws is not None:
                self.block.draws.remove()
        found = self._summary()
        self.folder.close(found, self.trace)
        return found

    def _ended(self) -> dict[str, Any] | None:
        """The summary of a run that was resumed though it had ended; it stays as it is."""
        stored = self.folder.ended() if self.epoch >= self.setup.train.epochs else None
        if stored is not None:
            self.progress.say(
                f"{self.folder.path} has ended after {self.epoch} epochs, and stays as it is: to "
                f"train on, give --epochs {self.epoch + 1} or more"
            )
            self.progress.close()
        return stored

    def _build(self) -> None:
        """Make block, rounds and windows, as at the start of a run."""
        setup, train = self.setup, self.setup.train
        setup.check_memory()
        self.block = setup.block(self.links.rank)
        self.rounds = setup.method.start(self.block, self.links, self.trace)
        self.rounds.news = self._news
        self.rounds.tick = self._tick
        self.sampler = setup.sampler(len(self.train), train.seed)
        every = setup.steps_per_epoch
        schedule = Schedule(setup.schedule, setup.optimiser.lr, every, train.epochs)
        self.windows = Windows(
            self.train,
            train.batch_size,
            setup.window,
            setup.whole,
            setup.method.setup.sweeps,
            train.seed,
            schedule,
            self.sampler,
            setup.device,
            setup.method.setup.carried,
        )

    def _parts(self, manifest: dict[str, Any] | None = None) -> dict[str, Stateful]:
        """What a checkpoint keeps beside weights; of another solver's only what is common."""
        parts: dict[str, Stateful] = {
            "rounds": self.rounds,
            "block": self.block,
            "sampler": self.sampler,
        }
        if manifest is not None and manifest["solver"] != self.setup.names["solver"]:
            return parts
        if self.rounds.program is not None:
            parts["program"] = self.rounds.program
        if self.rounds.fill is not None and (manifest is None or manifest["gaps"] == self._gaps()):
            parts["fill"] = self.rounds.fill
        return parts

    def _gaps(self) -> list[list[int]]:
        return [list(pair) for pair in self.setup.method.gaps]

    def _go_on_from(self, folder: Path) -> None:
        """Go on from a checkpoint; every rank calls it, on a run just built."""
        with self.links.agreement():
            manifest = checkpoint.read_manifest(folder)
            check(Kept, manifest, folder / "manifest.json")
            keeping.check_same_run(self.setup, folder, manifest)
            units = self.setup.blocks.of(self.links.rank)
            checkpoint.restore(folder, manifest, units, self.block.optimisers)
            self.epoch, self.step = manifest["epoch"], manifest["step"]
            self.test_accuracy = manifest["test_accuracy"]
            self.rollbacks = list(manifest["rollbacks"])
            same_cuts = manifest["cuts"] == self.setup.blocks.cuts
            self.totals |= keeping.totals(manifest, self.links.rank if same_cuts else None)
            if same_cuts:
                self.residual = manifest["residual"]
            parts = self._parts(manifest)
            if self.rounds.fill is not None:
                first = self.epoch * self.setup.steps_per_epoch
                windows = self.windows.of_epoch(self.epoch, first)
                batches = [batch for trained, _ in windows for batch in trained.batches]
                self.rounds.fill.latest = batches[: self.step - first][::-1]
            fits = manifest["carried_as"] == self.setup.carried_as
            # variables kept otherwise are of no use: a forward pass makes new ones
            cuts = parts if fits else ()
            keeping.give_back(parts, self.place, folder, manifest, self.setup.device, cuts)
            self.notices += keeping.dropped(self.place, folder, manifest, "program" in parts)
        self.block.rates |= recovery.rates(len(self.rollbacks), self.rounds.local)

    def _roll_back(self, error: DivergedError) -> None:
        """Go back to a checkpoint, or raise `error` with its remedy; every rank calls it.

        Nothing is removed: the writer sets newer checkpoints aside when the run has one again.
        """
        before, step = self.rollbacks, self.step
        self.rounds.drain()  # or the messages of what is given up would be taken for others
        tried = len(before) >= self.setup.checkpoint.rollbacks
        if self.folder.path is None or tried:
            newest = self.folder.newest()
            lr, clipping = self.setup.optimiser.lr, self._clipping(error.phase)
            kept = self.folder.path is not None
            told = recovery.remedy(error, lr, clipping, len(before), newest, kept)
            raise DivergedError(told) from None
        self.folder.finish()
        kept_since = self.folder.kept_since_rollback
        folder = recovery.target(self.folder.checkpoints(), before, kept_since)
        if self.block.draws is not None:
            self.block.draws.remove()
        self._build()
        self._go_on_from(folder)
        self.rollbacks = [*before, {"step": step, "reason": str(error), "to": self.step}]
        self.block.rates |= recovery.rates(len(self.rollbacks), self.rounds.local)
        rates = {kind: self.block.rates[kind] for kind in ("local", "exact")}
        self.rollbacks[-1]["rates"] = rates
        self.folder.rewind(self.step)
        self._metric({"phase": "rollback", "from": step, "rates": [rates["exact"], rates["local"]]})
        self.progress.say(
            f"{error}; going on from the checkpoint of step {self.step} with exact steps "
            f"{rates['exact']:g} and local steps {rates['local']:g} times their size"
        )

    def _clipping(self, phase: str) -> list[str]:
        """The settings that bound the gradients of a phase."""
        method = self.setup.method
        own = ["solver.clip_norm"] if hasattr(method.solver, "clip_norm") else []
        if phase == "parallel" or self.rounds.alone:
            return own
        return ["correction.clip_norm", *(own if self.rounds.local else [])]

    def _epoch(self) -> None:
        reports: list[PhaseReport] = []
        for pairs in self.windows.groups(self.epoch, self.step, self._report_every):
            reports = self._rounds(pairs)
            if self.step < (self.epoch + 1) * self.setup.steps_per_epoch:
                if self.stopped:
                    self._stop()
                if self.rounds.heard[0].due:
                    self._keep()
        self.rounds.end_epoch()
        self.epoch += 1
        if self._due(self.setup.train.evaluate_every):
            with self.trace.span("evaluate"), self.progress.testing():
                self._join_replicas()
                self.test_accuracy = accuracy(self.block, self.links, self.test)
            self._metric({"phase": "test", "accuracy": self.test_accuracy})
        self.progress.epoch(self.epoch, reports, self.test_accuracy)
        if self.stopped and self.epoch < self.setup.train.epochs:
            self._stop()
        if self._due(self.setup.checkpoint.every):
            self._keep()

    def _join_replicas(self) -> None:
        if self.block.sync is not None:
            self.block.sync.join(self.block)

    def _news(self) -> News:
        return News(self.stop(), self.folder.share, self.folder.due())

    def _hear(self, everyone: list[News]) -> None:
        self.stopped = next((news.stop for news in everyone if news.stop), "")
        self.folder.hear([news.share for news in everyone])

    def _keep(self) -> None:
        """Begin a checkpoint, if there is a run folder and the weights are worth one."""
        if self.folder.path is None:
            return
        self._check_weights()
        self._join_replicas()
        setup = self.setup
        with self.trace.span("checkpoint"):
            files, shared = keeping.collect(self._parts(), self.place)
            manifest = {
                **setup.names,
                "epoch": self.epoch,
                "steps_per_epoch": setup.steps_per_epoch,
                "seed": setup.train.seed,
                "window": self.windows.length,
                "cuts": setup.blocks.cuts,
                "carried_as": setup.carried_as,
                "gaps": self._gaps(),
                "test_accuracy": self.test_accuracy,
                "residual": self.residual,
                "shared": shared,
                "rollbacks": self.rollbacks,
                "totals": self.links.all_gather(dict(self.totals)),
            }
            units = {
                unit.name: checkpoint.tensors_of(unit, self.block.optimisers)
                for unit in setup.blocks.of(self.links.rank)
            }
            self.folder.keep(self.step, units, files, manifest)

    def _stop(self) -> None:
        """Keep a checkpoint and raise StoppedError."""
        why = f"stopped by {self.stopped} after step {self.step}"
        if self.folder.path is None:
            self.rounds.drain()
            raise StoppedError(f"{why}; nothing is kept, because there is no run folder")
        self._keep()
        self.folder.finish()
        raise StoppedError(f"{why}; go on with --resume --out {self.folder.path}")

    def _due(self, every: int) -> bool:
        return self.epoch % every == 0 or self.epoch == self.setup.train.epochs

    def _rounds(self, pairs: list[tuple[Window, Window]]) -> list[PhaseReport]:
        traffic = self.links.traffic
        waited, sent = traffic.total_waiting, traffic.total_bytes
        steps = sum(len(trained.batches) for trained, _ in pairs)
        ends = self.step + steps == (self.epoch + 1) * self.setup.steps_per_epoch
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
            self._metric({**report.as_json(), "learning_rate": learning_rate})
        self.progress.step(self.step, reports, steps * self.setup.train.batch_size)
        return reports

    def _tick(self, batches: int) -> None:
        self.progress.tick(batches)

    @property
    def _report_every(self) -> int:
        """Mini-batches between reports: K times as many where a report empties a pipeline."""
        flushed = not self.rounds.alone or self.setup.method.solver.exact
        return self.setup.train.report_every * (1 if flushed else self.links.size)

    def _check_weights(self) -> None:
        """A loss is computed before its step: what the last step did shows here first."""
        tensors = self.block.module.state_dict().values()
        finite = all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())
        if not all(self.links.all_gather(finite)):
            raise DivergedError(f"the weights are not finite after step {self.step}")

    def _metric(self, line: dict[str, Any]) -> None:
        notice = self.folder.metric({"step": self.step, "epoch": self.epoch, **line})
        if notice:
            self.progress.say(notice)

    def _summary(self) -> dict[str, Any]:
        blocked = self.folder.blocked_seconds
        mine = share(self.totals, self.block, self.setup.train.graphs, blocked)
        results = {
            "test_accuracy": self.test_accuracy,
            "residual": self.residual,
            "returns_to_serial": self.rounds.returns,
            "rollbacks": self.rollbacks,
        }
        return summary(self.setup, self.links.all_gather(mine), results)
