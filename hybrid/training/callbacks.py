"""What is called while a run trains, and may ask it to stop; all ranks agree on failures.

A run has two of its own: one prints its progress, and one may stop it early.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from hybrid.errors import AgreedError, reason, tell
from hybrid.links import RankLinks
from hybrid.proof.untouched import Untouched
from hybrid.ranks.progress import Bar
from hybrid.rounds.evaluation import format_results
from hybrid.rounds.phase_report import PhaseReport
from hybrid.settings.selection import Selection
from hybrid.solvers.block import Block
from hybrid.solvers.numerics.draws import Key
from hybrid.solvers.state import State

SECONDS = 30
"""The least time between two lines of progress within an epoch."""


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first step, or when it is resumed."""

    names: Mapping[str, str]
    """Of model, data and solver."""
    cuts: Sequence[str]
    """The first unit of every block but the first."""
    epochs: int
    """The number of epochs to train, in all."""
    steps_per_epoch: int
    step: int
    """Steps done so far: 0 at a start, those of the checkpoint when resumed."""
    results: Mapping[str, float | None]
    """Newest metrics of the validation set, or without one of the test set; empty: none yet."""
    settings: Mapping[str, Any]
    """section.key -> value of [train], [optimizer] and [schedule]."""
    out: Path | None
    """Run folder; None keeps nothing."""


class Callback:
    """Its methods are called on the first rank only, and training waits until they return.

    An exception that it raises ends the run on all ranks, with one line that names its class. So
    does a change of the network that other ranks would not see: of attributes or modes of modules,
    of weights or buffers. What it needs to stop at the same epoch after a resume is kept in
    checkpoints by `state`.
    """

    reason: str = ""
    """Why the run shall stop; empty if it shall not. Set by `on_epoch` and `load_state`."""

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step; a resumed run has called `load_state` before."""

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        """Called after every `train.report_every` mini-batches; `epoch` counts from 0."""

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> bool | None:
        """Called after `epoch` epochs; True asks the run to stop after all callbacks were called.

        `results` has "step", "loss" (of the last report), "epoch_loss" (its mean over the epoch),
        "learning_rate" (of the last step) and the metrics of the validation set, such as
        "validation_accuracy", or without one those of the test set, such as "test_accuracy"; None
        means not measured in this epoch.
        """
        return None

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called when the run has ended without an error and its folder is complete."""

    def close(self) -> None:
        """Called last, also after a failure: close what is open. What it raises is ignored."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON can hold it; empty: nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave, when a run is resumed or goes back to a checkpoint.

        It is not called where a checkpoint has nothing of it.
        """


class CallbackError(AgreedError):
    """A callback has failed; every rank knows."""


class Callbacks:
    """A run's callbacks: `progress`, then the user's. All ranks call its methods but `load_state`.

        first rank   on_report fails          reports        raises
        others                                reports        raise
                          |__ `failure`, kept __|__ `raise_failure` __|

    After a failure no callback is called. The other ranks learn of the failure with the next report
    (`raise_failure`), or in `agree`, which communicates only if the user has callbacks. It is a
    failure, too, if a callback changes what is `untouched` of the network.
    """

    def __init__(
        self,
        progress: Callback,
        callbacks: Sequence[Callback],
        links: RankLinks,
        untouched: Untouched,
    ) -> None:
        self.links, self.untouched = links, untouched
        self._agrees = links.broadcast(bool(callbacks))
        self._all = [] if links.place.number else [progress, *callbacks]
        self.failure = ""
        """Of a callback, on the first rank; empty without one."""
        self.stopped = ""
        """Why the run stops early, on every rank."""
        self._asked = ""
        """The same on the first rank, before the others know it."""

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback; the other ranks learn of a failure later.

        Threads wait until then: their passes would change attributes of modules meanwhile.
        """
        for callback in self._all:
            self._try(callback, hook, *arguments)
        if self.links.in_one_process and not self.links.clocked:
            self.agree()

    def end_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        """Call `on_epoch`; all ranks agree whether the run stops."""
        for callback in self._all:
            if self._try(callback, "on_epoch", epoch, dict(results)):
                self._ask(callback, callback.reason or f"asked for it after epoch {epoch}")
        self.agree()

    def close(self) -> None:
        """Call `close` of every callback."""
        for callback in self._all:
            with suppress(Exception, SystemExit):  # the run has ended, for better or worse
                callback.close()

    def agree(self) -> None:
        """Learn whether a callback asks to stop; CallbackError if one has failed."""
        if self._agrees:
            self.failure, self.stopped = self.links.broadcast((self.failure, self._asked))
            self.raise_failure(self.failure)

    def raise_failure(self, failure: str) -> None:
        """Raise CallbackError if there is a failure, which is the same on all ranks."""
        if failure:
            raise CallbackError(failure)

    def state(self) -> State:
        """The states of the callbacks; CallbackError on all ranks if one cannot be kept."""
        states = {name: self._try(callback, "state") for name, callback in self._named()}
        self.agree()
        return State(shared={name: state for name, state in states.items() if state})

    def load_state(self, state: State) -> None:
        """Restore the states; the ranks must `agree` afterwards. ValueError if a callback fails."""
        self._asked = ""
        for name, callback in self._named():
            if name in state.shared:
                self._try(callback, "load_state", state.shared[name])
                if self.failure:
                    raise ValueError(self.failure)
                self._ask(callback, callback.reason)

    def _ask(self, callback: Callback, why: str) -> None:
        """Note the first callback that asks to stop."""
        if isinstance(why, str) and why and not self._asked:
            early = isinstance(callback, EarlyStopping)
            self._asked = f"{'train.early_stop' if early else type(callback).__name__}: {why}"

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Each callback with its class and its number among those of its class."""
        count = Counter[str]()
        for callback in self._all:
            name = type(callback).__name__
            count[name] += 1
            yield f"{name} {count[name]}", callback

    def _try(self, callback: Callback, hook: str, *arguments: Any) -> Any:
        """The result of a hook; None once one has failed."""
        if self.failure:
            return None
        name = type(callback).__name__
        before = self.untouched.look() if self._is_watched(callback, hook) else None
        try:
            result = getattr(callback, hook)(*arguments)
            result = json.loads(json.dumps(result)) if hook == "state" else result
            if hook == "on_epoch":
                result = _answer(result, callback.reason)
        except (Exception, SystemExit) as error:
            self.failure = f"callback {name} failed in {hook}: {reason(error)}"
            return None
        if before is not None and (fault := self.untouched.fault(before)):
            self.failure = f"callback {name} failed in {hook}: it {fault}"
        return None if self.failure else result

    def _is_watched(self, callback: Callback, hook: str) -> bool:
        """Whether a hook is a user's, and no pass of another thread may run beside it."""
        if hook == "on_end" or (hook == "load_state" and self.links.in_one_process):
            return False
        ours = getattr(getattr(callback, hook), "__module__", None) == __name__
        return callback is not self._all[0] and not ours


