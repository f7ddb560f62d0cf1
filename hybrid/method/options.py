"""The settings of a training as its user gives them: objects, classes, names or tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Literal, TypeVar, overload

from hybrid.data.mixing import Transform
from hybrid.data.samplers.base import Sampler
from hybrid.method.blocks import Factory
from hybrid.registries import SAMPLERS
from hybrid.rounds.windows import Rate
from hybrid.settings.config import (
    DelaySettings,
    LinkSettings,
    OptimizerSettings,
    RoundSettings,
    ScheduleSettings,
    TrainSettings,
)
from hybrid.settings.sections.base import Section
from hybrid.settings.sections.rounds import settled
from hybrid.solvers import Solver, registry
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.solvers.metrics import Metric
from hybrid.solvers.objective import Loss
from hybrid.solvers.registry import STRATEGIES
from hybrid.solvers.sync.base import Strategy

T = TypeVar("T")


class Given(Generic[T]):
    """A field that takes an object of a kind, its class or its name, and holds an object.

    A name or a class stands for the object with its defaults. ValueError for anything else.
    """

    def __init__(self, kind: type[T], by_name: Callable[[str], type[T]], default: str) -> None:
        """`by_name` raises ValueError for an unknown name and suggests the nearest one."""
        self.kind, self.by_name, self.default = kind, by_name, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, options: None, owner: type) -> str: ...
    @overload
    def __get__(self, options: object, owner: type) -> T: ...
    def __get__(self, options: object | None, owner: type) -> T | str:
        """On the class, the default: dataclasses ask for it."""
        if options is None:
            return self.default
        held: T = vars(options)[self.name]
        return held

    def __set__(self, options: object, value: T | type[T] | Mapping[str, Any] | str) -> None:
        vars(options)[self.name] = self._understood(value)

    def _understood(self, value: Any) -> Any:
        return understood(value, self.kind, self.name, self.by_name)


class GivenSettings(Given[T]):
    """A field that takes settings, a mapping of them or the name alone, and holds settings.

    Of a kind that is `callable` it takes and holds a function, too. ValueError for anything else.
    """

    def __init__(self, kind: type[Section], callable: bool = False) -> None:
        self.settings, self.callable = kind, callable
        self.default = ""  # which stands for settings without any

    def _understood(self, value: Any) -> Any:
        if isinstance(value, self.settings) or (self.callable and callable(value)):
            return value
        first = next(iter(self.settings.model_fields))
        if isinstance(value, str) and (not value or first in ("name", "kind", "mend")):
            value = {first: value} if value else {}
        if isinstance(value, Mapping):
            return self.settings.of(self.name, value)
        also = ", or a function as hybrid.Trainer describes it" if self.callable else ""
        raise ValueError(
            f"{self.name} is {repr(value)[:80]}; it must be {self.settings.__name__}(...) or a "
            f"dict of its settings{also}"
        )


def understood(value: Any, kind: type[T], name: str, by_name: Callable[[str], type[Any]]) -> T:
    """The object of a `kind` that a user means; ValueError if `value` is none of that kind."""
    meant = by_name(value) if isinstance(value, str) else value
    if isinstance(meant, type) and issubclass(meant, kind):
        try:
            return meant()
        except TypeError as error:
            raise ValueError(
                f"{name} is the class {meant.__name__}, which cannot be made without settings "
                f"({error}): give an object of it"
            ) from None
    if isinstance(meant, kind):
        return meant
    raise ValueError(
        f"{name} is {repr(value)[:80]}, no {kind.__name__}: give an object or a class that derives "
        f"from {kind.__module__}.{kind.__name__}, or the name of one, as hybrid list has them"
    )


@dataclass
class Options:
    """The settings of a training beside its blocks and its data, the rounds decided.

    The same for a run, a row of a bench and a row of a plan.
    """

    solver: Given[Solver] = Given(Solver, registry.solver_class, registry.DEFAULT)
    """A method, or its class or name, which stand for it with its defaults."""
    correction: PassSettings | None = None
    """Settings of the serial passes; None: exact, with 4 micro-batches where gaps are filled."""
    _: KW_ONLY
    rounds: RoundSettings = field(default_factory=RoundSettings)
    """How serial corrections and parallel phases alternate."""
    sampler: Given[Sampler] = Given(Sampler, SAMPLERS.__getitem__, SAMPLERS.default)  # type: ignore[type-abstract]
    """Who chooses the samples of a mini-batch; as a class or by name: with its defaults."""
    replicas: int = 1
    """R, chains of the blocks; each trains on a share of every mini-batch."""
    side_by_side: Literal["auto", "chain", "peers"] = "auto"
    """MPI ranks that follow each other: a chain, peers, or those that send each other more."""
    sync: Given[Strategy] = Given(Strategy, STRATEGIES.__getitem__, STRATEGIES.default)
    """How replicas keep their weights together; as a class or by name: with its defaults."""
    train: GivenSettings[TrainSettings] = GivenSettings(TrainSettings)
    """Length, mini-batches and numerics of the training, as settings or a dict."""
    optimizer: GivenSettings[OptimizerSettings | Factory] = GivenSettings(
        OptimizerSettings, callable=True
    )
    """Settings or a name, or what makes one from a block's groups: see `blocks.Factory`."""
    schedule: GivenSettings[ScheduleSettings | Rate] = GivenSettings(
        ScheduleSettings, callable=True
    )
    """Settings or a name, or the learning rate as a function of the step."""
    delay: GivenSettings[DelaySettings] = GivenSettings(DelaySettings)
    """Settings, or the mend alone: what a step does about the delay of its gradient."""
    links: GivenSettings[LinkSettings] = GivenSettings(LinkSettings)
    """How ranks reach each other: settings, a dict, or the kind of links alone."""
    loss: Loss | None = None
    """(output, targets) -> mean loss or a loss of each sample; None: cross-entropy of classes."""
    metrics: Mapping[str, Metric] | None = None
    """By name what is measured, see `Metric`; None: accuracy of classes."""
    batch_transform: Transform | None = None
    """(inputs, targets, generator) -> both, of every training mini-batch: mixup, CutMix; see
    `Transform`."""

    def __post_init__(self) -> None:
        share = self.train.batch_size // max(1, self.replicas)
        self.rounds, wanted = settled(self.solver, self.rounds, share)
        if self.correction is None:
            self.correction = PassSettings(**wanted)
        by_name = registry.solver_class
        self.correction = understood(self.correction, PassSettings, "correction", by_name)

    def check(self) -> None:
        """ValueError for what cannot be, whatever the method."""
        if not 1 <= self.replicas <= self.train.batch_size:
            raise ValueError(
                f"split.replicas is {self.replicas}, and a mini-batch has {self.train.batch_size} "
                "samples, of which each needs one: take fewer replicas, or a larger --batch-size"
            )
