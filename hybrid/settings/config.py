"""The one declaration of every setting: defaults < TOML file < command line."""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from solvers import registry
from solvers.passes.pipeline import FillStep

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from solvers import Backprop, Solver

MOST_BYTES, MOST_DOTS = 1 << 16, 2000
"""Of a file of settings; a resolved one has 5 kB."""
FILLING = ("penalty", "augmented-lagrangian")
"""Solvers that fill gaps unless told otherwise."""


class Section(BaseModel):
    """A table of the TOML file; the string after a field is its help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSettings(Section):
    """[model] the network."""

    name: str = "resnet8"
    """resnet20 (any 6n+2), preact-resnet20, wrn-16-4, revnet20; ImageNet's resnet18, revnet18."""
    shortcut: Literal["auto", "identity", "projection"] = "auto"
    """CIFAR ResNets where shapes change: identity (option A, their auto) or projection."""
    factorise: str = ""
    """UNIT:RANK puts a non-negative factorisation layer at the cut before a unit (block-admm)."""


class DataSettings(Section):
    """[data] the images."""

    name: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100 or synthetic."""
    dir: str = ""
    """Folder of the data files; empty: $HYBRID_DATA, else ~/.cache/hybrid."""
    limit: int = Field(default=0, ge=0)
    """Train on the first so many images; 0: all."""
    augment: bool = True
    """Augment as usual for the data set (CIFAR: crop after padding by 4, flip; others: nothing)."""
    cutout: int = Field(default=0, ge=0)
    """Side of the square cut out of each training image, in pixels; 0: none."""


class TrainSettings(Section):
    """[train] length, batch, numerics."""

    epochs: int = Field(default=12, ge=1)
    """Passes of the serial correction over the training data."""
    batch_size: int = Field(default=128, ge=1)
    """Images a mini-batch."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, order and augmentation."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the forward and backward passes; 16 bits run under autocast."""
    report_every: int = Field(default=16, ge=1)
    """Mini-batches (times K for ddg and the like) between reports, at which a run can stop, too."""
    evaluate_every: int = Field(default=1, ge=1)
    """Epochs between measurements of the test accuracy; the last epoch always is one."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads a rank; 0: the cores it may use, shared among the ranks of its host."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a block lives; auto: the local rank's GPU if there is one."""
    kernels: Literal["auto", "torch", "cupy"] = "auto"
    """Who computes between the passes; auto: fused kernels on a GPU with CuPy, else torch."""
    graphs: bool = False
    """Local steps as CUDA graphs; where a step cannot be captured, the summary says why."""
    compile: bool = False
    """Compile the blocks with torch.compile."""


class OptimiserSettings(Section):
    """[optimiser] the step of the weights."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    lr: float = Field(default=0.1, gt=0)
    """Peak learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD; beta_1 of AdamW."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    weight_decay: float = Field(default=5e-4, ge=0)
    """Weight decay (decoupled with AdamW)."""
    decay_all: bool = False
    """Decay BatchNorm parameters and biases too."""


class ScheduleSettings(Section):
    """[schedule] the learning rate over the steps."""

    name: Literal["cosine", "linear", "step", "constant"] = "linear"
    """How the learning rate falls after the warm-up."""
    warmup_epochs: float = Field(default=1.0, ge=0)
    """Epochs of linear warm-up."""
    milestones: list[float] = [0.5, 0.75]
    """Shares of the training at which `step` multiplies by gamma."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """Factor of `step`."""


class RoundSettings(Section):
    """[rounds] the alternation of serial correction and parallel phase."""

    window: int | Literal["all"] = 4
    """Mini-batches a round; all: the whole training set, stored per sample, not augmented."""
    sweeps: int = Field(default=1, ge=0)
    """Passes over the window's sub-problems in the parallel phase; 0: no such phase."""
    correct_every: int = Field(default=1, ge=0)
    """Rounds from one serial phase to the next; 0: none (ddg and the like begin with 0)."""
    fill: bool = False
    """Local steps on earlier records in the gaps of the pipelined serial pass."""
    fill_step: FillStep = "added"
    """A filled gap's gradient: added to the exact one, or stepped on its own."""
    gaps: list[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]] = []
    """Samples each block has time for, [middle, turn] of a pass; empty: by counted operations."""
    memory_gb: float = Field(default=4.0, gt=0)
    """Largest store of auxiliary variables a rank may hold, in GB (10^9 bytes)."""

    @field_validator("window", mode="before")
    @classmethod
    def _at_least_one_or_all(cls, window: object) -> object:
        if window != "all" and not (isinstance(window, int) and window >= 1):
            raise ValueError("it must be an integer of at least 1, or all")
        return window


