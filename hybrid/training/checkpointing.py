"""What a checkpoint keeps beside weights: the position of a run, and the states of its parts."""

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.errors import counted, one_line
from hybrid.folder import checkpoint
from hybrid.links import RankLinks
from hybrid.links.grid import GridPlace
from hybrid.method.method import Method
from hybrid.networks.blocks import Blocks
from hybrid.networks.units import BlockModule
from hybrid.solvers.numerics.attributes import (
    attributes,
    code_of,
    is_number,
    is_plain_tensor,
    is_same,
    user_modules,
)
from hybrid.solvers.splitting.variables import channels_last
from hybrid.solvers.state import State, Stateful, Tensors, entries

FLIGHTS = "under way on block "
_COMMON = ("images", "serial_seconds", "parallel_seconds")
TOTALS = (*_COMMON, "idle_seconds", "local_steps", "local_seconds", "bytes_sent")
"""Sums since a run's first step; the first three are the same on every rank."""
MOST_NUMBERS = 1 << 12
"""Larger tensors are left out: a pass has probably computed them."""
FORMATS = {
    str(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.bool),
    )
}


@dataclass
class Position:
    """How far a run has come, and the sums of one of its ranks."""

    epoch: int = 0
    step: int = 0
    tested: dict[str, float] = field(default_factory=dict)
    """Loss and metrics of the newest evaluation, on the set by which weights are selected."""
    tested_on: str = ""
    """That set: validation, test, or empty without one."""
    tested_step: int | None = None
    """The step of that evaluation."""
    epoch_loss: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The sum of the training losses of this epoch's samples so far, and how many these are."""
    residual: list[float] = field(default_factory=list)
    """The primal residual of every cut after the last round."""
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    """For each roll-back: the step before it, the reason, the step after it, the new rates."""
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    """This rank's sums since the first step."""

    @property
    def results(self) -> dict[str, float]:
        """What was tested by the names that a metric has outside: test_loss, test_accuracy, ..."""
        return {f"{self.tested_on}_{name}": value for name, value in self.tested.items()}

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self.totals["serial_seconds"] + self.totals["parallel_seconds"]

    def add_loss(self, mean: float, samples: int) -> None:
        """Count the mean training loss of some samples of this epoch."""
        total, count = self.epoch_loss
        self.epoch_loss = [total + mean * samples, count + samples]

    def take_epoch_loss(self) -> float:
        """The mean training loss of the epoch, which has ended."""
        total, count = self.epoch_loss
        self.epoch_loss = [0.0, 0.0]
        return total / max(1.0, count)

    def restore(self, manifest: Mapping[str, Any], cuts: list[str], rank: int | None) -> None:
        """Take over the position of `rank` from a manifest; None: a rank of another grid."""
        for name in ("epoch", "step", "tested", "tested_step", "epoch_loss", "rollbacks"):
            setattr(self, name, manifest[name])
        if manifest["tested_on"] != self.tested_on:
            self.tested, self.tested_step = {}, None
        if manifest["cuts"] == cuts:
            self.residual = manifest["residual"]
        counted = manifest["totals"][rank or 0]
        same = _COMMON if rank is None else TOTALS
        self.totals |= {name: counted.get(name, 0.0) for name in same}