def _answer(result: Any, why: Any) -> bool:
    """Whether a callback asks to stop; ValueError where it cannot be told."""
    with suppress(Exception):  # whatever a user's __bool__ raises, an array's for example
        if isinstance(why, str | None):
            return bool(result)
    raise ValueError(
        f"it gave a {type(result).__name__}, with a {type(why).__name__} as the reason: give True "
        "to stop or False to go on, and a reason that is a text"
    )


class EarlyStopping(Callback):
    """Stops once `patience` epochs have passed since the best: of train.early_stop.

    The best has the best value of a metric; of equal values the first is the best, and one that is
    not finite is none. Epochs that were not measured count, but a run stops only after one that
    was. Without a validation or test set the best has the smallest mean training loss.
    """

    best: float | None = None
    """The score of the best epoch, which is larger for better values."""
    value: float | None = None
    """Of the metric in the best epoch."""

    def __init__(
        self, patience: int, measured_on: str = "test", selection: Selection | None = None
    ) -> None:
        """`measured_on` is validation, test or training."""
        self.patience, self.measured_on = patience, measured_on
        trained = measured_on == "training"
        self.selection = Selection("loss") if trained else selection or Selection()
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.best = self.value = None
        self.metric, self.best_epoch, self.epoch = "", epoch, epoch
        self.reason = ""

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> bool:
        prefix = f"{self.measured_on}_"
        measured = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
        if self.measured_on == "training":
            measured = {"loss": results.get("epoch_loss")}
        metric = self.selection.name(measured)
        if measured.get(metric) is None:
            return False
        score = self.selection.score(measured)
        if self._better(score):
            self.best, self.value, self.best_epoch = score, measured[metric], epoch
        self.metric, self.epoch = metric, epoch
        self._decide()
        return bool(self.reason)

    def state(self) -> dict[str, Any]:
        names = ("measured_on", "metric", "value", "best_epoch", "epoch")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        self._begin(int(state["epoch"]))
        metric = str(state["metric"])
        if (state["measured_on"], self.selection.metric or metric) != (self.measured_on, metric):
            return  # what was best by another metric says nothing
        self.metric, self.best_epoch = metric, int(state["best_epoch"])
        if state["value"] is not None:
            self.value = float(state["value"])
            self.best = self.selection.score({metric: self.value})
        self._decide()

    def _decide(self) -> None:
        self.reason = ""
        if self.epoch - self.best_epoch >= self.patience:
            better, than = "finite", ""
            if self.value is not None:
                better, than = "better", f" than {self.value:.4g} (epoch {self.best_epoch})"
            self.reason = (
                f"no {better} {self.measured_on} {self.metric}{than} up to epoch {self.epoch}"
            )

    def _better(self, score: float | None) -> bool:
        return score is not None and (self.best is None or score > self.best)


