"""Checks of the arguments of `split`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybrid.models import Unit, check_units
from hybrid.solvers.checks import nearest
from hybrid.solvers.layers.projection import Projection
from hybrid.solvers.layers.residual import Reversible, Skippable, survival

BALANCES = ("operations", "measured", "even")


def check_split(blocks: int | None, cuts: Sequence[str] | None, balance: str, sample: Any) -> None:
    """ValueError for invalid arguments."""
    if cuts is None and blocks is None:
        raise ValueError("split needs a number of blocks, or cuts by unit name")
    if balance not in BALANCES:
        raise ValueError(f"balance is {balance!r}; choose one of {', '.join(BALANCES)}")
    if not isinstance(blocks, int | None):
        raise ValueError(f"split was given {blocks!r} blocks: give a whole number")
    if not all(isinstance(x, Tensor) and x.dim() for x in tree_leaves(sample) if x is not None):
        raise ValueError(
            f"sample is a {type(sample).__name__}: give a batch of inputs, a tensor, a tuple or a "
            "dict of tensors with one row for each sample"
        )


def check_uncut_modules(model: nn.Module) -> None:
    """ValueError for a module that must stay a unit of its own."""
    for module in model.modules():
        skipped = isinstance(module, Skippable) and survival(module) < 1
        if skipped or isinstance(module, Projection | Reversible):
            kind = type(module).__name__
            raise ValueError(
                f"split.inside cuts inside units, and {kind} must stay one: leave it out"
            )


def make_units_of_list(
    modules: Sequence[tuple[str, nn.Module]],
) -> tuple[nn.Sequential, list[Unit]]:
    """A network of a user's list of (name, module), and its units; ValueError for other lists."""
    if not isinstance(modules, list | tuple):
        raise ValueError(
            f"split was given {str(modules)[:60]!r}, not a module or a list of (name, module)"
        )
    for entry in modules:
        if not (
            isinstance(entry, tuple)
            and len(entry) == 2
            and isinstance(entry[0], str)
            and isinstance(entry[1], nn.Module)
        ):
            raise ValueError(
                f"split was given {str(entry)[:60]}, not a module or a list of (name, module)"
            )
    try:
        network = nn.Sequential(OrderedDict(modules))
    except KeyError as error:
        raise ValueError(f"a unit cannot have that name: {error.args[0]}") from None
    if len(network) != len(modules):
        raise ValueError("two units have the same name: name every unit once")
    return network, check_units([Unit(name, {name: module}) for name, module in modules])


def find_cut_indices(cuts: Sequence[str], names: Sequence[str]) -> list[int]:
    """The places of cuts among the units; ValueError for unknown names or another order."""
    found: list[int] = []
    for cut in cuts:
        if cut not in names:
            near = nearest(cut, names, 0.6)
            around = [name for name in names if cut.startswith(f"{name}.")]
            hint = f"; did you mean {near!r}?" if near else ""
            if around:
                hint = f"; split.inside (inside=True) cuts inside {around[0]!r}, too"
            raise ValueError(
                f"no unit {cut!r} among the {len(names)} units ({', '.join(names)}){hint}"
            )
        found.append(names.index(cut))
    if 0 in found:
        raise ValueError(f"a cut before {names[0]!r}, the first unit, would leave block 0 empty")
    if found != sorted(set(found)):
        raise ValueError(f"cuts {cuts} are not in the model's order: {', '.join(names)}")
    return found
