"""Checkpoints: one safetensors file for each unit, and a JSON manifest with their checksums."""

import hashlib
import json
import os
import re
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from hybrid.files import read_whole, remove
from hybrid.folder.manifest import MOST_BYTES, CheckpointFiles, ManifestPart, RunPosition, check
from hybrid.networks.units import Unit
from hybrid.settings.selection import Selection
from hybrid.solvers.numerics.optimizer_state import flat, from_tensors, optimizer_state, to_tensors
from hybrid.solvers.state import entries, sha256
from hybrid.weights import write_tensors

FORMAT = 13
STATE = ".."
"""Between a parameter's name, in which two dots never meet, and an entry of its state."""
MANIFEST = "manifest.json"
"""Written last and removed first: a folder without it is no checkpoint."""
Optimizers = Mapping[str, torch.optim.Optimizer]


References = dict[str, dict[str, Any]]
"""By name what a manifest says of the frozen weights that no file of a checkpoint has."""


def tensors_of(
    unit: Unit, optimizers: Optimizers, left_out: Container[str] = ()
) -> dict[str, Tensor]:
    """The tensors of a unit's file: its parameters and buffers, and their optimizer state."""
    tensors = {name: x for name, x in unit.tensors().items() if name not in left_out}
    for kind, optimizer in _distinct(optimizers).items():
        for name, parameter in unit.parameters().items():
            for slot, value in to_tensors(optimizer.state.get(parameter, {})).items():
                tensors[f"{name}{STATE}{kind}.{slot}"] = value
    return tensors


def reference(tensor: Tensor) -> dict[str, Any]:
    """What a manifest says of a tensor that is left out."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": [*tensor.shape], "dtype": dtype, "sha256": sha256(tensor)}


def check_left_out(folder: Path, references: References, found: References) -> None:
    """ValueError unless the weights that a checkpoint leaves out are `found` in a network."""
    if others := [name for name, each in references.items() if found.get(name) != each]:
        raise ValueError(
            f"{folder} leaves out {len(references)} frozen weights, of which the network has "
            f"{len(others)} other ones ({', '.join(others[:3])}): give the network with the frozen "
            "weights that the run began with"
        )


def write(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write one file; give its entry in the manifest."""
    file = quote(name, safe="") + ".safetensors"
    digest, size = write_tensors(folder / file, tensors)
    return {"file": file, "sha256": digest, "bytes": size}


def complete(root: Path) -> list[Path]:
    """The whole checkpoints below `root`, oldest first."""
    named = (p for p in root.glob("[0-9]*") if re.fullmatch("[0-9]{1,18}", p.name))
    whole = (p for p in named if not p.is_symlink() and (p / MANIFEST).is_file())
    return sorted(whole, key=lambda p: int(p.name))


def recover(root: Path) -> list[str]:
    """Complete interrupted renames of whole checkpoints; return a notice for each.

    `.STEP.TOKEN.partial` is whole once it has its manifest, which is written last.
    """
    notices = []
    for partial in sorted(root.glob(".[0-9]*.partial")):
        final = root / partial.name.split(".")[1]
        if _is_whole(partial) and not (final / MANIFEST).is_file():
            remove(final)  # what is left of one that was being removed
            os.replace(partial, final)
            notices.append(f"{final} was whole under another name, {partial.name}")
    return notices


