"""One rank's run: its block, its rounds, its share of the checkpoints."""

from __future__ import annotations

from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from hybrid.data import Data, Dataset
from hybrid.errors import AgreedError, StoppedError
from hybrid.folder import checkpoint
from hybrid.folder.manifest import RunPosition, check
from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.ranks import launch
from hybrid.ranks.stopping import StopRequest, leave
from hybrid.rounds.report import DivergedError, PhaseReport
from hybrid.rounds.trace import Trace
from hybrid.solvers.state import Stateful
from hybrid.solvers.windows import Batch, Window
from hybrid.training import checkpointing, rollback
from hybrid.training.callbacks.base import RunInfo
from hybrid.training.callbacks.calling import CallbackError, Callbacks, make_run_info
from hybrid.training.callbacks.progress import ProgressPrinter
from hybrid.training.config_export import make_config_text
from hybrid.training.evaluation import measure_network
from hybrid.training.options import RunOptions
from hybrid.training.rank_training import RankTraining
from hybrid.training.shared_folder import News, RankStatus, SharedFolder
from hybrid.training.summary import describe_run, explain_ended_run, make_summary, share_of_rank


class Run:
    """What `Trainer.fit` runs on every rank."""

    def __init__(
        self,
        method: Method,
        options: RunOptions,
        links: RankLinks,
        train: Data,
        test: Data,
        stop: StopRequest,
        kernels: str = "torch",
    ) -> None:
        self.options, self.links, self.stop, self.kernels = options, links, stop, kernels
        self.train, self.test = train, test
        if links.place.replica and launch.communicator() is None:  # threads have one model
            method = method.copied()
        self.method = method.of_replica(links.place)
        self.blocks = self.method.problem.blocks
        self.progress = ProgressPrinter(options.quiet or links.place.number > 0)
        self.callbacks = Callbacks(self.progress, options, links)
        made = partial(self.callbacks.call, "on_checkpoint")
        self.folder = SharedFolder(options.out, links, options.checkpoint, made)
        self.stopped = ""
        """Why any rank has been asked to stop."""
        self.rollbacks: list[dict[str, Any]] = []
        """For each roll-back: the step before it, the reason, the step after it, the new rates."""
        self.trace = Trace(links.place, links.now, links.epoch())
        links.watch = self.trace.add
        self.totals = dict.fromkeys(checkpointing.TOTALS, 0.0)
        self.epoch = self.step = 0
        self.tested: dict[str, float] = {}
        """Loss and metrics of the newest evaluation."""
        self.tested_step: int | None = None
        """The step of that evaluation."""
        self.residual = [0.0] * (links.size - 1)
        self.notices = self.blocks.notices
        """Notices for the user about the cuts, and about the checkpoint of a resumed run."""
        last_unit = self.blocks.units_of(links.rank)[-1].name
        self.place = checkpointing.CheckpointPlace(links.place, self.blocks.cuts, last_unit)
        with links.agreement():
            self._build_training()

    def fit(self) -> dict[str, Any]:
        """Train to the last epoch; give the summary. Meanwhile the run folder is this run's."""
        try:
            self.notices += self.folder.claim(self.options.resume)
            if self.options.resume:
                self._restore(self.folder.checkpoints()[-1])
            ended = self._stored_summary()
            found = self._train() if ended is None else ended
            self.block.keep_tested_weights()
            return found
        except (AgreedError, StoppedError):
            self.links.peers.drop()  # no other rank will receive it
            raise
        finally:
            self.callbacks.close()
            self.block.release()
            self.folder.complete_own_part()
            self.folder.release()

    def _train(self) -> dict[str, Any]:
        options = self.options
        self.callbacks.call("on_start", self._run_info())
        self.callbacks.agree()
        describe = options.describe or partial(make_config_text, options, self.method)
        described = partial(describe, self.blocks.cuts)
        self.folder.open(described, self.step, len(self.rollbacks))
        self.progress.say(describe_run(self.method, options, self.step))
        for notice in self.notices:
            self.progress.say(notice)
        try:
            if self.step == 0:
                self._write_checkpoint()
            while not self._is_done:
                try:
                    self._train_epoch()
                except DivergedError as error:
                    self._roll_back(error)
            self.folder.finish_checkpoint()
            if self._early_reason:
                self.progress.say(f"stopped early after epoch {self.epoch}: {self._early_reason}")
        except (AgreedError, StoppedError) as error:
            if isinstance(error, CallbackError):
                self.rounds.drain()
                self.folder.finish_checkpoint()
            self.folder.write_results(None, self.trace)
            raise
        finally:
            self.block.release()
        found = self._make_summary()
        self.folder.write_results(found, self.trace)
        self.callbacks.call("on_end", found)
        self.callbacks.agree()
        return found

    def _run_info(self) -> RunInfo:
        tested = {f"test_{k}": v for k, v in self.tested.items()}
        return make_run_info(self.method, self.options, self.step, tested)

    def _stored_summary(self) -> dict[str, Any] | None:
        """The summary of a run that was resumed although it had ended, which is not changed."""
        stored = self.folder.stored_summary() if self._is_done else None
        if stored is not None:
            self.progress.say(
                explain_ended_run(self.folder.path, self.epoch, self.callbacks.stopped)
            )
        return stored

    @property
    def _is_done(self) -> bool:
        """Whether no epoch is left to train."""
        return self.epoch >= self.options.train.epochs or bool(self.callbacks.stopped)

    @property
    def _early_reason(self) -> str:
        """Why the run ends before its last epoch; empty if it does not."""
        return self.callbacks.stopped if self.epoch < self.options.train.epochs else ""

    def _build_training(self) -> None:
        """Make what this rank trains with, as at the start of a run."""
        train = self.train
        self.training = RankTraining(self.method, self.options, self.links, train, self.trace)
        self.block, self.rounds = self.training.block, self.training.rounds
        self.rounds.report_status = self._rank_status
        self.rounds.merge_statuses = self.folder.merge

    def _stateful_parts(self, manifest: dict[str, Any] | None = None) -> dict[str, Stateful]:
        """What a checkpoint keeps beside weights."""
        return self.training.parts(manifest) | {"callbacks": self.callbacks}

    def _restore(self, folder: Path) -> None:
        """Restore a checkpoint; every rank calls it, at the beginning."""
        with self.links.agreement():
            manifest = checkpoint.read_manifest(folder)
            check(RunPosition, manifest, folder / "manifest.json")
            checkpointing.check_same_run(self.method, self.options.names, folder, manifest)
            units = self.blocks.units_of(self.links.rank)
            checkpoint.restore(folder, manifest, units, self.block.optimizers)
            self.epoch, self.step = manifest["epoch"], manifest["step"]
            self.tested = dict(manifest["tested"])
            self.tested_step = manifest["tested_step"]
            self.rollbacks = list(manifest["rollbacks"])
            same = checkpointing.same_grid(manifest, self.place)
            number = self.links.place.number
            self.totals |= checkpointing.read_totals(manifest, number if same else None)
            if manifest["cuts"] == self.blocks.cuts:
                self.residual = manifest["residual"]
            parts = self._stateful_parts(manifest)
            first = {"sampler": parts.pop("sampler")}  # it knows which mini-batches came before
            checkpointing.restore_states(first, self.place, folder, manifest, self.block.device, ())
        if self.rounds.fill is not None:
            self.rounds.fill.latest = self.training.windows.before(self.epoch, self.step)[::-1]
        with self.links.agreement():
            # variables of another layout are of no use: a forward pass makes new ones
            cuts = parts if manifest["carried_as"] == self.method.carried_layout else ()
            checkpointing.restore_states(
                parts, self.place, folder, manifest, self.block.device, cuts
            )
            self.notices += checkpointing.describe_dropped_states(
                self.place, folder, manifest, parts
            )
        self.block.rates |= rollback.step_factors(len(self.rollbacks), self.rounds.local)
        self.callbacks.agree()

    def _roll_back(self, error: DivergedError) -> None:
        """Go back to a checkpoint, or raise `error` with its remedy; every rank calls it.

        Nothing is removed: the writer sets newer checkpoints aside when the run has one again.
        """
        before, step = self.rollbacks, self.step
        # or messages of abandoned steps would be taken for new ones
        self.rounds.drain()
        self.links.peers.drop()
        batches = self._next_batches()
        rollback.check_inputs(error, batches, self.block, self.links, len(self.train))
        tried = len(before) >= self.options.checkpoint.rollbacks
        if self.folder.path is None or tried:
            newest = self.folder.newest()
            remedy = rollback.write_remedy(
                *(error, self.method, self.rounds, self.training.peak),
                *(len(before), newest, self.options.out),
            )
            raise DivergedError(remedy) from None
        self.folder.finish_checkpoint()
        kept_since = self.folder.saved_since_rollback
        folder = rollback.choose_checkpoint(self.folder.checkpoints(), before, kept_since)
        self.block.release()
        self._build_training()
        self._restore(folder)
        self.rollbacks = [*before, {"step": step, "reason": str(error), "to": self.step}]
        self.block.rates |= rollback.step_factors(len(self.rollbacks), self.rounds.local)
        rates = {kind: self.block.rates[kind] for kind in ("local", "exact")}
        self.rollbacks[-1]["rates"] = rates
        self.folder.rewind(self.step)
        self._write_metric(
            {"phase": "rollback", "from": step, "rates": [rates["exact"], rates["local"]]}
        )
        self.progress.say(
            f"{error}; going on from the checkpoint of step {self.step} with exact steps "
            f"{rates['exact']:g} and local steps {rates['local']:g} times their size"
        )
        self.callbacks.call("on_rollback", self._run_info())

    def _train_epoch(self) -> None:
        reports: list[PhaseReport] = []
        for pairs in self.training.groups(self.epoch, self.step):
            reports = self._run_rounds(pairs)
            if self.step < (self.epoch + 1) * self.method.steps:
                if self.stopped:
                    self._stop_with_checkpoint()
                if self.rounds.news.due:
                    self._write_checkpoint()
        self.rounds.end_epoch()
        if said := self.training.sampler.share_statistics():
            self._write_metric({"phase": "sampler", **said})
        self.epoch += 1
        if self._epoch_is_due(self.options.train.evaluate_every):
            self._evaluate()
        tested = self.tested_step == self.step
        results = {
            "step": self.step,
            "loss": reports[0].loss,
            "learning_rate": self.training.learning_rate(reports[0], self.step),
            **{f"test_{name}": v if tested else None for name, v in self.tested.items()},
        }
        self.callbacks.end_epoch(self.epoch, results)
        if self.callbacks.stopped and not tested:
            self._evaluate()
        if self.stopped and not self._is_done:
            self._stop_with_checkpoint()
        if self._epoch_is_due(self.options.checkpoint.every):
            self._write_checkpoint()

    def _next_batches(self) -> list[Batch]:
        """The mini-batches of the next call of the rounds."""
        if self._is_done:
            return []
        pairs = next(self.training.groups(self.epoch, self.step), [])
        return [batch for trained, _ in pairs for batch in trained.batches]

    def _evaluate(self) -> None:
        """Test the network; DivergedError if its loss is not finite."""
        with self.trace.span("evaluate"):
            tested = self.method.problem.objectives.test
            size = 500 if isinstance(self.test, Dataset) else self.options.train.batch_size
            with self.block.as_tested():
                found = measure_network(self.block, self.links, self.test, tested, size)
        if not isfinite(found["loss"]):
            rollback.check_weights(self.block, self.links, self.step)
            raise DivergedError(f"the test loss is not finite after step {self.step}")
        self.tested, self.tested_step = found, self.step
        self._write_metric({"phase": "test", **self.tested})

    def _rank_status(self) -> RankStatus:
        return RankStatus(
            self.stop(), self.folder.share, self.folder.checkpoint_is_due(), self.callbacks.failure
        )

    def _take_news(self, news: News) -> None:
        self.stopped = news.stop
        self.folder.advance_checkpoint(news.checkpoint)
        self.callbacks.raise_failure(news.failure)

    def _write_checkpoint(self) -> None:
        """Begin a checkpoint, if there is a run folder; DivergedError if weights are not finite."""
        rollback.check_weights(self.block, self.links, self.step)
        if self.folder.path is None:
            return
        method, blocks = self.method, self.blocks
        with self.trace.span("checkpoint"):
            files, shared = checkpointing.collect_states(self._stateful_parts(), self.place)
            manifest = {
                **self.options.names,
                "epoch": self.epoch,
                "steps_per_epoch": method.steps,
                "seed": method.setup.seed,
                "window": method.setup.window,
                "cuts": blocks.cuts,
                "replicas": method.setup.replicas,
                "sync": self.options.sync.name,
                "carried_as": method.carried_layout,
                "gaps": self.training.gaps,
                "tested": self.tested,
                "tested_step": self.tested_step,
                "residual": self.residual,
                "shared": shared,
                "rollbacks": self.rollbacks,
                "totals": self.links.gather(dict(self.totals)),
            }
            with self.block.joined():
                # of the first replica only: the others have the same weights, or weights under way
                units = {
                    unit.name: checkpoint.tensors_of(unit, self.block.optimizers)
                    for unit in (
                        [] if self.links.place.replica else blocks.units_of(self.links.rank)
                    )
                }
                self.folder.begin_checkpoint(self.step, units, files, manifest)

    def _stop_with_checkpoint(self) -> None:
        """Write a checkpoint and raise StoppedError."""
        when = f"{self.stopped} after step {self.step}"
        if self.folder.path is None:
            self.rounds.drain()
            leave(self.links, f"{when}; nothing is kept, because there is no run folder")
        self._write_checkpoint()
        self.folder.finish_checkpoint()
        leave(self.links, f"{when}; go on with --resume --out {self.folder.path}")

    def _epoch_is_due(self, every: int) -> bool:
        return self.epoch % every == 0 or self._is_done

    def _run_rounds(self, pairs: list[tuple[Window, Window]]) -> list[PhaseReport]:
        traffic = self.links.traffic
        waited, sent = traffic.total_waiting, traffic.total_bytes
        steps = sum(len(trained.batches) for trained, _ in pairs)
        ends = self.step + steps == (self.epoch + 1) * self.method.steps
        closing = self.training.windows.closing(self.epoch) if ends else None
        reports = self.rounds.run(pairs, self.step, self.epoch, closing)
        self._take_news(self.rounds.news)
        self.training.sampler.take_losses(self.rounds.losses)
        self.totals["idle_seconds"] += traffic.total_waiting - waited
        self.totals["bytes_sent"] += traffic.total_bytes - sent
        self.totals["gap_steps"] += self.rounds.gap_steps
        self.totals["gap_seconds"] += self.rounds.gap_seconds
        self.residual = reports[-1].residual or [0.0] * (self.links.size - 1)
        self.totals["images"] += steps * self.options.train.batch_size
        self.step += steps
        for report in reports:
            for notice in report.notices:
                self.progress.say(notice)
            self.totals[f"{report.phase}_seconds"] += report.seconds
            self._write_metric(
                {
                    **report.as_json(),
                    "learning_rate": self.training.learning_rate(report, self.step),
                }
            )
        self.callbacks.call("on_report", self.step, self.epoch, reports)
        return reports

    def _write_metric(self, line: dict[str, Any]) -> None:
        if notice := self.folder.write_metric({"step": self.step, "epoch": self.epoch, **line}):
            self.progress.say(notice)

    def _make_summary(self) -> dict[str, Any]:
        blocked = self.folder.blocked_seconds
        mine = share_of_rank(self.totals, self.block.device, blocked)
        results: dict[str, Any] = {
            "kernels": self.kernels,
            "links": self.links.name,
            "tested": self.tested,
            "residual": self.residual,
            "returns_to_serial": self.rounds.returns,
            "rollbacks": self.rollbacks,
        }
        if self._early_reason:
            results |= {"epochs": self.epoch, "stopped_early": self._early_reason}
        everyone = self.links.gather(mine)
        return self.links.broadcast(
            {} if everyone is None else make_summary(self.method, self.options, everyone, results)
        )
