"""Loggers to services: their records, resumed and failed runs."""

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
from callback_program import STEPS, Failing, short, short_data
from trainings import interrupted, refused

from hybrid import MLflowLogger, WandbLogger

LOGGERS = {"wandb": WandbLogger, "mlflow": MLflowLogger}


@pytest.fixture
def wandb(monkeypatch):
    made = ModuleType("wandb")
    made.run = Mock(id="abc", summary={})
    made.init = Mock(return_value=made.run)
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


@pytest.fixture
def mlflow(monkeypatch):
    made = Mock()
    made.start_run.return_value = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    monkeypatch.setitem(sys.modules, "mlflow", made)
    return made


@pytest.mark.parametrize("package", LOGGERS)
def test_a_missing_package_is_answered_with_the_command(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(short([LOGGERS[package]("mine")], tmp_path / "run"), short_data())
    assert f"pip install {package}," in said
    assert not (tmp_path / "run").exists()


def test_wandb_gets_settings_curves_and_the_summary(wandb):
    found = short([WandbLogger("mine", name="first", config={"note": "x"})]).fit(*short_data())
    (given,) = (call.kwargs for call in wandb.init.call_args_list)
    assert (given["project"], given["name"]) == ("mine", "first")
    assert given["config"]["optimizer.lr"] == 0.1
    assert given["config"]["note"] == "x"
    logged = [call.args[0] for call in wandb.run.log.call_args_list]
    assert [line["step"] for line in logged if "serial/loss" in line] == [4, 5, 9, 10]
    assert logged[-1]["test_accuracy"] == found["test_accuracy"]
    assert wandb.run.summary == found
    wandb.run.finish.assert_called_once_with(exit_code=0)


def test_mlflow_gets_settings_curves_and_the_summary(mlflow):
    found = short([MLflowLogger("mine", "file:x", run_name="first")]).fit(*short_data())
    mlflow.set_tracking_uri.assert_called_once_with("file:x")
    mlflow.set_experiment.assert_called_once_with("mine")
    mlflow.start_run.assert_called_once_with(run_name="first")
    assert mlflow.log_params.call_args.args[0]["train.epochs"] == 2
    numbers, last = mlflow.log_metrics.call_args.args[0], mlflow.log_metrics.call_args.kwargs
    assert numbers["test_accuracy"] == found["test_accuracy"]
    assert last == {"step": 2 * STEPS}
    mlflow.log_dict.assert_called_once_with(found, "summary.json")
    mlflow.end_run.assert_called_once_with("FINISHED")


def test_a_resumed_run_goes_on_with_the_run_at_the_service(wandb, mlflow, tmp_path):
    run = tmp_path / "run"
    short([WandbLogger("mine"), MLflowLogger("mine")], run).fit(*short_data())
    interrupted(run, 1)
    short([WandbLogger("mine"), MLflowLogger("mine")], run, resume=True).fit(*short_data())
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert "id" not in first
    assert (second["id"], second["resume"]) == ("abc", "allow")
    assert [call.kwargs for call in mlflow.start_run.call_args_list] == [{}, {"run_id": "abc"}]
    assert mlflow.log_params.call_count == 1


def test_a_run_that_fails_is_a_failed_one_at_the_service(wandb, mlflow):
    refused(short([WandbLogger("mine"), MLflowLogger("mine"), Failing("on_epoch")]), short_data())
    wandb.run.finish.assert_called_once_with(exit_code=1)
    mlflow.end_run.assert_called_once_with("FAILED")