def _is_whole(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return not missing_files(folder, read_manifest(folder))
    except (OSError, ValueError):
        return False


def file_sizes(manifest: Mapping[str, Any]) -> dict[str, int]:
    """The files of a checkpoint beside its manifest, and their bytes."""
    entries = [*manifest["units"].values(), *manifest["states"].values()]
    return {entry["file"]: entry["bytes"] for entry in entries}


def missing_files(folder: Path, manifest: Mapping[str, Any]) -> set[str]:
    """The files of a checkpoint that are not in its folder, or have other sizes."""
    present = sizes(folder)
    return {name for name, size in file_sizes(manifest).items() if present.get(name) != size}


def sizes(folder: Path) -> dict[str, int]:
    """The bytes of the regular files in a folder; none if there is no such folder."""
    files = folder.iterdir() if folder.is_dir() else ()
    return {f.name: f.stat().st_size for f in files if f.is_file() and not f.is_symlink()}


def best(folders: Iterable[Path], selection: Selection) -> Path | None:
    """The best checkpoint of a run, by its validation or else its test set; None without one.

    `folders` are its checkpoints, oldest first. A checkpoint counts if its own weights were
    measured, on the same set as the newest ones that were. Of equal ones the first is the best.
    """
    scores: dict[Path, tuple[str, float]] = {}
    for folder in folders:
        with suppress(ValueError, OSError):  # a damaged checkpoint does not count
            body = read_manifest(folder)
            check(RunPosition, body, folder / MANIFEST)
            tested = body["tested_step"] == body["step"]
            value = selection.score(body["tested"]) if tested else None
            if value is not None:
                scores[folder] = (body["tested_on"], value)
    newest = next(reversed(scores.values()), ("", 0.0))[0]
    comparable = [folder for folder, (on, _) in scores.items() if on == newest]
    return max(comparable, key=lambda folder: scores[folder][1], default=None)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; ValueError if it is damaged or has another format."""
    path = folder / MANIFEST
    content = read_whole(path, MOST_BYTES)
    try:
        body = json.loads(content)
        claimed = body.pop("sha256")
        format_number = body["format"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(damaged(path)) from None
    if claimed != digest(body):
        raise ValueError(damaged(path))
    if format_number != FORMAT:
        raise ValueError(f"{path} has format {format_number}; this version reads {FORMAT}")
    check(CheckpointFiles, body, path)
    return dict(body)


def load_unit(folder: Path, manifest: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """One unit's tensors; ValueError if its file is missing or is not the one that was written."""
    return _load(folder, manifest["units"][name])


def overlapping(manifest: Mapping[str, Any], unit: str) -> list[str]:
    """The units of a checkpoint with tensors of a unit: by other cuts, parts of it or around it.

    All of them where no name tells, as where the network was not divided into units.
    """
    path = unit.partition("@")[0]

    def overlaps(name: str) -> bool:
        other = name.partition("@")[0]
        return other == path or other.startswith(f"{path}.") or path.startswith(f"{other}.")

    return [name for name in manifest["units"] if overlaps(name)] or [*manifest["units"]]


def load_state(folder: Path, manifest: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Load the state stored under `name`, or an empty one; ValueError as for `load_unit`."""
    entry = manifest["states"].get(name)
    return _load(folder, entry) if entry else {}


def _load(folder: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / entry["file"]
    try:
        content = read_whole(path, entry["bytes"])
    except FileNotFoundError:
        host = entry.get("host", "")
        elsewhere = f"{path} is on the disk of {host}: copy it from there"
        raise ValueError(elsewhere if host else damaged(path, "is missing")) from None
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise ValueError(damaged(path))
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise ValueError(damaged(path, f"cannot be read ({error})")) from None


def load_model(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Load the state dict of the composed network, with averaged weights if it has any.

    The frozen weights that the checkpoint leaves out are not there.
    """
    tensors: dict[str, Tensor] = {}
    for name in manifest["units"]:
        loaded = load_unit(folder, manifest, name)
        plain = (key for key in loaded if STATE not in key)
        tensors |= {key: loaded.get(f"{key}{STATE}ema.average", loaded[key]) for key in plain}
    return tensors


def restore(
    folder: Path,
    manifest: Mapping[str, Any],
    units: Iterable[Unit],
    optimizers: Optimizers,
    left_out: References | None = None,
) -> None:
    """Load units and their optimizer state in place; ValueError if they are other units.

    What the checkpoint leaves out must be there. Of `left_out`, what is known of the frozen weights
    that are there, those that the checkpoint changes are removed.
    """
    known, references = {} if left_out is None else left_out, manifest.get("frozen", {})
    found: References = {}
    for unit in units:
        files = (load_unit(folder, manifest, n) for n in overlapping(manifest, unit.name))
        loaded = {name: x for tensors in files for name, x in tensors.items()}
        for name, tensor in unit.tensors().items():
            stored = loaded.get(name)
            if stored is None and name in references:
                found[name] = known.get(name) or reference(tensor)
                continue
            if stored is None or stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                what = "nothing" if stored is None else f"{tuple(stored.shape)} of {stored.dtype}"
                raise ValueError(
                    f"{folder} holds {what} where the model has {name}, {tuple(tensor.shape)} of "
                    f"{tensor.dtype}: it is of another model"
                )
            with torch.no_grad():
                tensor.copy_(stored)
            if name in known and reference(stored) != known[name]:
                del known[name]
        for kind, optimizer in _distinct(optimizers).items():
            for name, parameter in unit.parameters().items():
                slots = entries(loaded, f"{name}{STATE}{kind}.")
                model = optimizer_state(optimizer, parameter)
                if slots and model:
                    _check_slots(folder, name, optimizer, slots, flat(model))
                    optimizer.state[parameter] = from_tensors(model, slots)
    check_left_out(folder, {name: references[name] for name in found}, found)


def _check_slots(
    folder: Path,
    name: str,
    optimizer: torch.optim.Optimizer,
    slots: Mapping[str, Tensor],
    model: Mapping[str, Any],
) -> None:
    """ValueError unless the slots are those of the optimizer's state of a parameter, `model`."""
    required = {slot for slot, value in model.items() if value is not None}
    if set(slots) - set(model) or required - set(slots):
        raise ValueError(
            f"{folder} holds {', '.join(sorted(slots))} of {name}, but "
            f"{type(optimizer).__name__} keeps {', '.join(sorted(required))}: resume with the "
            "optimizer of the run"
        )
    for slot, value in slots.items():
        shape = tuple(getattr(model[slot], "shape", ()))
        if model[slot] is not None and value.shape != shape:
            raise ValueError(
                f"{folder} holds {slot} {tuple(value.shape)} of {name}, which has shape {shape}: "
                "it is of another model"
            )


def damaged(path: Path, how: str = "is not what was written (wrong checksum)") -> str:
    """The message for a damaged file, which names the checkpoint to go back to."""
    name = path.parent.name
    if name.endswith(".partial"):  # brought from another disk, for this rank to read
        folder = path.parent.with_name(name.split(".")[1])
        way = "to resume from another disk's copy, or from an earlier one"
        return f"{folder / path.name} {how}: remove {folder} {way}"
    number = int(name) if name.isdecimal() else 0
    if before := [p for p in complete(path.parent.parent) if int(p.name) < number]:
        way = f"remove {path.parent} to resume from {before[-1].name}"
    else:
        way = "no checkpoint is left before it; start again in a new folder"
    return f"{path} {how}: {way}"


def check_readable(kind: type[ManifestPart], body: Mapping[str, Any], text: str) -> None:
    """ValueError for a manifest of that kind that would be refused when it is read."""
    step = body["step"]
    if len(text.encode()) > MOST_BYTES:
        sizes = {name: len(json.dumps(x)) for name, x in body.get("shared", {}).items()}
        largest = max(sizes, key=sizes.__getitem__) if sizes else "units"
        raise ValueError(
            f"the checkpoint of step {step} is not written, since its manifest would have "
            f"{len(text.encode())} bytes, more than the {MOST_BYTES} that are read: keep less in "
            f"the state of {largest}, or in a file of its own; the checkpoint before it stands"
        )
    for cls in (CheckpointFiles, kind):
        check(cls, body, Path(f"the checkpoint of step {step}, which is not written,"))


def _distinct(optimizers: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by kind; one that serves several kinds is stored once."""
    first: dict[int, str] = {}
    for kind, optimizer in optimizers.items():
        first.setdefault(id(optimizer), kind)
    return {kind: optimizers[kind] for kind in first.values()}


def digest(body: Mapping[str, Any]) -> str:
    """Checksum of a manifest without its checksum."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
