"""Run folders read again: the network of a run's newest checkpoint."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from hybrid import data, models
from hybrid.data import Dataset
from hybrid.folder import checkpoint
from hybrid.folder.files import write_atomically
from hybrid.folder.runfolder import RunFolder
from hybrid.links import run_threads
from hybrid.ranks import launch
from hybrid.runs import build
from hybrid.settings.config import Config
from hybrid.settings.resolve import load
from hybrid.training.evaluation import accuracy
from solvers.blocks.block import Block


def evaluate(run: Path, data_dir: str | None) -> tuple[float, Path]:
    """Test accuracy of a run's newest checkpoint, on one device; and the checkpoint."""
    resolved, folder, network, test = restore(run, data_dir)
    device = launch.device(resolved.train.device)
    network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    precision = getattr(torch, resolved.train.precision)
    block = Block(network, 0, 1, {}, device, precision)
    threads = len(os.sched_getaffinity(0))
    return run_threads(1, lambda links: accuracy(block, links, test), threads)[0], folder


class Restored(NamedTuple):
    """The network of a run's newest checkpoint, on the CPU, and what it was tested on."""

    settings: Config
    checkpoint: Path
    network: models.Chain
    test: Dataset


def restore(run: Path, data_dir: str | None) -> Restored:
    """Rebuild the composed network of a run; `data_dir` is where its data lie by now."""
    resolved, folder, manifest = _open(run)
    if data_dir is not None:
        resolved.data = resolved.data.model_copy(update={"dir": data_dir})
    _, test = data.load(resolved.data.name, Path(resolved.data.dir) if resolved.data.dir else None)
    network = build.model(resolved, test)
    tensors = checkpoint.load_model(folder, manifest)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"{folder} is not of the model that {run / 'config.toml'} describes: put back the "
            f"settings it was trained with ({' '.join(str(error).split())[:200]})"
        ) from None
    return Restored(resolved, folder, network, test)


def export(run: Path, file: Path) -> None:
    """Write the composed network as one safetensors state dict, whole or not at all.

    ValueError for another ending: what reads a file chooses the format by it.
    """
    if file.suffix != ".safetensors":
        raise ValueError(
            f"{file} would be a safetensors file under another name, which torch.load refuses: "
            f"write {file.with_suffix('.safetensors').name}"
        )
    _, folder, manifest = _open(run)
    tensors = checkpoint.load_model(folder, manifest)
    content = save({k: v.contiguous() for k, v in tensors.items()}, {"model": manifest["model"]})
    write_atomically(file, content)


def _open(run: Path) -> tuple[Config, Path, dict[str, Any]]:
    folder = RunFolder(run).newest()
    if folder is None or not (run / "config.toml").is_file():
        raise ValueError(f"{run} is not a run folder with a checkpoint")
    resolved, manifest = load(run / "config.toml", {}), checkpoint.read_manifest(folder)
    if manifest["model"] != resolved.model.name:
        raise ValueError(
            f"{run} holds a model of your own ({manifest['model']}), not one of this command's: "
            "read its checkpoints with hybrid.folder.checkpoint.load_model"
        )
    return resolved, folder, manifest
