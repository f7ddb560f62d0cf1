"""What a callback must not change of a network, since it is called on the first rank alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid.networks.blocks import Blocks

_REGISTRIES = frozenset(vars(nn.Module()))
"""Attributes of every module: torch's own."""
_PLAIN = bool, int, float, complex, str, bytes, type(None)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
REMEDIES = {
    "attribute": "let the module's own forward change it in training, or keep it in a buffer there",
    "mode of": "leave modules in the mode, training or not, that they were in",
    "requires_grad of": "freeze parameters by train.frozen",
    "numbers of": "let a forward in training change them (torch.nn.utils.parametrize), or train on "
    "one rank",
}


class Seen(NamedTuple):
    """A value, and objects that must live as long, or another may get the identity of one."""

    value: object
    alive: object = None


class Untouched:
    """Compares a network on the rank of a block before and after a call of a callback.

    What may change depends on who else trains with the same modules. Attributes may, where `alone`
    no other rank trains, but not those of modules that are in no block. Modes, requires_grad and
    numbers may, where all ranks have them in `common`, as threads of one replica do.
    """

    def __init__(self, blocks: Blocks, index: int, alone: bool, common: bool) -> None:
        self.blocks, self.index, self.alone, self.common = blocks, index, alone, common

    def look(self) -> Mapping[tuple[str, str], Seen]:
        """What there is, by kind and name."""
        return {(kind, name): seen for kind, name, seen in self._everything()}

    def fault(self, before: Mapping[tuple[str, str], Seen]) -> str:
        """What has changed since a look, and the remedy; empty if nothing has."""
        after, nothing = self.look(), Seen(object())
        for key in {**before, **after}:
            if before.get(key, nothing).value != after.get(key, nothing).value:
                return (
                    f"changed the {' '.join(key).strip()}, which is copied for other ranks and "
                    f"blocks, where it stays as it was: {REMEDIES[key[0]]}"
                )
        return ""

    def _everything(self) -> Iterator[tuple[str, str, Seen]]:
        model = self.blocks.model
        own = {*self.blocks.module(self.index).modules()}
        for path, module in model.named_modules():
            if not self.alone or module not in own:
                for name, seen in _attributes(module):
                    yield "attribute", f"{path}.{name}".lstrip("."), seen
            if not self.common and module in own:
                yield "mode of", path, Seen(module.training)
        if not self.common:
            tensors = dict(model.named_parameters())
            for name, p in tensors.items():
                yield "requires_grad of", name, Seen(p.requires_grad)
            for name, x in {**tensors, **dict(model.named_buffers())}.items():
                yield "numbers of", name, Seen(_sum_of_bits(x.detach()))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Seen]]:
    """Those that are not torch's own, and which parameters, buffers and modules there are."""
    for name, value in vars(module).items():
        if name not in _REGISTRIES:
            yield name, _seen(value)
    for registry in (module._parameters, module._buffers, module._modules):
        for name, value in registry.items():
            yield name, Seen(id(value), value)


def _seen(value: Any) -> Seen:
    if isinstance(value, _PLAIN):
        return Seen((type(value), repr(value)))
    if isinstance(value, Tensor):
        return Seen((id(value), None if value.is_inference() else value._version), value)
    items = [*value.values()] if isinstance(value, dict) else []
    items = [*value] if isinstance(value, list | tuple | set) else items
    return Seen((id(value), *map(id, items)), (value, items))


def _sum_of_bits(x: Tensor) -> int:
    """The sum of its numbers' bits as integers; 0 where one number in memory stands for all.

    Changes of .data do not count in a tensor's version.
    """
    if x.layout is not torch.strided or x.is_meta or (x.numel() > 1 and not any(x.stride())):
        return 0
    x = torch.view_as_real(x) if x.is_complex() else x
    integers = x.view(_BITS[x.element_size()])
    return int(integers.sum(dtype=integers.dtype))
