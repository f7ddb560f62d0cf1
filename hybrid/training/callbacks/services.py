"""Loggers to services, whose packages are imported only when a run starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from hybrid.folder.board import scalars
from hybrid.rounds.report import PhaseReport
from hybrid.training.callbacks.base import Callback, RunInfo


class _Service(Callback, ABC):
    """Sends numbers under the tags of TensorBoard; a resumed run continues its record."""

    package: ClassVar[str]

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        """What the caller adds to the call that opens a record."""
        self.id: str | None = None
        """The name of the record at the service, which checkpoints keep."""
        self._record: Any = None
        """What takes the numbers; None while no record is open."""

    def on_start(self, run: RunInfo) -> None:
        try:
            module = import_module(self.package)
        except ImportError:
            raise ValueError(
                f"the package {self.package} is missing: pip install {self.package}, or leave this "
                "callback out"
            ) from None
        settings = {**run.names, "blocks": run.blocks, "cuts": list(run.cuts), **run.settings}
        self._open_record(module, settings, self.id if run.step else None)

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        numbers = [tag for report in reports for tag in scalars(report.as_json())]
        self._send(step, dict(numbers))

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        numbers = {key: x for key, x in results.items() if x is not None and key != "step"}
        self._send(int(results["step"] or 0), {**numbers, "epoch": epoch})

    def state(self) -> dict[str, Any]:
        return {"id": self.id} if self.id else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.id = state["id"]

    @abstractmethod
    def _open_record(self, module: Any, settings: dict[str, Any], earlier: str | None) -> None:
        """Open a new record at the service, or the `earlier` one again."""

    @abstractmethod
    def _send(self, step: int, numbers: dict[str, float]) -> None: ...


class WandbLogger(_Service):
    """Weights & Biases: losses, residuals, test metrics, settings and summary of a run.

    `init_arguments` go to `wandb.init`. ValueError, with the remedy, without the package wandb.
    """

    package = "wandb"

    def __init__(self, project: str, **init_arguments: Any) -> None:
        super().__init__({"project": project, **init_arguments})

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._record.summary.update(dict(summary))
        self._finish(0)

    def close(self) -> None:
        self._finish(1)

    def _open_record(self, module: Any, settings: dict[str, Any], earlier: str | None) -> None:
        resumed = {"id": earlier, "resume": "allow"} if earlier else {}
        arguments = {**resumed, **self.arguments}
        config = {**settings, **(arguments.pop("config", None) or {})}
        self._record = module.init(config=config, **arguments)
        self.id = self._record.id
        # a run that was resumed or rolled back logs some steps for a second time
        self._record.define_metric("step")
        self._record.define_metric("*", step_metric="step")

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self._record.log({**numbers, "step": step})

    def _finish(self, status: int) -> None:
        if self._record is not None:
            self._record.finish(exit_code=status)
        self._record = None


class MLflowLogger(_Service):
    """MLflow: losses, residuals and test metrics of a run, its settings, and summary.json.

    `tracking_uri` None: MLflow's own choice; `run_arguments` go to `mlflow.start_run`. ValueError,
    with the remedy, without the package mlflow.
    """

    package = "mlflow"

    def __init__(
        self, experiment: str, tracking_uri: str | None = None, **run_arguments: Any
    ) -> None:
        super().__init__(run_arguments)
        self.experiment, self.tracking_uri = experiment, tracking_uri

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._record.log_dict(dict(summary), "summary.json")
        self._finish("FINISHED")

    def close(self) -> None:
        self._finish("FAILED")

    def _open_record(self, module: Any, settings: dict[str, Any], earlier: str | None) -> None:
        if self.tracking_uri is not None:
            module.set_tracking_uri(self.tracking_uri)
        module.set_experiment(self.experiment)
        resumed = {"run_id": earlier} if earlier else {}
        started = module.start_run(**{**resumed, **self.arguments})
        self._record, self.id = module, started.info.run_id
        if not earlier:  # MLflow does not allow parameters to change
            module.log_params(settings)

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self._record.log_metrics(numbers, step=step)

    def _finish(self, status: str) -> None:
        if self._record is not None:
            self._record.end_run(status)
        self._record = None
