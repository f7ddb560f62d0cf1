"""Calls a run's callbacks on its first rank; all ranks agree on failures and stops."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from hybrid.errors import AgreedError, reason
from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.settings.config import Section
from hybrid.solvers.state import State
from hybrid.training.callbacks.base import Callback, RunInfo
from hybrid.training.callbacks.early_stopping import EarlyStopping
from hybrid.training.options import RunOptions


class CallbackError(AgreedError):
    """A callback has failed; every rank knows."""


def make_run_info(
    method: Method, options: RunOptions, step: int, results: Mapping[str, float | None]
) -> RunInfo:
    """What callbacks know of a run after `step` steps."""
    train = options.train
    sections = {"train": train, "optimizer": options.optimizer, "schedule": options.schedule}
    return RunInfo(
        names=dict(options.names),
        cuts=list(method.problem.blocks.cuts),
        epochs=train.epochs,
        steps_per_epoch=method.steps,
        batch_size=train.batch_size,
        step=step,
        results=dict(results),
        settings={
            f"{name}.{key}": value
            for name, section in sections.items()
            if isinstance(section, Section)
            for key, value in section.model_dump().items()
        },
        out=options.out,
    )


class Callbacks:
    """A run's callbacks, `shown` first. All ranks call its methods but `load_state` and `close`.

        first rank   on_report fails          reports        raises
        others                                reports        raise
                          |__ `failure`, kept __|__ `raise_failure` __|

    After a failure no callback is called. The other ranks learn of the failure with the next report
    (`raise_failure`), or in `agree`, which communicates only if the run has callbacks of its own.
    """

    def __init__(self, shown: Callback, options: RunOptions, links: RankLinks) -> None:
        patience = options.train.early_stop
        own = [*options.callbacks, *([EarlyStopping("test", patience)] if patience else [])]
        self.links = links
        self._agrees = links.broadcast(bool(own))
        self._all = [] if links.place.number else [shown, *own]
        self.failure = ""
        """Of a callback, on the first rank; empty without one."""
        self.stopped = ""
        """Why the run stops early, on every rank."""
        self._asked = ""
        """The same on the first rank, before the others know it."""

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback; the other ranks learn of a failure later."""
        for callback in self._all:
            self._try(callback, hook, *arguments)

    def end_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        """Call `on_epoch`; all ranks agree whether the run stops."""
        for callback in self._all:
            if self._try(callback, "on_epoch", epoch, dict(results)):
                why = callback.reason or f"asked for it after epoch {epoch}"
                self._asked = self._asked or _name_reason(callback, why)
        self.agree()

    def close(self) -> None:
        """Call `close`; only the first rank has callbacks."""
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
        return State(shared={name: kept for name, kept in states.items() if kept})

    def load_state(self, state: State) -> None:
        """Restore the states; the ranks must `agree` afterwards. ValueError if a callback fails."""
        self._asked = ""
        for name, callback in self._named():
            if name not in state.shared:
                continue
            self._try(callback, "load_state", state.shared[name])
            if self.failure:
                raise ValueError(self.failure)
            if callback.reason:
                self._asked = self._asked or _name_reason(callback, callback.reason)

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
        try:
            found = getattr(callback, hook)(*arguments)
            return json.loads(json.dumps(found)) if hook == "state" else found
        except (Exception, SystemExit) as error:
            self.failure = f"callback {type(callback).__name__} failed in {hook}: {reason(error)}"
            return None


def _name_reason(callback: Callback, why: str) -> str:
    return f"{type(callback).__name__}: {why}"
