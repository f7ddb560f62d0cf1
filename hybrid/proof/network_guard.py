"""Notices changes that a callback makes to one rank's copy of a network."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.networks.blocks import Blocks

_TORCHS_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_PLAIN = bool, int, float, complex, str, bytes, type(None)


@dataclass(frozen=True)
class Mark:
    """What is compared of a value."""

    mark: object
    alive: object = field(default=None, compare=False)
    """What must live as long: another object could get its identity."""


class NetworkGuard:
    """Compares a network before and after a call of a callback, which one rank alone makes.

    A rank that trains `alone` uses the modules of its block as they are, so that attributes may
    change. Weights, buffers and modes may, where all ranks have them in `common`, as threads of one
    replica do.
    """

    def __init__(self, blocks: Blocks, index: int, alone: bool, common: bool) -> None:
        self.blocks, self.index, self.alone, self.common = blocks, index, alone, common

    def look(self) -> dict[str, Mark]:
        """A mark of everything that must not change, by its name."""
        return dict(self._marks())

    def describe_change(self, before: Mapping[str, Mark]) -> str:
        """The first change since a look, with the remedy; empty without one."""
        after = self.look()
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                return (
                    f"changed the {name}, and other ranks and blocks have copies, which stay as "
                    "they were: change it in the forward of a module, freeze by train.frozen, or "
                    "train on one rank"
                )
        return ""

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        model = self.blocks.model
        free = {*self.blocks.module(self.index).modules()} if self.alone else set()
        for path, module in model.named_modules():
            if module not in free:
                own = {n: _mark(x) for n, x in vars(module).items() if n not in _TORCHS_ATTRIBUTES}
                for registry in (module._parameters, module._buffers, module._modules):
                    own |= {name: Mark(id(value), value) for name, value in registry.items()}
                for name, mark in own.items():
                    yield f"attribute {path}.{name}".replace(" .", " "), mark
                if not self.common:
                    yield f"mode of {path}", Mark(module.training)
        if not self.common:
            for name, p in model.named_parameters():
                yield f"requires_grad of {name}", Mark(p.requires_grad)
            for name, x in (*model.named_parameters(), *model.named_buffers()):
                yield f"numbers of {name}", Mark(_hash(x.detach()))


def _mark(value: Any) -> Mark:
    if isinstance(value, _PLAIN):
        return Mark((type(value), repr(value)))
    if isinstance(value, Tensor):
        return Mark((id(value), None if value.is_inference() else value._version), value)
    items = [*value.values()] if isinstance(value, dict) else []
    items = [*value] if isinstance(value, list | tuple | set) else items
    return Mark((id(value), *map(id, items)), (value, items))


def _hash(x: Tensor) -> int:
    """A hash of a tensor's numbers: changes of .data do not count in its version.

    It is 0 for a tensor without memory, or with one number in memory for all.
    """
    repeated = x.numel() > 1 and not any(x.stride())
    if x.layout is not torch.strided or x.is_meta or not x.numel() or repeated:
        return 0
    x = torch.view_as_real(x) if x.is_complex() else x
    return int(torch.hash_tensor(x).view(torch.int64))
