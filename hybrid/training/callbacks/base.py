"""The callbacks of a run: all ranks agree on their failures, and when they ask it to stop."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hybrid.errors import AgreedError, reason
from hybrid.links import RankLinks
from hybrid.method.callback import Callback
from hybrid.proof.network_guard import NetworkGuard
from hybrid.settings.selection import Selection
from hybrid.solvers.state import State


class CallbackError(AgreedError):
    """A callback has failed; every rank knows."""


class Callbacks:
    """A run's callbacks: `progress`, then the user's. All ranks call its methods but `load_state`.

        first rank   on_report fails          reports        raises
        others                                reports        raise
                          |__ `failure`, kept __|__ `raise_failure` __|

    After a failure no callback is called. The other ranks learn of the failure with the next report
    (`raise_failure`), or in `agree`, which communicates only if the user has callbacks. It is a
    failure, too, if a callback changes the network.
    """

    def __init__(
        self,
        progress: Callback,
        callbacks: Sequence[Callback],
        links: RankLinks,
        guard: NetworkGuard,
    ) -> None:
        self.links, self.guard = links, guard
        self._agrees = links.broadcast(bool(callbacks))
        self._all = [] if links.place.number else [progress, *callbacks]
        self.failure = ""
        """The failure of a callback, on the first rank; empty without one."""
        self.stopped = ""
        """Why the run stops early, on every rank."""
        self._asked = ""
        """The reason on the first rank, before the others know it."""

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
                self._ask(callback, str(callback.reason) or f"asked for it after epoch {epoch}")
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
        """Raise CallbackError on all ranks if a callback has failed."""
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
                self._ask(callback, str(callback.reason))

    def _ask(self, callback: Callback, why: str) -> None:
        """Note the first callback that asks to stop."""
        if why and not self._asked:
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
        before = self.guard.look() if self._is_watched(callback, hook) else None
        try:
            result = getattr(callback, hook)(*arguments)
            result = json.loads(json.dumps(result)) if hook == "state" else result
            result = bool(result) if hook == "on_epoch" else result
        except (Exception, SystemExit) as error:
            self.failure = f"callback {name} failed in {hook}: {reason(error)}"
            return None
        if before is not None and (fault := self.guard.describe_change(before)):
            self.failure = f"callback {name} failed in {hook}: it {fault}"
        return None if self.failure else result

    def _is_watched(self, callback: Callback, hook: str) -> bool:
        """Whether a hook is a user's, and no pass of another thread may run beside it."""
        if hook == "on_end" or (hook == "load_state" and self.links.in_one_process):
            return False
        ours = getattr(getattr(callback, hook), "__module__", None) == __name__
        return callback is not self._all[0] and not ours


class EarlyStopping(Callback):
    """Stops once `patience` epochs have passed since the best one: of train.early_stop.

    The best has the best value of a metric; of equal values the first is the best, and one that is
    not finite is none. Epochs that were not measured count, but a run stops only after one that
    was. Without a validation or test set the best has the smallest mean training loss.
    """

    def __init__(
        self, patience: int, measured_on: str = "test", selection: Selection | None = None
    ) -> None:
        """`measured_on` is validation, test or training."""
        self.patience, self.measured_on = patience, measured_on
        trained = measured_on == "training"
        self.selection = Selection("loss") if trained else selection or Selection()
        self.metric = ""
        self.value: float | None = None
        """The metric in the best epoch."""
        self.best_epoch = self.epoch = 0

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> bool:
        prefix = f"{self.measured_on}_"
        measured = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
        if self.measured_on == "training":
            measured = {"loss": results.get("epoch_loss")}
        metric = self.selection.name(measured)
        if measured.get(metric) is None:
            return False
        score = self.selection.score(measured)
        best = None if self.value is None else self.selection.score({self.metric: self.value})
        if score is not None and (best is None or score > best):
            self.value, self.best_epoch = measured[metric], epoch
        self.metric, self.epoch = metric, epoch
        self._decide()
        return bool(self.reason)

    def state(self) -> dict[str, Any]:
        names = ("measured_on", "metric", "value", "best_epoch", "epoch")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        self.metric, self.epoch = str(state["metric"]), int(state["epoch"])
        self.best_epoch, self.value = self.epoch, None
        # what was best by another metric says nothing
        wanted = self.measured_on, self.selection.metric or self.metric
        if wanted == (state["measured_on"], self.metric):
            self.best_epoch = int(state["best_epoch"])
            self.value = None if state["value"] is None else float(state["value"])
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
