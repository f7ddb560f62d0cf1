"""Optimizers and schedulers of torch by name, and the arguments they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hybrid.solvers.acting import nearest

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

# torch is imported where a class is asked for: the command's help comes without it

OPTIMIZERS = ("sgd", "adamw", "nadamw", "muon", "soap")
"""Those that have all their settings in [optimizer]."""
BY_SHAPE = ("muon", "soap")
"""Those that step matrices, and leave vectors to another."""
SGD_RATE = 0.1
"""The learning rate of sgd where none is given; torch's own, 0.001, suits no network here."""
USUAL: dict[str, dict[str, Any]] = {
    "muon": {"momentum": 0.95},
    "nadamw": {"momentum": 0.99},
    "soap": {"vectors": "adamw"},
}
"""What is not given, if it is not as of sgd."""
SCHEDULES = ("cosine", "linear", "step", "constant")
"""Those that have all their settings in [schedule]."""
SHORT = {"one-cycle": "OneCycleLR", "plateau": "ReduceLROnPlateau"}
"""Other names of classes of torch's."""
BY_STEP = ("OneCycleLR", "CyclicLR")
"""Schedulers of torch's that step after every mini-batch."""

_REFUSED = {
    "LBFGS": "a closure that evaluates the loss",
    "SparseAdam": "sparse gradients",
    "LambdaLR": "functions: give Trainer(schedule=...) one",
    "MultiplicativeLR": "functions: give Trainer(schedule=...) one",
    "ChainedScheduler": "schedulers: give Trainer(schedule=...) the object",
    "SequentialLR": "schedulers: give Trainer(schedule=...) the object",
}
"""What a class needs that the settings of a training by blocks do not have."""


def optimizer_name(name: str) -> str:
    """A name as it is written, whatever its case; ValueError for none, or one that cannot be."""
    lower = name.lower()
    return lower if lower in OPTIMIZERS else _written(name, OPTIMIZERS, _optimizers())


def optimizer_class(name: str) -> type[Optimizer]:
    """The class of torch.optim with such a name, or this project's own."""
    from hybrid.solvers.optimizers.muon import Muon
    from hybrid.solvers.optimizers.soap import Soap

    classes = {cls.__name__.lower(): cls for cls in _optimizers().values()}
    return (classes | {"muon": Muon, "soap": Soap, "nadamw": classes["nadam"]})[name.lower()]


def usual_values(name: str) -> dict[str, Any]:
    """What an optimizer has where it is not given: the rate of its class, but for sgd's own."""
    if name.lower() == "sgd":
        return {"lr": SGD_RATE}
    return {
        "lr": inspect.signature(optimizer_class(name)).parameters["lr"].default,
        **USUAL.get(name.lower(), {}),
    }


def scheduler_name(name: str) -> str:
    """As `optimizer_name`."""
    builtin, lower = (*SCHEDULES, *SHORT), name.lower()
    return lower if lower in builtin else _written(name, builtin, _schedulers())


def scheduler_class(name: str) -> type[LRScheduler]:
    """The class of torch.optim.lr_scheduler with such a name."""
    return _schedulers()[SHORT.get(name, name)]


def check_optimizer(name: str, arguments: Mapping[str, Any]) -> None:
    """ValueError for an argument that other settings decide; torch knows the others."""
    _check({"params", "lr", "weight_decay"}, arguments)
    if name in ("sgd", "muon"):
        _check({"momentum", "nesterov"}, arguments)


def check_scheduler(name: str, arguments: Mapping[str, Any]) -> None:
    """As `check_optimizer`."""
    if name in SCHEDULES and arguments:
        raise ValueError(f"{name!r} takes none: its settings are the others of [schedule]")
    for key in ("cycle_momentum", "base_momentum", "max_momentum"):
        if arguments.get(key, False) is not False:
            raise ValueError(
                f"{key} would move the momentum, and by name only the rate has a schedule: give "
                "Trainer(schedule=...) the scheduler's object"
            )
    _check({"optimizer", "last_epoch", "max_lr"}, arguments)


def _check(decided: set[str], arguments: Mapping[str, Any]) -> None:
    for key in arguments:
        if key in decided:
            raise ValueError(f"{key} is not among them: other settings decide it")


def takes(cls: type, key: str) -> bool:
    """Whether its constructor has such an argument."""
    return key in inspect.signature(cls).parameters


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function of the user's can be told `name`, as it is called there."""
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # one that is not written in Python
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.VAR_KEYWORD


def decays(name: str) -> bool:
    """Whether the optimizer with such a name has a weight decay."""
    return name in OPTIMIZERS or takes(optimizer_class(name), "weight_decay")


def needs_closure(cls: type[Optimizer]) -> bool:
    """Whether its step cannot do without one."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _written(name: str, builtin: tuple[str, ...], classes: Mapping[str, type]) -> str:
    """The name of one of torch's classes as torch writes it."""
    written = next((cls for cls in classes if cls.lower() == name.lower()), None)
    if written in _REFUSED:
        raise ValueError(f"torch's {written} needs {_REFUSED[written]}")
    if written is None:
        others = (k for k in classes if k not in _REFUSED and k.lower() not in builtin)
        names = [*builtin, *others]
        near = nearest(name, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"it must be one of {', '.join(names)}{hint}")
    return written


def _optimizers() -> dict[str, type[Optimizer]]:
    import torch

    return _subclasses(torch.optim, torch.optim.Optimizer)


def _schedulers() -> dict[str, type[LRScheduler]]:
    from torch.optim import lr_scheduler

    return _subclasses(lr_scheduler, lr_scheduler.LRScheduler)


def _subclasses(module: object, base: type[Any]) -> dict[str, type[Any]]:
    classes = {name: cls for name, cls in vars(module).items() if isinstance(cls, type)}
    return {
        name: cls
        for name, cls in classes.items()
        if issubclass(cls, base) and cls is not base and name[0] != "_"
    }