class StateFiles:
    """One rank's files of states: for its cuts, its block, and the messages under way to it."""

    def __init__(self, place: GridPlace, blocks: Blocks) -> None:
        suffix = f" of replica {place.replica}" if place.replica else ""
        self.place, self.blocks = place, blocks
        self.cuts = [f"cut before {cut}{suffix}" for cut in blocks.cuts]
        self.before, self.after = ["", *self.cuts, ""][place.block : place.block + 2]
        """The files of the cuts beside the block; empty without such a cut."""
        self.output = f"block up to {blocks.units_of(place.block)[-1].name}"
        self.flights = f"{FLIGHTS}{place.block}{suffix}"

    def collect(
        self, parts: Mapping[str, Stateful]
    ) -> tuple[dict[str, Tensors], dict[str, dict[str, Any]]]:
        """Collect the parts' tensors by file, and the shared state; all ranks call it."""
        files: dict[str, Tensors] = {}
        shared: dict[str, dict[str, Any]] = {}
        for part, stateful in parts.items():
            state = stateful.state()
            shared |= {part: state.shared} if state.shared else {}
            by_file = {self.before: state.cut, self.flights: state.flight}
            if not self.place.replica:  # it is the same on all of them
                by_file[self.output] = state.block
            for file, tensors in by_file.items():
                if tensors and file:
                    named = {f"{part}/{name}": tensor for name, tensor in tensors.items()}
                    files.setdefault(file, {}).update(named)
        return files, shared

    def wanted(self, manifest: Mapping[str, Any]) -> list[str]:
        """The names of the files of a checkpoint that this rank reads."""
        states = manifest["states"]
        units, own = manifest["units"], self.blocks.units_of(self.place.block)
        names = dict.fromkeys(
            name for u in own for name in checkpoint.overlapping(manifest, u.name)
        )
        entries = [*map(units.get, names)]
        entries += map(states.get, (self.before, self.after, self.output, self.flights))
        return [entry["file"] for entry in entries if entry is not None]

    def restore(
        self,
        parts: Mapping[str, Stateful],
        folder: Path,
        manifest: Mapping[str, Any],
        device: torch.device,
        cuts_fit: bool,
    ) -> None:
        """Let the parts restore their states from a checkpoint.

        `cuts_fit` says whether its auxiliary variables have the shapes of this run's.
        """

        def load(file: str) -> Tensors:
            tensors = checkpoint.load_state(folder, manifest, file) if file else {}
            return channels_last({name: tensor.to(device) for name, tensor in tensors.items()})

        same = self.same_grid(manifest)
        # another method's variables are not taken back
        complete = "program" in parts and all(cut in manifest["states"] for cut in self.cuts)
        before, after = (load(file if cuts_fit else "") for file in (self.before, self.after))
        output, flights = load(self.output), load(self.flights if same else "")
        try:
            for part, stateful in parts.items():
                stateful.load_state(
                    State(
                        shared=manifest["shared"].get(part, {}),
                        cut=entries(before, f"{part}/"),
                        block=entries(output, f"{part}/"),
                        flight=entries(flights, f"{part}/"),
                        after=entries(after, f"{part}/"),
                        same_split=same,
                        complete=cuts_fit and complete,
                    )
                )
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{folder} holds states that this run cannot restore ({type(error).__name__}: "
                f"{one_line(error)}): resume with the settings it was made with"
            ) from error

    def same_grid(self, manifest: Mapping[str, Any]) -> bool:
        """Whether a checkpoint has the same blocks and number of replicas."""
        replicas: int = manifest["replicas"]
        return manifest["cuts"] == self.blocks.cuts and replicas == self.place.replicas

    def describe_dropped(
        self, folder: Path, manifest: Mapping[str, Any], parts: Container[str]
    ) -> list[str]:
        """Notices for the user about states that are not restored; empty if nothing is lost."""
        notices, alone, same = [], self.place.replicas == 1, self.same_grid(manifest)
        if not same:
            grids = (
                (manifest["cuts"], manifest["replicas"]),
                (self.blocks.cuts, self.place.replicas),
            )
            before, after = (
                f"{counted(replicas, 'replica')}, cut before {' and '.join(cuts) or 'no unit'}"
                for cuts, replicas in grids
            )
            notices.append(f"{folder}: {before}; the run goes on with {after}")
        restored = "program" in parts and (alone or "sync" in parts) and same
        if not restored and any(name.startswith(FLIGHTS) for name in manifest["states"]):
            notices.append(
                f"{folder}: what {manifest['solver']} had under way is dropped, because the "
                "blocks, the replicas, the solver, its delays or the strategy changed"
            )
        return notices