class ProgressPrinter(Callback):
    """Shows the progress of a run, on rank 0 and unless the run is `quiet`.

    That is a line for each epoch and, between these, a bar, or lines where there is no screen.
    """

    def __init__(self, quiet: bool, unit: str = "samples") -> None:
        self.quiet, self.unit = quiet, unit
        """`unit` is what a sample is called."""
        self.reports: Sequence[PhaseReport] = ()
        self.rate = ""
        """Of the newest reports."""
        self.tested = ""
        """The newest metrics of the validation or test set, with its name."""
        self.bar = Bar(0, quiet=True)
        self.start_time = self.last_line_time = perf_counter()

    def on_start(self, run: RunInfo) -> None:
        self.epochs, self.steps_per_epoch = run.epochs, run.steps_per_epoch
        self.batch_size = run.settings["train.batch_size"]
        self.step = self.start_step = run.step
        self.tested = format_results(run.results)
        self.start_time = self.last_line_time = perf_counter()
        self.bar = Bar(self.epochs * self.steps_per_epoch, self.step, self._where(), self.quiet)

    def follow(self, block: Block, stop: Callable[[], str]) -> None:
        """Let the bar move with each mini-batch that a block begins, until the run shall stop."""
        inner = block.watch or (lambda name, key: nullcontext())

        def watch(name: str, key: Key = ()) -> AbstractContextManager[None]:
            if stop():
                self.bar.close()
            elif len(key) > 1 and key[1] > self.bar.done:
                self.bar.update(key[1], self._where(key[1]))
            return inner(name, key)

        if self.bar.shown:
            block.watch = watch

    def go_back(self, step: int) -> None:
        """Count on from an earlier step."""
        self.step = step
        if self.bar.shown:
            self.bar.update(step, self._where())

    def count_tests(self, done: int, total: int) -> None:
        """Show how far a test has come."""
        if self.bar.shown:
            self.bar.update(text=f"{self._where(self.step - 1)}, evaluation {done}/{total}")

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        """Show the newest losses; without a bar print at most one line in `SECONDS`."""
        seconds = sum(report.seconds for report in reports)
        rate = (step - self.step) * self.batch_size / max(seconds, 1e-9)
        self.rate, self.step, self.reports = f"{rate:,.0f} {self.unit}/s", step, reports
        if self.bar.shown:
            self.bar.update(step, rate=f"loss {reports[0].loss:.4f}  {self.rate}")
        elif perf_counter() - self.last_line_time > SECONDS:
            total = self.epochs * self.steps_per_epoch
            self.say(f"step {step}/{total}  {self._describe()}")

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        """Print one line for each epoch, with the newest test."""
        self.tested = format_results(results) or self.tested
        self.bar.update(text=self._where(self.step - 1))
        tested = f"{self.tested}  " if self.tested else ""
        self.say(f"epoch {epoch}/{self.epochs}  {tested}{self._describe()}")

    def close(self) -> None:
        self.bar.close()

    def say_selected(self, results: Mapping[str, Any]) -> None:
        """Print what a test at the end found, or that weights were selected on the test set."""
        if "validation_loss" in results and "test_loss" in results:
            tested = {k: v for k, v in results.items() if k.startswith("test_")}
            epoch = results["selected_epoch"]
            self.say(f"{format_results(tested)}  with the weights after epoch {epoch}")
        elif results["selected_on"] == "test":
            self.say(
                f"selected on the test set, by {results['selected_by']}, so its figures are "
                "optimistic: hold out a share of the training set with --set data.validation=0.1, "
                "or give fit(..., validation=...)"
            )

    def say(self, text: str) -> None:
        """Print a line, unless the run is quiet."""
        self.last_line_time = perf_counter()
        if not self.quiet and not tell(text, sys.stdout):
            self.quiet = True
            tell("hybrid: nobody reads the output any more; the run goes on")

    def _where(self, step: int | None = None) -> str:
        """The epoch of a step, of the next one unless it is said."""
        epoch = (self.step if step is None else step) // self.steps_per_epoch + 1
        return f"epoch {min(epoch, self.epochs)}/{self.epochs}"

    def _describe(self) -> str:
        first, last = self.reports[0], self.reports[-1]
        elapsed = perf_counter() - self.start_time
        steps_left = self.epochs * self.steps_per_epoch - self.step
        left = elapsed / max(1, self.step - self.start_step) * steps_left
        parts = [
            f"loss {first.loss:.4f}",
            *([] if first.accuracy is None else [f"accuracy {first.accuracy:6.2%}"]),
            self.rate,
            *([f"residual {max(last.residual):.3f}"] if any(last.residual) else []),
        ]
        return "  ".join([*parts, f"left {timedelta(seconds=round(left))}"])
