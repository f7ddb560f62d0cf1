"""Optimizers and schedulers of torch by name, and the arguments they take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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

_FUNCTIONS = "takes functions, which a file of settings has none of: give Trainer(schedule=...) one"
_SCHEDULERS = "takes schedulers, not numbers: give Trainer(schedule=...) a function of the step"
_REFUSED = {
    "LBFGS": "evaluates the loss several times a step, through a closure that blocks have none of",
    "SparseAdam": "takes sparse gradients, and those of blocks are dense",
    "ReduceLROnPlateau": "waits for a metric, and the rate is a function of the step alone",
    "LambdaLR": _FUNCTIONS,
    "MultiplicativeLR": _FUNCTIONS,
    "ChainedScheduler": _SCHEDULERS,
    "SequentialLR": _SCHEDULERS,
}
"""Why a class cannot be."""


def optimizer_name(name: str) -> str:
    """A name as it is written, whatever its case; ValueError for none, or one that cannot be."""
    lower = name.lower()
    return lower if lower in OPTIMIZERS else _written(name, OPTIMIZERS, _optimizers())


def optimizer_class(name: str) -> type[Optimizer]:
    """The class of torch.optim with such a name, or this project's own."""
    if name.lower() == "muon":
        from hybrid.solvers.optimizers.muon import Muon

        return Muon
    if name.lower() == "soap":
        from hybrid.solvers.optimizers.soap import Soap

        return Soap
    of_torch = "nadam" if name.lower() == "nadamw" else name.lower()
    return {found.lower(): cls for found, cls in _optimizers().items()}[of_torch]


def usual_values(name: str) -> dict[str, Any]:
    """What an optimizer has where it is not given: the rate of its class, but for sgd's own."""
    if name.lower() == "sgd":
        return {"lr": SGD_RATE}
    return {"lr": _parameters(optimizer_class(name))["lr"].default, **USUAL.get(name.lower(), {})}


def scheduler_name(name: str) -> str:
    """As `optimizer_name`."""
    own, lower = (*SCHEDULES, "one-cycle"), name.lower()
    return lower if lower in own else _written(name, own, _schedulers())


def scheduler_class(name: str) -> type[LRScheduler]:
    """The class of torch.optim.lr_scheduler with such a name."""
    return _schedulers()["OneCycleLR" if name == "one-cycle" else name]


def check_optimizer(name: str, arguments: Mapping[str, Any]) -> None:
    """ValueError for an argument that the optimizer does not take, or that has its own setting."""
    if not arguments:
        return
    own = {"lr", "weight_decay"}
    if name in ("sgd", "muon"):
        own |= {"momentum", "nesterov"}
    settings = {key: f"optimizer.{key}" for key in own}
    _check(optimizer_class(name), arguments, settings, {"self", "params"})


def check_scheduler(name: str, arguments: Mapping[str, Any]) -> None:
    """As `check_optimizer`; ValueError, too, if an argument is missing."""
    if name in SCHEDULES:
        if arguments:
            raise ValueError(f"{name!r} takes none: its settings are the others of [schedule]")
        return
    cls = scheduler_class(name)
    for key in ("cycle_momentum", "base_momentum", "max_momentum"):
        if arguments.get(key, False) is not False:
            raise ValueError(f"{key} would move the momentum, and only the rate has a schedule")
    _check(cls, arguments, {"max_lr": "optimizer.lr"}, {"self", "optimizer", "last_epoch"})
    required = [key for key, p in _parameters(cls).items() if p.default is inspect.Parameter.empty]
    missing = [k for k in required if k not in ("self", "optimizer", "max_lr", *arguments)]
    if missing:
        raise ValueError(
            f"torch's {name} needs {', '.join(missing)}: set schedule.arguments.{missing[0]}"
        )


def takes(cls: type, key: str) -> bool:
    """Whether its constructor has such an argument."""
    return key in _parameters(cls)


def decays(name: str) -> bool:
    """Whether the optimizer with such a name has a weight decay."""
    return name in OPTIMIZERS or takes(optimizer_class(name), "weight_decay")


def needs_closure(cls: type[Optimizer]) -> bool:
    """Whether its step cannot do without one."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check(
    cls: type, arguments: Mapping[str, Any], settings: Mapping[str, str], given: set[str]
) -> None:
    known = [key for key in _parameters(cls) if key not in given]
    for key, value in arguments.items():
        if key in settings and key in known:
            raise ValueError(f"{key} has a setting of its own: set {settings[key]}")
        if key not in known:
            free = [name for name in known if name not in settings]
            near = nearest(key, free)
            hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(free)}"
            raise ValueError(f"torch's {cls.__name__} takes no {key!r}; {hint}")
        if isinstance(value, Mapping):
            raise ValueError(f"{key} is a table: give a number, a word or a list")


def _written(name: str, own: tuple[str, ...], classes: Mapping[str, type]) -> str:
    found = next((known for known in classes if known.lower() == name.lower()), None)
    if found in _REFUSED:
        raise ValueError(f"torch's {found} {_REFUSED[found]}")
    if found is None:
        others = (k for k in classes if k not in _REFUSED and k.lower() not in own)
        known = [*own, *others]
        near = nearest(name, known)
        raise ValueError(
            f"it must be one of {', '.join(known)}" + (f"; did you mean {near!r}?" if near else "")
        )
    return found


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.__init__).parameters  # type: ignore[misc]


def _optimizers() -> dict[str, type[Optimizer]]:
    import torch

    return _subclasses(torch.optim, torch.optim.Optimizer)


def _schedulers() -> dict[str, type[LRScheduler]]:
    from torch.optim import lr_scheduler

    return _subclasses(lr_scheduler, lr_scheduler.LRScheduler)


def _subclasses(module: object, base: type[Any]) -> dict[str, type[Any]]:
    found = vars(module).items()
    inner = (pair for pair in found if isinstance(pair[1], type) and issubclass(pair[1], base))
    return {name: cls for name, cls in inner if cls is not base and name[0] != "_"}