class SplitSettings(Section):
    """[split] units into blocks."""

    blocks: int = Field(default=0, ge=0)
    """Number of blocks; 0: the number of MPI ranks, or 2 without mpirun."""
    balance: Literal["operations", "measured", "even"] = "operations"
    """What is balanced: counted operations (the same on every machine), measured time, units."""
    cuts: list[str] = []
    """The first unit of every block but the first; overrides balance."""


class LinkSettings(Section):
    """[links] how the blocks reach each other."""

    kind: Literal["auto", "virtual"] = "auto"
    """auto: MPI under mpirun, else threads; virtual: K blocks in turn, each on a logical clock."""
    gpu_aware: Literal["auto", "on", "off"] = "auto"
    """Hand GPU memory to MPI; auto: if a trial in a child process comes back whole."""
    gigabits_per_second: float = Field(default=10.0, gt=0)
    """Rate of a virtual link, each way."""
    latency_microseconds: float = Field(default=10.0, ge=0)
    """Latency of a virtual link."""


class CheckpointSettings(Section):
    """[checkpoint] what survives."""

    every: int = Field(default=1, ge=1)
    """Epochs between checkpoints."""
    minutes: float = Field(default=15.0, ge=0)
    """Write one in mid-epoch, too, when the last one is so old; 0: never."""
    keep_last: int = Field(default=2, ge=0)
    """Checkpoints to keep; 0: all."""
    rollbacks: int = Field(default=3, ge=0)
    """How often a run that diverges goes back to a checkpoint, with smaller steps; 0: never."""


