"""Run folders read again: the network of a run's newest checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save
from torch import nn

from hybrid import data, models
from hybrid.cuts.arguments import make_units_of_list
from hybrid.cuts.partition import split
from hybrid.data import Data
from hybrid.files import write_atomically
from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import best as best_of
from hybrid.folder.runfolder import RunFolder
from hybrid.method.blocks import placed
from hybrid.method.objectives import Objectives
from hybrid.method.options import Options
from hybrid.ranks import launch
from hybrid.runs import build, references
from hybrid.settings import resolve
from hybrid.settings.config import Config
from hybrid.settings.sections.base import is_reference
from hybrid.solvers.blocks.block import Block
from hybrid.training.config_export import OWN_LOSS
from hybrid.training.evaluation import measure_one_block

Model = TypeVar("Model", bound=nn.Module)


class OwnCode(NamedTuple):
    """What the command line gives of a run with code of the user's own."""

    model: str | None = None
    """package.module:function that makes the network."""
    data: str | None = None
    """package.module:function that makes (training, test) data."""
    loss: str | None = None
    """package.module:function, or the name of a loss."""
    metrics: tuple[str, ...] = ()
    """NAME=package.module:object of each, in place of accuracy."""
    data_dir: str | None = None
    """Where the data of this package's sources lie by now."""


NO_CODE = OwnCode()


def evaluate(
    run: Path,
    own: OwnCode = NO_CODE,
    best: bool = False,
) -> tuple[dict[str, float], Path]:
    """Loss and metrics of a run's newest (or best) checkpoint, on one device; and its folder."""
    resolved, folder, network, test = restore(run, own, best)
    device = launch.device(resolved.train.device)
    _check_code_is_given(run, "--loss", resolved.train.loss, own.loss)
    name = own.loss or resolved.train.loss
    if name == OWN_LOSS:
        raise ValueError(
            f"{run} was trained with a loss of your own: give --loss package.module:function, or "
            "the name of a loss"
        )
    loss = references.load_function(name, "--loss") if is_reference(name) else None
    named = resolved.train.model_copy(update={} if loss else {"loss": name})
    blocks = split(network, 1).with_bundles(test.sample(2)[0])
    options = Options(train=named, loss=loss, metrics=references.load_metrics(own.metrics))
    objectives = Objectives.settle(options, blocks, test, test)
    precision = getattr(torch, resolved.train.precision)
    block = Block(placed(blocks.module(0), device), 0, 1, {}, device, precision)
    threads = len(os.sched_getaffinity(0))
    return measure_one_block(block, test, objectives.test, threads), folder


def load(
    run: str | Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    data_dir: str | None = None,
    best: bool = False,
) -> nn.Module:
    """The network of a run's newest (or best) checkpoint, on the CPU, in evaluation mode.

    `model` is what made it, or one like it, whose weights are replaced; None: a network of this
    package, which the run's settings make again, from data that may lie in `data_dir` by now.
    ValueError if the run does not say how, or holds another model.
    """
    if model is None:
        return restore(Path(run), OwnCode(data_dir=data_dir), best).network.eval()
    _, folder, manifest = _open_run(Path(run), best)
    made = model if isinstance(model, nn.Module) else model()
    network = made if isinstance(made, nn.Module) else make_units_of_list(made)[0]
    return _load_weights(network, folder, manifest, "model=").eval()


class Restored(NamedTuple):
    """The network of a run's checkpoint, on the CPU, and what it was tested on."""

    settings: Config
    checkpoint: Path
    network: nn.Module
    test: Data


def restore(run: Path, own: OwnCode = NO_CODE, best: bool = False) -> Restored:
    """Rebuild the composed network of a run; ValueError if something of one's own is missing."""
    resolved, folder, manifest = _open_run(run, best)
    if own.data_dir is not None:
        resolved.data = resolved.data.model_copy(update={"dir": own.data_dir})
    named = own.data or resolved.data.name
    if named in data.NAMES or data.reference(named):
        _check_code_is_given(run, "--data", resolved.data.name, own.data)
    else:
        raise ValueError(
            f"{run} was trained on data of your own ({named}): give --data "
            "package.module:function, which gives (training, test) data"
        )
    _, test = build.load_data_sets(resolved.data.model_copy(update={"name": named, "limit": 0}))
    model = own.model or resolved.model.name
    if is_reference(model):
        _check_code_is_given(run, "--model", resolved.model.name, own.model)
        made = references.make_network(model)
        network = made if isinstance(made, nn.Module) else make_units_of_list(made)[0]
        where = f"--model {model}"
    elif models.NAME.fullmatch(model) is None:
        raise ValueError(
            f"{run} holds a model of your own ({model}): give --model "
            "package.module:function, which makes one like it"
        )
    else:
        network, where = build.build_model(resolved, test), f"{run / 'config.toml'}"
    return Restored(resolved, folder, _load_weights(network, folder, manifest, where), test)


def _check_code_is_given(run: Path, flag: str, stored: str, given: str | None) -> None:
    """ValueError for a function that the run's file names and the command line does not."""
    if given is None and is_reference(stored):
        raise ValueError(
            f"{run} was made with {flag} {stored}, code that would run: give {flag} {stored} again"
        )


def _load_weights(network: Model, folder: Path, manifest: dict[str, Any], where: str) -> Model:
    """The network, with its weights replaced by those of a checkpoint."""
    tensors = checkpoint.load_model(folder, manifest)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"{folder} is not of the model that {where} describes: put back what it was trained "
            f"with ({' '.join(str(error).split())[:200]})"
        ) from None
    return network


def export(run: Path, file: Path, best: bool = False) -> None:
    """Write the composed network as one safetensors state dict, whole or not at all.

    ValueError for another ending: what reads a file chooses the format by it.
    """
    if file.suffix != ".safetensors":
        raise ValueError(
            f"{file} would be a safetensors file under another name, which torch.load refuses: "
            f"write {file.with_suffix('.safetensors').name}"
        )
    _, folder, manifest = _open_run(run, best)
    tensors = checkpoint.load_model(folder, manifest)
    content = save({k: v.contiguous() for k, v in tensors.items()}, {"model": manifest["model"]})
    write_atomically(file, content)


def _open_run(run: Path, best: bool) -> tuple[Config, Path, dict[str, Any]]:
    folder = RunFolder(run).newest()
    if folder is None or not os.path.lexists(run / "config.toml"):
        raise ValueError(f"{run} is not a run folder with a checkpoint")
    resolved = resolve.load(None, {}, base=run / "config.toml")
    if best:
        folder = _best_checkpoint(run, resolved)
    manifest = checkpoint.read_manifest(folder)
    if manifest["model"] != resolved.model.name:
        raise ValueError(
            f"{run / 'config.toml'} says {resolved.model.name}, {folder} of {manifest['model']}: "
            "put back the settings it was trained with"
        )
    return resolved, folder, manifest


def _best_checkpoint(run: Path, resolved: Config) -> Path:
    """The best checkpoint; ValueError if the run did not keep it."""
    settings = resolved.checkpoint
    if not settings.best and settings.keep_last:
        raise ValueError(
            f"{run} kept its newest {settings.keep_last} checkpoints, not the best one: leave out "
            "--best, or train with --set checkpoint.best=true"
        )
    found = best_of(checkpoint.complete(RunFolder(run).checkpoints))
    if found is None:
        raise ValueError(
            f"{run} has no checkpoint of weights that were tested: leave out --best, or train to "
            "the end of an epoch that train.evaluate_every and checkpoint.every share"
        )
    return found
