"""Ends a run that no longer gets better."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, get_args

from hybrid.training.callbacks import Callback, RunInfo

Mode = Literal["auto", "max", "min"]


class EarlyStopping(Callback):
    """Stops once `patience` epochs have passed since the one with the best `metric`.

    `metric` is a key of the results of an epoch, or `test`: the accuracy where there is one, else
    the loss on the test set. Better is larger (`max`) or smaller (`min`); auto: smaller for what
    has "loss" in its name. Epochs in which it was not measured count, but a run stops only after
    one in which it was. ValueError for a value that cannot be.
    """

    best: float | None = None

    def __init__(
        self, metric: str = "test_accuracy", patience: int = 5, mode: Mode = "auto"
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience is {patience}; it must be at least 1 epoch")
        if mode not in get_args(Mode):
            raise ValueError(f"mode is {mode!r}; it must be {', '.join(get_args(Mode))}")
        self.metric, self.patience, self.mode = metric, patience, mode
        self.load_state({"best": None, "best_epoch": 0, "epoch": 0})

    def on_start(self, run: RunInfo) -> None:
        if not run.step:
            self.load_state({"best": None, "best_epoch": 0, "epoch": 0})

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> bool:
        name = self.metric
        if name == "test":
            measured = results.get("test_accuracy") is not None or "test_loss" not in results
            name = "test_accuracy" if measured else "test_loss"
        elif name not in results:
            raise ValueError(
                f"metric is {name!r}, which an epoch's results have not: choose "
                f"{', '.join(sorted(results))} or test"
            )
        value = results[name]
        if value is None:
            return False
        if self._better(name, value):
            self.best, self.best_epoch = value, epoch
        self.epoch = epoch
        self._settle()
        return bool(self.reason)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "epoch": self.epoch}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best = None if state["best"] is None else float(state["best"])
        self.best_epoch, self.epoch = int(state["best_epoch"]), int(state["epoch"])
        self._settle()

    def _settle(self) -> None:
        self.reason = ""
        if self.epoch - self.best_epoch >= self.patience:
            what = "test metric" if self.metric == "test" else self.metric
            than = "" if self.best is None else f" than {self.best:.6g} (epoch {self.best_epoch})"
            self.reason = f"no better {what}{than} up to epoch {self.epoch}"

    def _better(self, name: str, value: float) -> bool:
        if not isfinite(value) or self.best is None:
            return isfinite(value)
        smaller = self.mode == "min" or (self.mode == "auto" and "loss" in name)
        return value < self.best if smaller else value > self.best
