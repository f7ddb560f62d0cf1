"""The options of a training, converted from objects, names or tables."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hybrid.data import Data
from hybrid.data.mixing import Transform
from hybrid.data.samplers.base import Sampler
from hybrid.method.callback import Callback
from hybrid.method.optimizers import Factory
from hybrid.method.schedule import UserScheduler
from hybrid.registries import SAMPLERS
from hybrid.rounds.epoch_windows import Rate
from hybrid.settings.config import (
    CheckpointSettings,
    Config,
    DelaySettings,
    LinkSettings,
    OptimizerSettings,
    RoundSettings,
    ScheduleSettings,
    TrainSettings,
)
from hybrid.settings.sections.base import Section
from hybrid.settings.sections.rounds import RoundOptions, default_solver, resolve_rounds
from hybrid.solvers import Solver, acting, registry
from hybrid.solvers.acting import Facts, Settings
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.solvers.metrics import Metric
from hybrid.solvers.objective import Loss
from hybrid.solvers.registry import LOCAL_METHODS, STRATEGIES
from hybrid.solvers.sync.base import Strategy

T = TypeVar("T")
Given = TypeVar("Given", contravariant=True)
Makes = Callable[..., LRScheduler]
"""A function of `optimizer` that makes a scheduler on it."""


class Converted(Generic[T, Given]):
    """A field that takes a value of type `Given` and holds `convert(name, value)`."""

    def __init__(self, convert: Callable[[str, Any], T], default: str | None = "") -> None:
        self.convert, self.default = convert, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, options: None, owner: type) -> str | None: ...
    @overload
    def __get__(self, options: object, owner: type) -> T: ...
    def __get__(self, options: object | None, owner: type) -> T | str | None:
        """Return the default on the class, where dataclasses read it."""
        if options is None:
            return self.default
        value: T = vars(options)[self.name]
        return value

    def __set__(self, options: object, value: Given) -> None:
        vars(options)[self.name] = self.convert(self.name, value)


def object_of(
    kind: type[T], by_name: Callable[[str], type[Any]], optional: bool = False
) -> Callable[[str, Any], T]:
    """Convert a name to an object with its defaults; accept objects of the kind.

    `by_name` raises ValueError for an unknown name. `optional`: an empty value becomes None.
    """

    def convert(name: str, value: Any) -> T:
        if optional and value in ("", None):
            return None  # type: ignore[return-value]
        with suppress(TypeError):  # of a class that cannot be made without settings
            value = by_name(value)() if isinstance(value, str) else value
        if isinstance(value, kind):
            return value
        raise ValueError(
            f"{name} is {repr(value)[:80]}, no {kind.__name__}: give an object of a class that "
            f"derives from {kind.__module__}.{kind.__name__}, or the name of one, as hybrid list "
            "has them"
        )

    return convert


def settings_of(
    kind: type[Section], of_object: Callable[[Any], Any] = lambda value: None
) -> Callable[[str, Any], Any]:
    """Convert a dict or a name to settings; `of_object` converts other objects, or gives None."""

    def convert(name: str, value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if (converted := of_object(value)) is not None:
            return converted
        first = next(iter(kind.model_fields))
        if isinstance(value, str) and (not value or first in ("name", "kind", "mend")):
            value = {first: value} if value else {}
        if isinstance(value, Mapping):
            return kind.of(name, value)
        objects = name in ("optimizer", "schedule")
        also = ", or an object or a function as hybrid.Trainer describes it" if objects else ""
        raise ValueError(
            f"{name} is {repr(value)[:80]}; it must be {kind.__name__}(...) or a dict of its "
            f"settings{also}"
        )

    return convert


def _optimizer_object(value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        # accelerate and Fabric wrap the optimizer
        inner = getattr(value, "optimizer", value)
        return inner if isinstance(inner, torch.optim.Optimizer) else value
    return value if callable(value) else None


def _schedule_object(value: Any) -> Any:
    if isinstance(value, UserScheduler):
        return value
    return UserScheduler.of(value) or (value if callable(value) else None)


def _folder(name: str, value: Any) -> Path | None:
    try:
        return None if value is None else Path(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be the path of a folder") from None


@dataclass
class Options(RoundOptions):
    """The options of a training besides blocks and data, for a run, a bench row or a plan row.

    `rounds` has the settings of rounds, with all open choices decided.
    """

    solver: Converted[Solver, Solver | str | None] = Converted(
        object_of(Solver, registry.solver_class, optional=True)
    )
    """A method, or its name, which stands for it with its defaults; None: the default method, or
    the one that sweeps if windows are asked for."""
    correction: PassSettings = field(default_factory=PassSettings)
    """Settings of the serial passes."""
    _: KW_ONLY
    fill: Converted[Settings, Settings | str] = Converted(
        object_of(Settings, LOCAL_METHODS.__getitem__), LOCAL_METHODS.default
    )
    """Local method that fills idle time, or its name; "none"."""
    sampler: Converted[Sampler, Sampler | str] = Converted(
        object_of(Sampler, SAMPLERS.__getitem__),  # type: ignore[type-abstract]
        SAMPLERS.default,
    )
    """Who chooses the samples of a mini-batch; by name: with its defaults."""
    replicas: int = 1
    """R, chains of the blocks; each trains on a share of every mini-batch."""
    side_by_side: Literal["auto", "chain", "peers"] = "auto"
    """What adjacent MPI ranks share: a chain, or a block's replicas; auto: what sends more."""
    sync: Converted[Strategy, Strategy | str] = Converted(
        object_of(Strategy, STRATEGIES.__getitem__), STRATEGIES.default
    )
    """How replicas keep their weights together; by name: with its defaults."""
    train: Converted[TrainSettings, TrainSettings | Mapping[str, Any]] = Converted(
        settings_of(TrainSettings)
    )
    """Length, mini-batches and numerics of the training, as settings or a dict."""
    optimizer: Converted[
        OptimizerSettings | Factory | torch.optim.Optimizer,
        OptimizerSettings | Factory | torch.optim.Optimizer | Mapping[str, Any] | str,
    ] = Converted(settings_of(OptimizerSettings, _optimizer_object))
    """Settings or a name; an optimizer over all parameters of the network that are trained; or what
    makes one from a block's groups or `named_parameters`, see `hybrid.method.optimizers.Factory`.
    An optimizer that is given is not changed: blocks step by others of its class and groups."""
    schedule: Converted[
        ScheduleSettings | Rate | UserScheduler,
        ScheduleSettings
        | Rate
        | UserScheduler
        | LRScheduler
        | Makes
        | tuple[LRScheduler | Makes, str]
        | Mapping[str, Any]
        | str,
    ] = Converted(settings_of(ScheduleSettings, _schedule_object))
    """Settings or a name, constant for an optimizer of your own unless it is set; the learning rate
    as a function of the step; a scheduler of torch's on that optimizer, or a function of
    `optimizer` that makes one, either with when it steps: (scheduler, "step") or (scheduler,
    "epoch"), and ReduceLROnPlateau with the tested metric."""
    delay: Converted[DelaySettings, DelaySettings | Mapping[str, Any] | str] = Converted(
        settings_of(DelaySettings)
    )
    """Settings, or the mend alone: what a step does about the delay of its gradient."""
    links: Converted[LinkSettings, LinkSettings | Mapping[str, Any] | str] = Converted(
        settings_of(LinkSettings)
    )
    """How ranks reach each other: settings, a dict, or the kind of links alone."""
    loss: Loss | None = None
    """(output, targets) -> mean loss or a loss of each sample; None: cross-entropy of classes."""
    denominator: Callable[[Any], Any] | None = None
    """targets -> the sum of their weights, by which the loss, or the network's own, is divided;
    None: what torch's and Hugging Face's losses are known to be divided by, else samples."""
    regularizer: Callable[[Mapping[str, Tensor]], Any] | None = None
    """{name: weight} -> what is added to the loss for these weights, a sum over them: each block
    calls it with its own once in a step."""
    metrics: Mapping[str, Metric] | None = None
    """By name what is measured, see `Metric`; None: accuracy of classes."""
    batch_transform: Transform | None = None
    """(inputs, targets, generator) -> both, of every training mini-batch: mixup, CutMix; see
    `Transform`."""
    checkpoint: Converted[CheckpointSettings, CheckpointSettings | Mapping[str, Any]] = Converted(
        settings_of(CheckpointSettings)
    )
    """When checkpoints are written, and which are kept, as settings or a dict."""
    out: Converted[Path | None, Path | str | None] = Converted(_folder, default=None)
    """Run folder; None keeps nothing."""
    resume: bool = False
    """Go on from the newest checkpoint of the run folder `out`."""
    callbacks: Sequence[Callback] = ()
    """They are called on the first rank while the run trains."""
    quiet: bool = False
    """Print no lines of progress."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names of model and data in the summary."""
    config: Config | None = None
    """The contents of config.toml, except the cuts; None: these options."""
    rounds: RoundSettings = field(init=False)

    def __post_init__(self) -> None:
        rounds = RoundSettings(**{f.name: getattr(self, f.name) for f in fields(RoundOptions)})
        self.solver = self.solver or default_solver(rounds.model_dump(), self.fill.name)
        if (
            self.fill.name not in LOCAL_METHODS
            or type(self.fill) is not LOCAL_METHODS[self.fill.name]
        ):
            raise ValueError(
                f"fill is {repr(self.fill)[:80]}, whose local steps stand for none in a wait: "
                f"choose one of {', '.join(LOCAL_METHODS)}"
            )
        if self.resume and self.out is None:
            raise ValueError("resume=True needs out=, the run folder to go on with")
        if (
            not isinstance(self.optimizer, OptimizerSettings)
            and self.schedule == ScheduleSettings()
        ):
            # the user's rates stay constant unless a schedule is given
            self.schedule = ScheduleSettings(name="constant", warmup_steps=0)
        self.rounds = resolve_rounds(self.solver, rounds)
        if not isinstance(self.correction, PassSettings):
            raise ValueError(
                f"correction is {repr(self.correction)[:80]}, no PassSettings: give an object of it"
            )

    def check(self) -> None:
        """Reject options that no method allows."""
        if not 1 <= self.replicas <= self.train.batch_size:
            raise ValueError(
                f"split.replicas is {self.replicas}, and a mini-batch has {self.train.batch_size} "
                "samples, of which each needs one: take fewer replicas, or a larger batch"
            )
        for callback in self.callbacks if isinstance(self.callbacks, Sequence) else [None]:
            if not isinstance(callback, Callback):
                raise ValueError(
                    f"callbacks is {repr(self.callbacks)[:80]}: give a list of objects of classes "
                    "that derive from hybrid.Callback"
                )

    def check_tests(self, tested: bool) -> None:
        """Reject options that have no effect without a validation or test set."""
        acting.check({"train": self.train, "checkpoint": self.checkpoint}, Facts(tested=tested))
        unseen = [name for name in self.metrics or () if name != "accuracy"]
        if unseen and not tested:
            raise ValueError(
                f"metrics has {unseen[0]!r}, which is measured on a validation or test set, and "
                "there is none: give one, or leave it out; 'accuracy' is measured in training, too"
            )

    def take_batch_size(self, data: Data) -> None:
        """Take the batch size of a DataLoader; ValueError if another one is set.

        A stream's batches are divided anew, so there any batch size is allowed.
        """
        size = data.batch_size
        if size is None or size == self.train.batch_size:
            return
        if "batch_size" in self.train.model_fields_set:
            if data.streamed:
                return
            raise ValueError(
                f"train.batch_size is {self.train.batch_size}, but the DataLoader has a batch size "
                f"of {size}: leave one of the two out, or give both alike"
            )
        self.train = self.train.model_copy(update={"batch_size": size})
        self.train.model_fields_set.discard("batch_size")  # another DataLoader may have another