class CountedAttributes:
    """Numbers and small tensors in plain attributes that have changed since a run began.

    They have global names, so that they fit any grid. Of several blocks that run a module, the last
    one's are kept, which has come to the end of its code; of replicas the first one's. Where a rank
    has other values, such as the count of a pass that it will make again, they are for the same
    grid.
    """

    def __init__(self, module: BlockModule, links: RankLinks) -> None:
        self.links = links
        self.modules: dict[str, nn.Module] = {}
        """By global path."""
        for path in user_modules(module):
            name = module.global_name(path).strip(".")
            self.modules[name] = code_of(module.get_submodule(path))
        self.at_start = self._values()

    def _values(self) -> dict[str, Any]:
        return {
            f"{path}.{name}": value.clone() if isinstance(value, Tensor) else value
            for path, m in self.modules.items()
            for name, value in attributes(m).items()
            if is_number(value) or _is_small_tensor(value)
        }

    def state(self) -> State:
        changed = {
            name: _encode(value)
            for name, value in self._values().items()
            if name not in self.at_start or not is_same(value, self.at_start[name])
        }
        shared: dict[str, Any] = {}
        for each in self.links.agree(changed):
            shared |= each
        others = {name: value for name, value in changed.items() if value != shared.get(name)}
        text = torch.tensor([*json.dumps(others).encode()], dtype=torch.uint8)
        return State(shared=shared, flight={"others": text} if others else {})

    def load_state(self, state: State) -> None:
        values = {name: _encode(value) for name, value in self.at_start.items()} | state.shared
        if "others" in state.flight:
            values |= json.loads(bytes(state.flight["others"].tolist()))
        for name, value in values.items():
            path, _, field = name.rpartition(".")
            m = self.modules.get(path)
            present = getattr(m, field, None)
            if m is not None and (
                present is None or is_number(present) or is_plain_tensor(present)
            ):
                vars(m)[field] = value if is_number(value) else _decode(value, m)


def _is_small_tensor(value: Any) -> bool:
    if not is_plain_tensor(value) or value.requires_grad:
        return False
    return str(value.dtype) in FORMATS and value.numel() <= MOST_NUMBERS


def _encode(value: Any) -> Any:
    """A number as it is; for a tensor its format and numbers."""
    return [str(value.dtype), value.tolist()] if isinstance(value, Tensor) else value


def _decode(value: Any, module: nn.Module) -> Tensor:
    device = next((p.device for p in module.parameters()), None)
    return torch.tensor(value[1], dtype=FORMATS[value[0]], device=device)


def check_same_run(
    method: Method, names: Mapping[str, str], samples: int, folder: Path, manifest: dict[str, Any]
) -> None:
    """ValueError if a checkpoint is of another run, or of more epochs than are asked for.

    `names` are those of its model and data, `samples` is how many are trained on.
    """
    settings = {
        "model": names["model"],
        "tensors": len(method.problem.blocks.model.state_dict()),
        "data": names["data"],
        "seed": method.setup.seed,
        "samples": samples,
        "steps_per_epoch": method.steps,
        "window": method.setup.window,
    }
    if manifest["step"] % method.steps == 0:
        del settings["window"]  # it may change between epochs
    for key, value in settings.items():
        if manifest[key] != value:
            raise ValueError(
                f"{folder.parent.parent} is a run with {key} {manifest[key]}, not {value}: resume "
                "with its model, data, data.validation, batch size, seed and window, choose "
                f"another folder, or, if {folder} is another run's, remove it"
            )
    epochs, trained = method.options.train.epochs, manifest["step"] / method.steps
    if trained > epochs:
        raise ValueError(
            f"train.epochs is {epochs}, but {folder.parent.parent} has trained {trained:.4g} "
            f"epochs: give --epochs {ceil(trained)} or more, or choose another --out"
        )
