"""One rank's run: its epochs, its evaluations, its share of the run folder."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hybrid.data import Data
from hybrid.errors import AgreedError, StoppedError
from hybrid.folder.manifest import RunPosition
from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.method.micro_batches import fit_micro_batches
from hybrid.proof.network_guard import NetworkGuard
from hybrid.proof.proof import describe_proof, prove
from hybrid.proof.sample_comparison import SampleComparison
from hybrid.ranks import launch, launcher
from hybrid.ranks.stopping import StopRequest, leave
from hybrid.report.summary import Summary
from hybrid.rounds.base import Status
from hybrid.rounds.evaluation import Evaluation, check_weights
from hybrid.rounds.one_rank import OneRank
from hybrid.rounds.phase_report import DivergedError, PhaseReport
from hybrid.rounds.trace import Trace
from hybrid.settings.sections.base import MANY
from hybrid.solvers.state import State
from hybrid.solvers.windows import Window
from hybrid.training.callbacks.base import CallbackError, Callbacks, EarlyStopping
from hybrid.training.callbacks.progress_printer import ProgressPrinter
from hybrid.training.rank_training import RankTraining, stored_part
from hybrid.training.shared_folder import SharedFolder
from hybrid.training.summary import (
    advise_resume,
    describe_eager,
    describe_end,
    describe_run,
    describe_selection,
    make_config_text,
    make_summary,
    run_info,
    share_of_rank,
)


class Run:
    """What `Trainer.fit` runs on every rank."""

    def __init__(
        self,
        method: Method,
        links: RankLinks,
        train: Data,
        evaluation: Evaluation,
        stop: StopRequest,
        kernels: str = "torch",
        whole: Callable[[], nn.Module] | None = None,
        comparison: SampleComparison | None = None,
    ) -> None:
        self.links, self.stop, self.kernels = links, stop, kernels
        self.train, self.comparison = train, comparison
        with links.agreement():  # threads have one model, which none changes before it is copied
            if links.place.replica and launch.communicator() is None:
                method = method.copied()
        stored = partial(stored_part, method.options)
        self.method, self.fitted = fit_micro_batches(method.of_replica(links.place), links, stored)
        options = self.options = self.method.options
        quiet = options.quiet or links.place.number > 0
        self.progress = ProgressPrinter(quiet, method.problem.unit)
        self.evaluation = replace(evaluation, watch=self.progress.count_tests)
        self.history: list[dict[str, Any]] = []
        """What each epoch of this training came to."""
        patience = options.train.early_stop
        deciding, selection = evaluation.deciding, options.train.selection
        early = [EarlyStopping(patience, deciding or "training", selection)] if patience else []
        alone, threads = links.place.count == 1, links.in_one_process and links.place.replicas == 1
        guard = NetworkGuard(method.problem.blocks, links.rank, alone, alone or threads)
        self.callbacks = Callbacks(self.progress, [*options.callbacks, *early], links, guard)
        self.folder = SharedFolder(options.out, links, options.checkpoint, RunPosition, selection)
        self.stopped = ""
        """Why any rank has been asked to stop."""
        self.trace = Trace(links.place, links.now, links.epoch())
        self.proof = prove(self.method, links, train, whole)
        """Whether the run's gradient is the undivided network's, or why that was not compared."""
        links.watch = self.trace.add
        with links.agreement():
            self.training = self._make_training(self.callbacks)
            if self.training.plateau is not None and not deciding:
                raise ValueError(
                    "the schedule is plateau, which follows a validation or test set, and there is "
                    "none: give one, or choose another schedule"
                )
        seconds = self.method.time_one_rank(self.training.block, links)
        self.one_rank = OneRank(seconds, options.train.batch_size)

    def fit(self) -> Summary:
        """Train to the last epoch; give the summary. Meanwhile the run folder is this run's."""
        try:
            notices = [*self.folder.claim(self.options.resume)]
            if self.options.resume:
                notices += self._restore(self.folder.checkpoints()[-1])
                self.callbacks.agree()
            ended = self.folder.stored_summary() if self._is_done else None
            summary = self._train(notices) if ended is None else ended
            if ended is not None:
                epoch = self.training.position.epoch
                self.progress.say(describe_end(self.options, epoch, self.callbacks.stopped))
                self._select()
            self.training.block.keep_tested_weights()
            here = None if launch.communicator() is None else self.links.rank
            self.method.problem.blocks.sync_buffers(here)
            return Summary(summary, self.history, self.options.out)
        except (AgreedError, StoppedError):
            self.links.drop()  # no other rank will receive it
            raise
        finally:
            self.callbacks.close()
            self.training.block.release()
            self.folder.release()

    def _train(self, notices: list[str]) -> dict[str, Any]:
        options, at = self.options, self.training.position
        self.callbacks.call("on_start", run_info(self.method, at))
        self.callbacks.agree()
        self.progress.follow(self.training.block, self.stop)
        budgets = self.training.rounds.local_budgets
        config = partial(make_config_text, self.method, budgets)
        self.folder.open(config, at.step, len(at.rollbacks))
        self.stop.advice = advise_resume(options)
        first = describe_run(self.method, budgets, self.links.tensors_by, at.step)
        eager = describe_eager(self.links.all_gather_grid(self.training.rounds.why_eager))
        for line in (
            first,
            *filter(None, [self.fitted]),
            *eager,
            *describe_proof(self.proof),
            *notices,
        ):
            self.progress.say(line)
        try:
            if at.step == 0:
                self._write_checkpoint()  # one to go back to, whatever happens
            self.start_seconds = launcher.process_seconds()
            while not self._is_done:
                try:
                    if (ties := self.training.block.ties) is not None:
                        ties.begin()  # of every training, which a roll-back makes anew
                    self._train_epoch()
                except DivergedError as error:
                    self._roll_back(error)
            if self._early_reason:
                epoch = self.training.position.epoch
                self.progress.say(f"stopped early after epoch {epoch}: {self._early_reason}")
        except (AgreedError, StoppedError) as error:
            if isinstance(error, CallbackError):
                self.training.rounds.drain()
            self.folder.write_results(None, self.trace)
            raise
        finally:
            self.training.block.release()
        summary = self._make_summary()
        self.folder.write_results(summary, self.trace)
        self.callbacks.call("on_end", Summary(summary, self.history, options.out))
        self.callbacks.agree()
        return summary

    @property
    def _is_done(self) -> bool:
        """Whether no epoch is left to train."""
        left = self.options.train.epochs - self.training.position.epoch
        return left <= 0 or bool(self.callbacks.stopped)

    @property
    def _early_reason(self) -> str:
        """Why the run ends before its last epoch; empty if it does not."""
        early = self.training.position.epoch < self.options.train.epochs
        return self.callbacks.stopped if early else ""

    def _make_training(self, callbacks: Callbacks | None) -> RankTraining:
        """Make this rank's training, as at the start of a run."""
        training = RankTraining(self.method, self.links, self.train, self.trace, callbacks)
        training.position.tested_on = self.evaluation.deciding
        training.rounds.report_status = lambda: Status(
            self.stop(), self.folder.checkpoint_is_due(), self.callbacks.failure
        )
        return training

    def _roll_back(self, error: DivergedError) -> None:
        """Go back to a checkpoint, or raise `error` with its remedy; every rank calls it.

        It is the newest one or, if none was written since the last roll-back, the one before that
        roll-back's. Nothing is removed: the writer sets newer checkpoints aside when the run has
        one again.
        """
        before, step = self.training.position.rollbacks, self.training.position.step
        # or messages of abandoned steps would be taken for new ones
        self.training.rounds.drain()
        self.links.drop()
        self.training.check_samples(error)
        if self.folder.path is None or len(before) >= self.options.checkpoint.rollbacks:
            raise DivergedError(self._remedy(error)) from None
        checkpoints = self.folder.checkpoints()
        if not self.folder.saved_since_rollback:
            last = before[-1]["to"]
            checkpoints = [f for f in checkpoints if int(f.name) < last] or checkpoints[:1]
        self._go_back(checkpoints[-1], self.callbacks)
        self.callbacks.agree()
        self.progress.follow(self.training.block, self.stop)
        if (ties := self.training.block.ties) is not None:
            ties.begin()  # copies must not make one step at two rates: what is under way ends first
            self.training.rounds.drain()
        at = self.training.position
        at.rollbacks = [*before, {"step": step, "reason": str(error), "to": at.step}]
        self.training.take_smaller_steps()
        rates = {kind: self.training.block.rates[kind] for kind in ("local", "exact")}
        at.rollbacks[-1]["rates"] = rates
        self.folder.rewind(at.step)
        self._write_metric(
            {"phase": "rollback", "from": step, "rates": [rates["exact"], rates["local"]]}
        )
        self.progress.go_back(at.step)
        self.history = [epoch for epoch in self.history if epoch["step"] <= at.step]
        self.progress.say(
            f"{error}; going on from the checkpoint of step {at.step} with exact steps "
            f"{rates['exact']:g} and local steps {rates['local']:g} times their size"
        )

    def _go_back(self, checkpoint: Path, callbacks: Callbacks | None) -> None:
        """Rebuild the training from a checkpoint; `callbacks`: restore their states, too."""
        self.training.block.release()
        self.training.attributes.load_state(State())  # as the run found them
        self.training = self._make_training(callbacks)
        self._restore(checkpoint)

    def _restore(self, checkpoint: Path) -> list[str]:
        """Restore the training from a checkpoint; give notices for the user."""
        with self.folder.fetched(checkpoint, self.training.files.wanted) as local:
            return self.training.restore(local)

    def _select(self) -> None:
        """Load the weights of the best checkpoint, if it is kept; all ranks call it."""
        if (best := self.folder.best()) is not None:
            self._go_back(best, None)

    def _test_selected(self) -> dict[str, Any]:
        """What the summary says of the selected weights, which stay in the network."""
        end, evaluation = self.training.position, self.evaluation
        self._select()
        at, self.training.position = self.training.position, end
        results: dict[str, Any] = at.results
        if evaluation.tests_at_end:
            tested: dict[str, float] = {}
            try:
                with self.trace.span("evaluate"):
                    tested = evaluation.measure("test", self.training.block, at.step)
            except DivergedError as error:  # which is no reason to lose the training
                self.progress.say(f"{error}: the summary has no figures of the test set")
            tests = {f"test_{name}": value for name, value in tested.items()}
            self._write_metric({"phase": "test", **tests, "selected_epoch": at.epoch})
            results |= tests
        deciding, plateau = evaluation.deciding, self.training.plateau
        results |= describe_selection(self.options, deciding, plateau, at.tested)
        results["selected_epoch"] = at.epoch
        self.progress.say_selected(results)
        return results

    def _remedy(self, error: DivergedError) -> str:
        """Return the error of a run that cannot roll back, with its remedy."""
        text, rollbacks = str(error), len(self.training.position.rollbacks)
        if self.folder.path is not None:
            checkpoints = self.folder.checkpoints()
            text += f"; {rollbacks} roll-backs did not help" if rollbacks else ""
            text += f"; the last good checkpoint is {checkpoints[-1]}" if checkpoints else ""
        return f"{text}; lower the learning rate (now {self.training.peak:g}), or set a clip_norm"

    def _train_epoch(self) -> None:
        at, every = self.training.position, self.options.checkpoint.steps or MANY
        reports: list[PhaseReport] = []
        before = dict(at.totals)
        if self.comparison is not None:
            self.comparison.check_next(self.train, at.epoch)
        for pairs in self.training.groups():
            saved = at.step // every
            reports = self._run_rounds(pairs)
            if at.step < (at.epoch + 1) * self.method.steps:
                if self.stopped:
                    self._stop_with_checkpoint()
                if at.step // every > saved or self.training.rounds.status.due:
                    self._write_checkpoint()
        if statistics := self.training.sampler.share_statistics():
            self._write_metric({"phase": "sampler", **statistics})
        at.epoch += 1
        if notice := self.one_rank.compare(before, at.totals):
            self.progress.say(notice)
        if self._epoch_is_due(self.options.train.evaluate_every):
            self._evaluate()
        tested = at.tested_step == at.step
        results = {
            "step": at.step,
            "loss": reports[0].loss,
            "epoch_loss": at.take_epoch_loss(),
            "learning_rate": reports[0].learning_rate,
            **{name: v if tested else None for name, v in at.results.items()},
        }
        self.callbacks.end_epoch(at.epoch, results)
        if self.callbacks.stopped and not tested:
            self._evaluate()
            results |= at.results
        counted = {"seconds": at.seconds, "samples": int(at.totals["images"])}
        self.history.append({"epoch": at.epoch, "phase": reports[0].phase, **results, **counted})
        if self.stopped and not self._is_done:
            self._stop_with_checkpoint()
        if self._epoch_is_due(self.options.checkpoint.every):
            self._write_checkpoint()

    def _run_rounds(self, pairs: list[tuple[Window, Window]]) -> list[PhaseReport]:
        at = self.training.position
        reports = self.training.run(pairs)
        status = self.training.rounds.status
        self.stopped = status.stop
        self.callbacks.raise_failure(status.failure)
        for report in reports:
            for notice in report.notices:
                self.progress.say(notice)
            report.learning_rate = self.training.learning_rate(report)
            self._write_metric(report.as_json())
        self.callbacks.call("on_report", at.step, at.epoch, reports)
        return reports

    def _evaluate(self) -> None:
        """Measure the network on the deciding set, if there is one."""
        if not self.evaluation.deciding:
            return
        at, block = self.training.position, self.training.block
        with self.trace.span("evaluate"):
            at.tested = self.evaluation.measure(self.evaluation.deciding, block, at.step)
        at.tested_step = at.step
        if self.training.plateau is not None:
            self.training.plateau.take(at.tested, at.step)
        self._write_metric({"phase": self.evaluation.deciding, **at.results})

    def _write_checkpoint(self) -> None:
        """Write a checkpoint, if there is a run folder; DivergedError if weights are not finite."""
        training = self.training
        check_weights(training.block, self.links, training.position.step)
        if self.folder.path is None:
            return
        with self.trace.span("checkpoint"):
            states, manifest = training.collect()
            with training.block.joined():
                units = training.collect_units()
                at = training.position.step
                if notice := self.folder.write_checkpoint(at, units, states, manifest):
                    self.progress.say(notice)

    def _stop_with_checkpoint(self) -> None:
        """Write a checkpoint and raise StoppedError."""
        when = f"{self.stopped} after step {self.training.position.step}"
        if self.folder.path is None:
            self.training.rounds.drain()
            leave(self.links, f"{when}; nothing is kept, because there is no run folder")
        self._write_checkpoint()
        leave(self.links, f"{when}{self.stop.advice}")

    def _epoch_is_due(self, every: int) -> bool:
        return self.training.position.epoch % every == 0 or self._is_done

    def _write_metric(self, line: dict[str, Any]) -> None:
        at = self.training.position
        if notice := self.folder.write_metric({"step": at.step, "epoch": at.epoch, **line}):
            self.progress.say(notice)

    def _make_summary(self) -> dict[str, Any]:
        training, at = self.training, self.training.position
        results: dict[str, Any] = {
            "kernels": self.kernels,
            "links": self.links.name,
            "start_seconds": self.start_seconds,
            "residual": at.residual,
            "returns_to_serial": training.rounds.returns,
            "rollbacks": at.rollbacks,
            "proof": self.proof,
            **self._test_selected(),
            "local_samples": [sum(w) for w in training.rounds.local_budgets]
            * self.options.replicas,
        }
        if self._early_reason:
            results |= {"epochs": at.epoch, "stopped_early": self._early_reason}
        share = share_of_rank(at.totals, training.block.device, self.folder.blocked_seconds)
        everyone = self.links.gather(share)
        return self.links.broadcast(
            {} if everyone is None else make_summary(self.method, everyone, results)
        )
