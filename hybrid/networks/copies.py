"""Plain attributes of a network that is cut between calls, and of the copies that blocks run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from hybrid.networks.calls import Calls
from hybrid.networks.stretch import Stretch
from hybrid.solvers.numerics.attributes import attributes, hand_over, is_number, user_modules


def take_attributes(calls: Calls) -> None:
    """Let the copies have the model's attributes as they are."""
    models = user_modules(calls.model)
    for network in calls.networks():
        for path, module in user_modules(network).items():
            hand_over(models[path], module)


def give_attributes(calls: Calls, starts: Sequence[int], only: int | None) -> None:
    """Let the model have those of the copies, each of the block that runs the module.

    Of several blocks the last one has come to the end of the module's code. `only` that block has
    been trained here; None: all.
    """
    for start, path, module in _run_modules(calls, starts):
        if only is None or start == starts[only]:
            hand_over(module, calls.model.get_submodule(path))


def check_counts(calls: Calls, starts: Sequence[int]) -> None:
    """ValueError if a pass of all blocks has left numbers in a module that differ between them.

    Code behind a cut is run by the blocks behind it alone.
    """
    seen: dict[tuple[str, str], Any] = {}
    for start, path, module in _run_modules(calls, starts):
        numbers = {name: x for name, x in attributes(module).items() if is_number(x)}
        for name, value in numbers.items():
            if seen.setdefault((path, name), value) != value:
                raise ValueError(
                    f"{path or type(calls.model).__name__} changes its attribute {name!r} behind "
                    f"the cut before {calls.unit_names[start]}, and the block before it does not "
                    "come there: change it where the forward begins, or in a module of its own, or "
                    "cut elsewhere"
                )


def _run_modules(calls: Calls, starts: Sequence[int]) -> Iterator[tuple[int, str, nn.Module]]:
    """The first unit of each block, and the paths and copies of the modules that it runs."""
    for start, stop in pairwise((*starts, calls.count)):
        stretch = calls.stretch(start, stop, True)
        for path, module in user_modules(stretch.network.copy).items():
            if _runs(calls, path, stretch, range(start, stop)):
                yield start, path, module


def _runs(calls: Calls, path: str, stretch: Stretch, units: range) -> bool:
    """Whether a block runs the code of a module, or of the one that calls it."""
    while path and path not in calls.begun:
        path = path.rpartition(".")[0]
    ends = [each.contexts for each in (stretch.start, stretch.end) if each is not None]
    around = {call[-1][0] for contexts in ends for call in contexts if call}
    return not path or path in around or not calls.begun[path].isdisjoint(units)
