"""The one declaration of every setting."""

from __future__ import annotations

from math import ceil
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from hybrid.links.registry import AUTO, LINKS
from hybrid.samplers.registry import SAMPLERS
from hybrid.settings import torch_classes
from hybrid.settings.docstrings import field_docs
from hybrid.settings.limits import LARGE, MANY
from hybrid.settings.round_options import RoundOptions
from solvers import registry
from solvers.sync.registry import STRATEGIES

WorkerKind = Literal["thread", "forkserver"]


class Section(BaseModel):
    """A table of the TOML file; the string after a field is its help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def refuse(self, section: str, why: str, *names: str) -> None:
        """ValueError if one of the settings is not its default, though it cannot act."""
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and value is not None:
                raise ValueError(
                    f"{section}.{name} is {value!r}, but {why}, so it would change nothing: "
                    "leave it out"
                )


class ModelSettings(Section):
    """[model] the network."""

    name: str = "resnet8"
    """resnet20 (6n+2), preact-resnet20, wrn-16-4, revnet20, resnet18; your own: module:function."""
    shortcut: Literal["auto", "identity", "projection"] = "auto"
    """CIFAR ResNets where shapes change: identity (option A, their auto) or projection."""
    factorize: str = ""
    """UNIT:RANK puts a non-negative factorization layer at the cut before a unit."""
    survival: float = Field(default=1.0, gt=0, le=1)
    """Probability that a pass in training takes the last residual unit (stochastic depth)."""


class DataSettings(Section):
    """[data] the images."""

    name: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, synthetic; your own: module:function."""
    dir: str = ""
    """Folder of the data files; empty: $HYBRID_DATA, else ~/.cache/hybrid."""
    limit: int = Field(default=0, ge=0, le=MANY)
    """Train on the first so many images; 0: all."""
    augment: bool = True
    """Augment as usual for the data set (CIFAR: crop after padding by 4, flip; others: nothing)."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Threads or processes that read samples of your own data ahead; 0: none."""
    worker_kind: WorkerKind = "thread"
    """thread, or forkserver: processes, for transforms that are slow in Python."""
    cutout: int = Field(default=0, ge=0, le=MANY)
    """Side of the square cut out of each training image, in pixels; 0: none."""


class TrainSettings(Section):
    """[train] length, batch, numerics."""

    epochs: int = Field(default=12, ge=1, le=10**6)
    """Passes over the training data."""
    batch_size: int = Field(default=128, ge=1, le=MANY)
    """Images a mini-batch; solver.micro_batches accumulates gradients over parts of it."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, order and augmentation."""
    loss: str = "cross-entropy"
    """cross-entropy, mse, l1, huber, bce (logits of many labels); your own: module:function."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Of cross-entropy in training: the share of a target that all classes get alike."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the forward and backward passes; 16 bits run under autocast."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Share an average of the weights keeps at a step; it is tested and exported. 0: none."""
    report_every: int = Field(default=16, ge=1, le=MANY)
    """Mini-batches between reports (stops, window auto's probes); K times as many if one drains."""
    evaluate_every: int = Field(default=1, ge=1, le=MANY)
    """Epochs between measurements of the test accuracy; the last epoch always is one."""
    early_stop: int = Field(default=0, ge=0, le=10**6)
    """Stop once so many epochs have passed since the one with the best test metric; 0: never."""
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
    sync_batchnorm: bool = False
    """BatchNorm over the samples of all replicas; off: each normalizes by its own share."""


