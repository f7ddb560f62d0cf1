"""Optimizers and schedulers of torch by name, others by module:Class, and their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hybrid.solvers.acting import nearest
from hybrid.solvers.named import is_reference, load_object

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

# torch is imported only when a class is needed: the command's help works without it

OPTIMIZERS = ("sgd", "adamw", "nadamw", "muon", "soap")
"""Optimizers with all their settings in [optimizer]."""
BY_SHAPE = ("muon", "soap")
"""Optimizers that step matrices, and leave vectors to another."""
SGD_RATE = 0.1
"""The default learning rate of sgd; torch's default, 0.001, suits no network here."""
USUAL: dict[str, dict[str, Any]] = {
    "muon": {"momentum": 0.95},
    "nadamw": {"momentum": 0.99},
    "soap": {"vectors": "adamw"},
}
"""Defaults that differ from those of sgd."""
SCHEDULES = ("cosine", "linear", "step", "constant")
"""Schedules with all their settings in [schedule]."""
SHORT = {"one-cycle": "OneCycleLR", "plateau": "ReduceLROnPlateau"}
"""Short names of torch's classes."""
BY_STEP = ("OneCycleLR", "CyclicLR")
"""torch's schedulers that step after every mini-batch."""

_REFUSED = {
    "LBFGS": "a closure that evaluates the loss",
    "SparseAdam": "sparse gradients",
    "LambdaLR": "functions: give Trainer(schedule=...) one",
    "MultiplicativeLR": "functions: give Trainer(schedule=...) one",
    "ChainedScheduler": "schedulers: give Trainer(schedule=...) the object",
    "SequentialLR": "schedulers: give Trainer(schedule=...) the object",
}
"""By class, the need that settings cannot meet."""


def optimizer_name(name: str) -> str:
    """Normalize the case of an optimizer's name; ValueError if it is unknown or unusable."""
    lower = name.lower()
    if is_reference(name):  # imported when it is made: a file may have named it
        return name
    return lower if lower in OPTIMIZERS else _class_name(name, OPTIMIZERS, _optimizers())


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class with a name; ValueError for a reference to anything else."""
    from torch.optim import Optimizer

    from hybrid.solvers.optimizers.muon import Muon
    from hybrid.solvers.optimizers.soap import Soap

    if is_reference(name):
        cls = load_object(name, "--set optimizer.name=")
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise ValueError(f"optimizer.name is {name!r}: name a class of torch.optim.Optimizer")
        return cls
    classes = {cls.__name__.lower(): cls for cls in _optimizers().values()}
    return (classes | {"muon": Muon, "soap": Soap, "nadamw": classes["nadam"]})[name.lower()]


def usual_values(name: str) -> dict[str, Any]:
    """Return an optimizer's own defaults: the learning rate of its class, and `USUAL`."""
    if name.lower() == "sgd":
        return {"lr": SGD_RATE}
    if is_reference(name):
        return {"lr": 1e-3, "weight_decay": 0.0}
    rate = inspect.signature(optimizer_class(name)).parameters["lr"].default
    return {"lr": rate, **USUAL.get(name.lower(), {})}


def scheduler_name(name: str) -> str:
    """Normalize the case of a schedule's name; ValueError if it is unknown or unusable."""
    builtin, lower = (*SCHEDULES, *SHORT), name.lower()
    return lower if lower in builtin else _class_name(name, builtin, _schedulers())


def scheduler_class(name: str) -> type[LRScheduler]:
    """Return the class of torch.optim.lr_scheduler with a name."""
    return _schedulers()[SHORT.get(name, name)]


def check_optimizer(name: str, arguments: Mapping[str, Any]) -> None:
    """Reject arguments that other settings decide; torch checks the others."""
    _check({"params", "lr", "weight_decay"}, arguments)
    if name in ("sgd", "muon"):
        _check({"momentum", "nesterov"}, arguments)


def check_scheduler(name: str, arguments: Mapping[str, Any]) -> None:
    """Reject arguments that other settings decide, or that move the momentum."""
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
    """Whether a class's constructor has an argument."""
    return key in inspect.signature(cls).parameters


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a user's function has a parameter called `name`."""
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # not written in Python
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.VAR_KEYWORD


def decays(name: str) -> bool:
    """Whether an optimizer has a weight decay."""
    return is_reference(name) or name in OPTIMIZERS or takes(optimizer_class(name), "weight_decay")


def _class_name(name: str, builtin: tuple[str, ...], classes: Mapping[str, type]) -> str:
    """Find the name of a torch class in torch's spelling."""
    spelling = next((cls for cls in classes if cls.lower() == name.lower()), None)
    if spelling in _REFUSED:
        raise ValueError(f"torch's {spelling} needs {_REFUSED[spelling]}")
    if spelling is None:
        others = (k for k in classes if k not in _REFUSED and k.lower() not in builtin)
        names = [*builtin, *others]
        near = nearest(name, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"it must be one of {', '.join(names)}{hint}")
    return spelling


def _optimizers() -> dict[str, type[Optimizer]]:
    import torch

    return _subclasses(torch.optim, torch.optim.Optimizer)


def _schedulers() -> dict[str, type[LRScheduler]]:
    from torch.optim import lr_scheduler

    return _subclasses(lr_scheduler, lr_scheduler.LRScheduler)


def _subclasses(module: object, base: type[Any]) -> dict[str, type[Any]]:
    return {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base and name[0] != "_"
    }
