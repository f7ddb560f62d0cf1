"""Loggers to services. Their packages are imported only when a run starts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from hybrid.folder.board import scalars
from hybrid.method.callback import Callback, RunInfo
from hybrid.rounds.phase_report import PhaseReport


class _Service(Callback, ABC):
    """Sends numbers under the tags of TensorBoard; a resumed run continues its record."""

    package: ClassVar[str]
    record_id: str | None = None
    """The name of the record at the service, which checkpoints keep."""
    record: Any = None
    """What takes the numbers; None while no record is open."""

    def on_start(self, run: RunInfo) -> None:
        try:
            module = import_module(self.package)
        except ImportError:
            raise ValueError(
                f"the package {self.package} is missing: pip install {self.package}, or leave this "
                "callback out"
            ) from None
        cuts = list(run.cuts)
        settings = {**run.names, "blocks": len(cuts) + 1, "cuts": cuts, **run.settings}
        self._open(module, settings, self.record_id if run.step else None)

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        self._send(step, dict(tag for report in reports for tag in scalars(report.as_json())))

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        numbers = {key: x for key, x in results.items() if x is not None and key != "step"}
        self._send(int(results["step"] or 0), {**numbers, "epoch": epoch})

    def close(self) -> None:
        if self.record is not None:
            self._end(failed=True)

    def state(self) -> dict[str, Any]:
        return {"id": self.record_id} if self.record_id else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.record_id = state["id"]

    @abstractmethod
    def _open(self, module: Any, settings: dict[str, Any], earlier: str | None) -> None:
        """Open a new record at the service, or the `earlier` one again."""

    @abstractmethod
    def _send(self, step: int, numbers: dict[str, float]) -> None: ...

    @abstractmethod
    def _end(self, failed: bool) -> None: ...


class WandbLogger(_Service):
    """Weights & Biases: losses, residuals, test metrics, settings and summary of a run.

    `init_arguments` go to `wandb.init`. ValueError, with the remedy, without the package wandb.
    """

    package = "wandb"

    def __init__(self, project: str, **init_arguments: Any) -> None:
        self.arguments = {"project": project, **init_arguments}

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.record.summary.update(dict(summary))
        self._end(failed=False)

    def _open(self, module: Any, settings: dict[str, Any], earlier: str | None) -> None:
        arguments: dict[str, Any] = {"id": earlier, "resume": "allow"} if earlier else {}
        arguments |= self.arguments
        arguments["config"] = {**settings, **(arguments.get("config") or {})}
        self.record = module.init(**arguments)
        self.record_id = self.record.id
        # a run that was resumed or rolled back logs some steps for a second time
        self.record.define_metric("step")
        self.record.define_metric("*", step_metric="step")

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self.record.log({**numbers, "step": step})

    def _end(self, failed: bool) -> None:
        self.record.finish(exit_code=int(failed))
        self.record = None


class MLflowLogger(_Service):
    """MLflow: losses, residuals and test metrics of a run, its settings, and summary.json.

    `tracking_uri` None: MLflow's own choice; `run_arguments` go to `mlflow.start_run`. ValueError,
    with the remedy, without the package mlflow.
    """

    package = "mlflow"

    def __init__(
        self, experiment: str, tracking_uri: str | None = None, **run_arguments: Any
    ) -> None:
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self.arguments = run_arguments

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.record.log_dict(dict(summary), "summary.json")
        self._end(failed=False)

    def _open(self, module: Any, settings: dict[str, Any], earlier: str | None) -> None:
        if self.tracking_uri is not None:
            module.set_tracking_uri(self.tracking_uri)
        module.set_experiment(self.experiment)
        started = module.start_run(**{**({"run_id": earlier} if earlier else {}), **self.arguments})
        self.record, self.record_id = module, started.info.run_id
        if not earlier:  # MLflow does not allow parameters to change
            module.log_params(settings)

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self.record.log_metrics(numbers, step=step)

    def _end(self, failed: bool) -> None:
        self.record.end_run("FAILED" if failed else "FINISHED")
        self.record = None
