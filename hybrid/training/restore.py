"""Run folders read again: the network of a run's newest checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save
from torch import nn

from hybrid.data import NAMES, Data, reference
from hybrid.files import write_atomically
from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import best as best_of
from hybrid.folder.runfolder import RunFolder
from hybrid.networks import models
from hybrid.networks.partition import split
from hybrid.settings import resolve
from hybrid.settings.config import Config
from hybrid.settings.sections.base import is_reference
from hybrid.training import build, references
from hybrid.training.summary import OWN_LOSS
from hybrid.training.trainer import Trainer

Model = TypeVar("Model", bound=nn.Module)


def evaluate(
    run: Path, *, loss: str | None = None, best: bool = False, **own: str | None
) -> tuple[dict[str, float], Path]:
    """Loss and metrics of a run's newest (or best) checkpoint, on one device; and its folder.

    `loss` is package.module:function, or the name of a loss; `own` is as in `restore`.
    """
    settings, folder, network, test = restore(run, best=best, **own)
    if test is None:
        raise ValueError(
            f"the data of {run} have no test set: give --data package.module:function, which gives "
            "(training, test) data"
        )
    train = settings.train
    name = _name(run, "--loss", train.loss, loss, train.loss != OWN_LOSS)
    function = references.load_loss(name)
    named = train.model_copy(update={} if function else {"loss": name})
    return Trainer(split(network, 1), train=named, loss=function).evaluate(test), folder


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
        _, _, network, _ = restore(Path(run), data_dir=data_dir, best=best)
        return network.eval()
    _, folder, manifest = _open_run(Path(run), best)
    network = model if isinstance(model, nn.Module) else model()
    return _load_weights(network, folder, manifest, "model=").eval()


def restore(
    run: Path,
    *,
    model: str | None = None,
    data: str | None = None,
    data_dir: str | None = None,
    best: bool = False,
) -> tuple[Config, Path, nn.Module, Data | None]:
    """A run's settings, its checkpoint, the network of that on the CPU, and its test data, if any.

    `model` and `data` are package.module:function, which make what was the user's own; `data_dir`
    is where the data of this package's sources lie by now. ValueError if one is missing.
    """
    settings, folder, manifest = _open_run(run, best)
    stored = settings.data.name
    known = stored in NAMES or bool(reference(stored))
    news = {"name": _name(run, "--data", stored, data, known), "limit": 0}
    if data_dir is not None:
        news["dir"] = data_dir
    train, test = build.load_data_sets(settings.data.model_copy(update=news), settings.train.loss)
    known = is_reference(settings.model.name) or bool(models.NAME.fullmatch(settings.model.name))
    name = _name(run, "--model", settings.model.name, model, known)
    if is_reference(name):
        network, where = references.make_network(name), f"--model {name}"
    else:
        network, where = build.build_model(settings, train), f"{run / 'config.toml'}"
    return settings, folder, _load_weights(network, folder, manifest, where), test


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


def _name(run: Path, flag: str, stored: str, given: str | None, known: bool) -> str:
    """The name that is given, or else the run's own.

    ValueError for one that only a script knows, and for code that would run although the command
    line does not name it.
    """
    if given is None and not known:
        raise ValueError(
            f"{run} was made with {flag} of your own ({stored}): give {flag} "
            "package.module:function, one like it"
        )
    if given is None and is_reference(stored):
        raise ValueError(
            f"{run} was made with {flag} {stored}, code that would run: give {flag} {stored} again"
        )
    return given or stored


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


def _open_run(run: Path, best: bool) -> tuple[Config, Path, dict[str, Any]]:
    """The settings of a run, its newest or best checkpoint, and the manifest of that."""
    folder = RunFolder(run).newest()
    if folder is None or not os.path.lexists(run / "config.toml"):
        raise ValueError(f"{run} is not a run folder with a checkpoint")
    settings = resolve.load(None, {}, base=run / "config.toml")
    kept = settings.checkpoint
    if best and not kept.best and kept.keep_last:
        raise ValueError(
            f"{run} kept its newest {kept.keep_last} checkpoints, not the best one: leave out "
            "--best, or train with --set checkpoint.best=true"
        )
    if best:
        folder = best_of(checkpoint.complete(RunFolder(run).checkpoints))
    if folder is None:
        raise ValueError(
            f"{run} has no checkpoint of weights that were tested: leave out --best, or train to "
            "the end of an epoch that train.evaluate_every and checkpoint.every share"
        )
    manifest = checkpoint.read_manifest(folder)
    if manifest["model"] != settings.model.name:
        raise ValueError(
            f"{run / 'config.toml'} says {settings.model.name}, {folder} of {manifest['model']}: "
            "put back the settings it was trained with"
        )
    return settings, folder, manifest