class OptimizerSettings(Section):
    """[optimizer] the step of the weights."""

    name: str = "sgd"
    """sgd (with momentum), adamw, or any other class of torch.optim: RMSprop, NAdam, ..."""
    lr: float = Field(default=0.1, gt=0, le=LARGE)
    """Peak learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd; beta_1 of adamw; of other classes it is one of the arguments."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    weight_decay: float = Field(default=5e-4, ge=0, le=LARGE)
    """Weight decay (decoupled with AdamW)."""
    decay_all: bool = False
    """Decay BatchNorm parameters and biases too."""
    arguments: dict[str, Any] = {}
    """More arguments of the class: optimizer.arguments.eps = 1e-6."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return torch_classes.optimizer_name(name)

    @field_validator("arguments")
    @classmethod
    def _taken(cls, arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" in info.data:
            torch_classes.check_optimizer(info.data["name"], arguments)
        return arguments


class ScheduleSettings(Section):
    """[schedule] the learning rate over the steps."""

    name: str = "linear"
    """cosine, linear, step, constant; one-cycle; or any class of torch.optim.lr_scheduler."""
    warmup_epochs: float = Field(default=1.0, ge=0, le=LARGE)
    """Epochs of linear warm-up; of cosine, linear, step and constant alone."""
    milestones: list[float] = [0.5, 0.75]
    """Shares of the training at which `step` multiplies by gamma."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """Factor of `step`."""
    interval: Literal["epoch", "step"] | None = None
    """When a class of torch's steps; unset: each epoch, of OneCycleLR and CyclicLR each step."""
    arguments: dict[str, Any] = Field(default={}, validate_default=True)
    """Arguments of a class of torch's: schedule.arguments.gamma = 0.9."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return torch_classes.scheduler_name(name)

    @field_validator("arguments")
    @classmethod
    def _taken(cls, arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" in info.data:
            torch_classes.check_scheduler(info.data["name"], arguments)
        return arguments


class RoundSettings(Section, RoundOptions):
    """[rounds] the alternation of serial correction and parallel phase."""

    def serial_steps(self, steps: int) -> int:
        """Steps of `serial_epochs`, in epochs of so many; one at least, if there are any."""
        asked = ceil(round(self.serial_epochs * steps, 6))
        return max(asked, 1) if self.serial_epochs else 0

    @field_validator("window", mode="before")
    @classmethod
    def _a_number_or_a_word(cls, window: object) -> object:
        named = window in ("all", "auto", None)
        if not named and not (isinstance(window, int) and window >= 1):
            raise ValueError("it must be an integer of at least 1, all or auto")
        return window

    @field_validator("gaps", mode="before")
    @classmethod
    def _a_list(cls, gaps: object) -> object:
        if not isinstance(gaps, list | tuple):
            raise ValueError("it must be a list of pairs [middle, turn]")
        return gaps or ()


for _name, _help in field_docs(RoundOptions).items():
    RoundSettings.model_fields[_name].description = _help


class SplitSettings(Section):
    """[split] units into blocks."""

    blocks: int = Field(default=0, ge=0, le=MANY)
    """Number of blocks; 0: the number of MPI ranks, or 2 without mpirun."""
    balance: Literal["operations", "measured", "even"] = "operations"
    """What is balanced: counted operations (the same on every machine), measured time, units."""
    cuts: list[str] = []
    """The first unit of every block but the first; overrides balance."""
    inside: bool = False
    """Cut units, too (a residual block): blocks come out more even, messages heavier."""
    replicas: int = Field(default=0, ge=0, le=MANY)
    """Chains of the blocks, each on a share of a mini-batch; 0: MPI ranks over blocks, else 1."""
    side_by_side: Literal["auto", "chain", "peers"] = "auto"
    """MPI ranks that follow each other: a chain, peers, or (auto) those that send more."""


class LinkSettings(Section):
    """[links] how the blocks reach each other."""

    kind: str = LINKS.default
    """auto: MPI under mpirun, else threads; virtual: K blocks in turn, each on a logical clock."""
    gpu_aware: Literal["auto", "on", "off"] = "auto"
    """Hand GPU memory to MPI; auto: if a trial in a child process comes back whole."""
    gigabits_per_second: float = Field(default=10.0, gt=0, le=LARGE)
    """Rate of a virtual link, each way."""
    timeout: float | None = Field(default=None, ge=0, le=LARGE)
    """Seconds an MPI rank waits for another, then the job ends; 0: never; unset: 1800 in Slurm."""
    latency_microseconds: float = Field(default=10.0, ge=0, le=LARGE)
    """Latency of a virtual link."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind != AUTO and kind not in LINKS:
            raise ValueError(f"it must be one of {AUTO}, {', '.join(LINKS)}")
        return kind


class CheckpointSettings(Section):
    """[checkpoint] what survives."""

    every: int = Field(default=1, ge=1, le=MANY)
    """Epochs between checkpoints."""
    minutes: float = Field(default=15.0, ge=0, le=LARGE)
    """Write one in mid-epoch, too, when the last one is so old; 0: never."""
    keep_last: int = Field(default=2, ge=0, le=MANY)
    """Checkpoints to keep; 0: all."""
    best: bool = False
    """Keep the one with the best test metric, too, of those that are written."""
    rollbacks: int = Field(default=3, ge=0, le=MANY)
    """How often a run that diverges goes back to a checkpoint, with smaller steps; 0: never."""


class Config(Section):
    """All settings of a run; those of solver, correction, sync, sampler by what they are of."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    solver: dict[str, Any] = {"name": registry.DEFAULT}
    correction: dict[str, Any] = {}
    sync: dict[str, Any] = {"name": STRATEGIES.default}
    sampler: dict[str, Any] = {"name": SAMPLERS.default}
    rounds: RoundSettings = RoundSettings()
    split: SplitSettings = SplitSettings()
    links: LinkSettings = LinkSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    _notices: list[str] = PrivateAttr(default_factory=list)

    @property
    def notices(self) -> list[str]:
        """What the user should know of how the settings were read."""
        return self._notices

    @notices.setter
    def notices(self, notices: list[str]) -> None:
        self._notices = notices


def declared_settings() -> dict[str, str]:
    """Every "section.key" declared here, and its help."""
    known = {
        "solver.name": f"The method: {', '.join(registry.OWN)}; train takes auto, too.",
        "sync.name": f"How replicas keep together: {', '.join(STRATEGIES)}.",
        "sampler.name": f"Who chooses the samples of a mini-batch: {', '.join(SAMPLERS)}.",
    }
    for section, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            fields = info.annotation.model_fields
            known |= {f"{section}.{key}": f.description or "" for key, f in fields.items()}
    return known


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
