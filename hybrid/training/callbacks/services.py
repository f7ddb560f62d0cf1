"""Loggers to services, whose packages are imported only when a run starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.folder.board import scalars
from hybrid.rounds.report import PhaseReport
from hybrid.training.callbacks.base import Callback, RunInfo


class _Service(Callback, ABC):
    """Sends numbers under the tags of TensorBoard; a resumed run continues its record."""

    def __init__(self) -> None:
        self.id: str | None = None
        """Of the run at the service, kept in checkpoints."""

    def on_report(self, step: int, epoch: int, reports: Sequence[PhaseReport]) -> None:
        numbers = [tag for report in reports for tag in scalars(report.as_json())]
        self._send(step, dict(numbers))

    def on_epoch(self, epoch: int, results: Mapping[str, float | None]) -> None:
        told = {key: x for key, x in results.items() if x is not None and key != "step"}
        self._send(int(results["step"] or 0), {**told, "epoch": epoch})

    def state(self) -> dict[str, Any]:
        return {"id": self.id} if self.id else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.id = state["id"]

    @abstractmethod
    def _send(self, step: int, numbers: dict[str, float]) -> None: ...


class WandbLogger(_Service):
    """Weights & Biases: losses, residuals, test metrics, settings and summary of a run.

    `init_arguments` go to `wandb.init`. ValueError, with the remedy, without the package wandb.
    """

    def __init__(self, project: str, **init_arguments: Any) -> None:
        super().__init__()
        self.project, self.arguments = project, init_arguments
        self._run: Any = None

    def on_start(self, run: RunInfo) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(_missing("wandb")) from None
        before = {"id": self.id, "resume": "allow"} if run.step and self.id else {}
        given = {**before, **self.arguments}
        config = {**_facts(run), **(given.pop("config", None) or {})}
        self._run = wandb.init(project=self.project, config=config, **given)
        self.id = self._run.id
        # a run that was resumed or rolled back has steps again that were logged before
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._finish(0)

    def close(self) -> None:
        self._finish(1)

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def _finish(self, status: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=status)


class MLflowLogger(_Service):
    """MLflow: losses, residuals and test metrics of a run, its settings, and summary.json.

    `tracking_uri` None: MLflow's own choice; `run_arguments` go to `mlflow.start_run`. ValueError,
    with the remedy, without the package mlflow.
    """

    def __init__(
        self, experiment: str, tracking_uri: str | None = None, **run_arguments: Any
    ) -> None:
        super().__init__()
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self.arguments = run_arguments
        self._mlflow: Any = None

    def on_start(self, run: RunInfo) -> None:
        try:
            import mlflow
        except ImportError:
            raise ValueError(_missing("mlflow")) from None
        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        mlflow.set_experiment(self.experiment)
        before = {"run_id": self.id} if run.step and self.id else {}
        started = mlflow.start_run(**{**before, **self.arguments})
        self._mlflow, self.id = mlflow, started.info.run_id
        if not before:  # parameters cannot be changed
            mlflow.log_params(_facts(run))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._mlflow.log_dict(dict(summary), "summary.json")
        self._finish("FINISHED")

    def close(self) -> None:
        self._finish("FAILED")

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def _finish(self, status: str) -> None:
        mlflow, self._mlflow = self._mlflow, None
        if mlflow is not None:
            mlflow.end_run(status)


def _missing(package: str) -> str:
    return f"the package {package} is missing: pip install {package}, or leave this callback out"


def _facts(run: RunInfo) -> dict[str, Any]:
    return {**run.names, "blocks": run.blocks, "cuts": list(run.cuts), **run.settings}
