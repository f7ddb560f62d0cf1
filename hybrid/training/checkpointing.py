"""What checkpoints keep of a run beside its weights: the states of its parts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid.errors import one_line
from hybrid.folder import checkpoint
from hybrid.method.method import Method
from hybrid.ranks.grid import Place
from hybrid.solvers.splitting.variables import channels_last
from hybrid.solvers.state import State, Stateful, Tensors

FLIGHTS = "under way on block "
_COMMON = ("images", "serial_seconds", "parallel_seconds")
TOTALS = (*_COMMON, "idle_seconds", "gap_steps", "gap_seconds", "bytes_sent")
"""What a run counts from its first step; the first three are the same on every rank."""


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a rank's block lies in the network, and the names of its files of states."""

    place: Place
    cuts: list[str]
    """The first unit of every block but the first."""
    last_unit: str
    """The last unit of this block."""

    @property
    def before(self) -> str:
        """The file of the cut before the block; empty without such a cut."""
        return self.cut_file(self.cuts[self.place.block - 1]) if self.place.block else ""

    @property
    def after(self) -> str:
        """The file of the cut after the block; empty without such a cut."""
        is_last = self.place.block == len(self.cuts)
        return "" if is_last else self.cut_file(self.cuts[self.place.block])

    @property
    def output(self) -> str:
        """The file of what belongs to the block itself."""
        return f"block up to {self.last_unit}"

    @property
    def flights(self) -> str:
        """The file of what is under way on the block."""
        return f"{FLIGHTS}{self.place.block}{self._replica_suffix}"

    def cut_file(self, cut: str) -> str:
        """The file of the cut before the unit `cut`."""
        return f"cut before {cut}{self._replica_suffix}"

    @property
    def _replica_suffix(self) -> str:
        return f" of replica {self.place.replica}" if self.place.replica else ""


def collect_states(
    parts: Mapping[str, Stateful], place: CheckpointPlace
) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """The parts' tensors by the name of their file, and what all ranks share; all ranks call it."""
    files: dict[str, Tensors] = {}
    shared: dict[str, Any] = {}
    for part, stateful in parts.items():
        state = stateful.state()
        shared |= {part: state.shared} if state.shared else {}
        kept = {place.before: state.cut, place.flights: state.flight}
        if not place.place.replica:  # it is the same on all of them
            kept[place.output] = state.block
        for file, tensors in kept.items():
            if tensors and file:
                named = {f"{part}/{name}": tensor for name, tensor in tensors.items()}
                files.setdefault(file, {}).update(named)
    return files, shared


def restore_states(
    parts: Mapping[str, Stateful],
    place: CheckpointPlace,
    folder: Path,
    manifest: Mapping[str, Any],
    device: torch.device,
    cuts: Iterable[str],
) -> None:
    """Let the parts restore what a checkpoint has of them.

    `cuts` names the parts whose auxiliary variables fit this run.
    """
    same_split = same_grid(manifest, place)
    there = all(place.cut_file(cut) in manifest["states"] for cut in place.cuts)
    everywhere = there and "program" in parts  # another method's are not taken back

    def load(file: str) -> Tensors:
        found = checkpoint.load_state(folder, manifest, file) if file else {}
        return channels_last({name: tensor.to(device) for name, tensor in found.items()})

    before, after, output = (load(name) for name in (place.before, place.after, place.output))
    flights = load(place.flights) if same_split else {}
    with _name_checkpoint_in_errors(folder):
        for part, stateful in parts.items():
            fits = part in cuts
            stateful.load_state(
                State(
                    shared=manifest["shared"].get(part, {}),
                    cut=_tensors_of_part(part, before) if fits else {},
                    block=_tensors_of_part(part, output),
                    flight=_tensors_of_part(part, flights),
                    after=_tensors_of_part(part, after) if fits else {},
                    same_split=same_split,
                    complete=fits and everywhere,
                )
            )


def describe_dropped_states(
    place: CheckpointPlace, folder: Path, manifest: Mapping[str, Any], parts: Container[str]
) -> list[str]:
    """Notices for the user of what is not restored; empty if nothing is lost."""
    same = same_grid(manifest, place)
    blocks, replicas = len(manifest["cuts"]) + 1, manifest["replicas"]
    left = []
    if replicas > 1 == place.place.replicas:
        left.append(
            f"{folder}: {replicas} replicas, kept together by {manifest['sync']}, go on as 1; "
            "--replicas and sync.name ask for more again"
        )
    kept = "program" in parts and (place.place.replicas == 1 or "sync" in parts)
    if (same and kept) or not any(n.startswith(FLIGHTS) for n in manifest["states"]):
        return left
    changed = "number of replicas" if manifest["cuts"] == place.cuts else "cuts"
    if same:
        changed = "strategy" if "program" in parts else "solver"
    where = f"{blocks} blocks" + (f" of {replicas} replicas" if replicas > 1 else "")
    return [
        *left,
        f"{folder}: what {manifest['solver']} had under way on {where} is dropped, because the "
        f"{changed} changed",
    ]


def same_grid(manifest: Mapping[str, Any], place: CheckpointPlace) -> bool:
    """Whether a checkpoint is of the same blocks and as many replicas."""
    return bool(manifest["cuts"] == place.cuts and manifest["replicas"] == place.place.replicas)


def read_totals(manifest: dict[str, Any], rank: int | None) -> dict[str, float]:
    """What was counted so far; for other blocks (None) only what is the same on all ranks."""
    counted: dict[str, float] = manifest["totals"][rank or 0]
    return {name: counted.get(name, 0.0) for name in (_COMMON if rank is None else TOTALS)}


def check_same_run(
    method: Method, names: Mapping[str, str], folder: Path, manifest: dict[str, Any]
) -> None:
    """ValueError if a checkpoint is of another run; `names` are those of its model and data."""
    path = folder.parent.parent
    units, model = [unit.name for unit in method.problem.blocks.units], names["model"]
    if manifest["model"] != model or sorted(manifest["units"]) != sorted(units):
        raise ValueError(
            f"{path} is a run of {manifest['model']} with {len(manifest['units'])} units, not of "
            f"{model} with {len(units)}: give its --model, or another --out"
        )
    mine = {"data": names["data"], "seed": method.setup.seed}
    for key, value in mine.items():
        if manifest[key] != value:
            raise ValueError(
                f"{path} is a run with {key} {manifest[key]}, not {value}: "
                f"resume with its {key}, choose another --out, or, if that is another run's "
                f"checkpoint, remove {folder} to resume from one before"
            )
    if manifest["steps_per_epoch"] != method.steps:
        raise ValueError(
            f"{path} has {manifest['steps_per_epoch']} steps an epoch, these "
            f"settings {method.steps}: resume with its data and batch size"
        )
    stopped_at = manifest["step"] % method.steps
    if stopped_at and manifest["window"] != method.setup.window:
        raise ValueError(
            f"{path} stopped after step {stopped_at} of an epoch with a window of "
            f"{manifest['window']}, not {method.setup.window}: resume with its --window"
        )


@contextmanager
def _name_checkpoint_in_errors(folder: Path) -> Iterator[None]:
    """Turn any fault in restoring a part into a ValueError that names the checkpoint."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{folder} holds states that this run cannot restore ({type(error).__name__}: "
            f"{one_line(error)}): resume with the settings it was made with"
        ) from error


def _tensors_of_part(part: str, tensors: Tensors) -> Tensors:
    prefix = f"{part}/"
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
