"""The user's functions, named package.module:function on the command line."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hybrid.errors import one_line
from hybrid.settings.config import Config
from hybrid.solvers.named import is_reference, load_object

FLAGS = {"model.name": "--model ", "data.name": "--data ", "train.loss": "--loss "}
OTHERS = "optimizer.name", "solver.head", "sampler.assistant"
FLAGS |= {name: f"--set {name}=" for name in OTHERS}
"""The settings that may name one, and what stands before the name on the command line."""


def check_code_is_given(config: Config, overrides: Mapping[str, Any]) -> None:
    """ValueError for a function that a file names: it runs only if the command line does."""
    for dotted, flag in FLAGS.items():
        name = _name(config, dotted)
        if is_reference(name) and overrides.get(dotted) != name:
            raise ValueError(
                f"{dotted} is {name!r}, code that would run, and a file says so: give "
                f"{flag}{name} on the command line to run it"
            )


def reference_flags(config: Config) -> list[str]:
    """The flags that name functions, without which a run is not resumed."""
    flags = ((flag, _name(config, dotted)) for dotted, flag in FLAGS.items())
    return [word for flag, name in flags if is_reference(name) for word in f"{flag}{name}".split()]


def _name(config: Config, dotted: str) -> str:
    section, field = dotted.split(".")
    settings = getattr(config, section)
    name = settings.get(field) if isinstance(settings, dict) else getattr(settings, field)
    return name if isinstance(name, str) else ""


def load_loss(name: str) -> Any:
    """The loss that --loss names; None: one of this package's. ValueError with the reason."""
    loss = load_object(name, "--loss ") if is_reference(name) else None
    if loss is not None and not callable(loss):
        raise ValueError(f"--loss {name} is a {type(loss).__name__}, no function")
    return loss


def make_network(name: str) -> nn.Module:
    """The network that --model names."""
    network = _call(name, "--model")
    if not isinstance(network, nn.Module):
        raise ValueError(f"--model {name} gave a {type(network).__name__}, not a torch.nn.Module")
    return network


def make_data_sets(name: str) -> tuple[Any, Any, Any]:
    """The data that --data names: to train on and, unless they are None, to test and validate on.

    A function gives the first alone, (training, test) or (training, validation, test); a tuple of
    tensors is inputs and targets.
    """
    sets = _call(name, "--data")
    train, test, validation = sets, None, None
    if isinstance(sets, tuple | list) and not all(isinstance(x, Tensor) for x in sets):
        if len(sets) == 2:
            train, test = sets
        elif len(sets) == 3 and isinstance(sets, tuple):
            train, validation, test = sets
    if train is None or isinstance(train, Tensor):
        raise ValueError(
            f"--data {name} gave a {type(sets).__name__}, not (training, test) or (training, "
            "validation, test) data"
        )
    return train, test, validation


def _call(name: str, flag: str) -> Any:
    """What the function gives without arguments; ValueError with the reason."""
    function = load_object(name, f"{flag} ")
    try:
        return function()
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise ValueError(
            f"{flag} {name} failed: {type(error).__name__}: {one_line(error)}"
        ) from None