class Config(Section):
    """All settings of a run."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    solver: dict[str, Any] = {"name": registry.DEFAULT}
    correction: dict[str, Any] = {}
    rounds: RoundSettings = RoundSettings()
    split: SplitSettings = SplitSettings()
    links: LinkSettings = LinkSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    def make_solver(self) -> Solver:
        """The solver named in [solver], with its settings."""
        settings = dict(self.solver)
        return _make(registry.solver_class(settings.pop("name")), "solver", settings)

    def make_correction(self) -> Backprop:
        """The exact pass of the correction."""
        from solvers import Backprop

        correction = _make(Backprop, "correction", self.correction)
        assert isinstance(correction, Backprop)
        return correction


def load(path: Path | None, overrides: Mapping[str, Any], base: Path | None = None) -> Config:
    """Read a TOML file, lay `overrides` ("section.key" -> value) over it, validate.

    `base` is a TOML file below both; its [solver] and what its rounds do hold only for the method
    it names.
    """
    tree = _read(base) if base is not None else {}
    upper = _read(path) if path is not None else {}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        table = upper.setdefault(section, {})
        if not isinstance(table, dict) or not key:
            raise ValueError(_unknown(dotted, known_settings(registry.DEFAULT)))
        table[key] = value
    if _name(upper, _name(tree)) != _name(tree):
        tree.pop("solver", None)
        rounds = tree.get("rounds", {})
        own = ("sweeps", "fill", "gaps", "correct_every")
        tree["rounds"] = {k: rounds[k] for k in rounds if k not in own}
    for section, table in upper.items():
        below = tree.get(section, {})
        both = isinstance(below, dict) and isinstance(table, dict)
        tree[section] = {**below, **table} if both else table
    return resolve(tree)


def _name(tree: Mapping[str, Any], default: object = None) -> object:
    """The method that a tree of settings names."""
    table = tree.get("solver", {})
    return table.get("name", default) if isinstance(table, dict) else default


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    try:
        # the parser's time is quadratic in the parts of a dotted key
        if len(raw) > MOST_BYTES or max(line.count(b".") for line in raw.split(b"\n")) > MOST_DOTS:
            raise ValueError(f"more than {MOST_BYTES} bytes, or {MOST_DOTS} dots in a line")
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate a tree of settings; ValueError names the setting, its value and the limit."""
    tree = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    if isinstance(tree.get("solver", {}), dict):
        tree["solver"] = {"name": registry.DEFAULT, **tree.get("solver", {})}
        name = tree["solver"]["name"]
        known = known_settings(str(name))
        for section, table in tree.items():
            if section not in Config.model_fields:
                inside = next(iter(table), "") if isinstance(table, dict) else ""
                dotted = f"{section}.{inside}" if inside else section
                raise ValueError(_unknown(dotted, known))
            for dotted in [f"{section}.{key}" for key in table] if isinstance(table, dict) else []:
                if dotted not in known:
                    raise ValueError(_unknown(dotted, known))
        _choose_rounds(tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    solver, correction = config.make_solver(), config.make_correction()
    if config.model.factorise and solver.name != "block-admm":
        raise ValueError(
            f"model.factorise is {config.model.factorise!r}, which solver {solver.name!r} cannot "
            "train: choose --solver block-admm, or leave it out"
        )
    config.solver = {"name": solver.name, **_values(solver)}
    config.correction = _values(correction)
    return config


def _choose_rounds(tree: dict[str, Any]) -> None:
    """Train alone or fill gaps (docs/benchmarks, "What a sweep is worth"), unless told not to."""
    rounds, correction = tree.get("rounds", {}), tree.get("correction", {})
    if not isinstance(rounds, dict) or not isinstance(correction, dict):
        return
    asked = rounds.keys() & {"window", "sweeps", "fill", "correct_every"}
    method = registry.solver_class(tree["solver"]["name"])
    if not method.alternates and not method.exact:
        tree["rounds"] = {"correct_every": 0, **rounds}
    elif tree["solver"]["name"] in FILLING and not asked:
        tree["rounds"] = {**rounds, "sweeps": 0, "fill": True}
        tree["correction"] = {"micro_batches": 4, **correction}


def parse_override(text: str) -> tuple[str, Any]:
    """Split "section.key=value"; the value is TOML where it parses, else a string."""
    dotted, equals, value = text.partition("=")
    if not equals or "." not in dotted:
        raise ValueError(f"--set {text!r}: write --set section.key=value")
    try:
        return dotted.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return dotted.strip(), value


def known_settings(solver: str) -> dict[str, str]:
    """Every "section.key" there is with `solver`, and its help."""
    from solvers import Backprop

    known: dict[str, str] = {}
    for section in Config.model_fields:
        if section in ("solver", "correction"):
            cls = registry.solver_class(solver) if section == "solver" else Backprop
            docs = _field_docs(cls)
            known |= {f"{section}.{key}": text for key, text in docs.items()}
    return declared_settings() | known


def declared_settings() -> dict[str, str]:
    """Every "section.key" that there is with any solver, and its help."""
    known = {"solver.name": f"The method: {', '.join(registry.OWN)}."}
    for section, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            fields = info.annotation.model_fields
            known |= {f"{section}.{key}": f.description or "" for key, f in fields.items()}
    return known


def to_toml(config: Config) -> str:
    """The settings as a commented TOML file that repeats the run."""
    known = known_settings(config.solver["name"])
    lines: list[str] = []
    for section, table in config.model_dump().items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            unset = value is None
            setting = f"# {key} =" if unset else tomli_w.dumps({key: value}, indent=2).strip()
            lines.append(f"# {known[f'{section}.{key}']}\n{setting}")
        lines.append("")
    return "\n".join(lines)


def _make(cls: type[Solver], section: str, settings: Mapping[str, Any]) -> Solver:
    try:
        made: Solver = TypeAdapter(cls).validate_python(settings)
    except ValidationError as error:
        raise ValueError(f"{section}.{first_fault(error)}") from None
    for key, value in vars(made).items():
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{section}.{key} is {value}; it must be finite")
    return made


def _values(solver: Solver) -> dict[str, Any]:
    assert is_dataclass(solver)
    return {f.name: getattr(solver, f.name) for f in fields(solver) if f.init}


def first_fault(error: ValidationError) -> str:
    """The first fault, on one line."""
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"])
    place = place if place.isprintable() else repr(place)
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not place:
        return message
    return f"{place} is {fault['input']!r}; {message.replace('input should', 'it must')}"


def _unknown(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, 1, 0.5)
    if not near:
        tail = name.rpartition(".")[2]
        near = [k for k in known if k.rpartition(".")[2] == tail]
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown setting {name!r}; {hint}"


@cache
def _field_docs(cls: type) -> dict[str, str]:
    """The docstrings written below a dataclass's fields, through its bases."""
    docs: dict[str, str] = {}
    given = {f.name for f in fields(cls) if f.init}
    for base in reversed(cls.__mro__[:-1]):
        if not is_dataclass(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for node, after in pairwise(body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id in given
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[node.target.id] = str(after.value.value)
    return docs
