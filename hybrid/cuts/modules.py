"""A run of units as one module, from one tensor to one tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hybrid.models import Unit, full_name
from hybrid.solvers.layers.bundle import Bundle, call_network


class BlockModule(nn.Sequential):
    """A block's units in running order, with the global names of their tensors.

    Several tensors go in or out packed as one, see `Bundle`. The network's outputs are not packed.
    """

    def __init__(self, block: Sequence[Unit], after: Unit | None = None) -> None:
        parts = [(prefix, m) for unit in block for prefix, m in unit.parts.items()]
        super().__init__(OrderedDict((str(i), m) for i, (_, m) in enumerate(parts)))
        self.prefixes = [prefix for prefix, _ in parts]
        self.before: Bundle | None = block[0].bundle
        self.after: Bundle | None = after.bundle if after else None
        self.begins = block[0].begins
        """Whether its input is the network's."""

    def forward(self, input: Any, parts: slice | None = None) -> Any:
        """(N, ...) -> (N, ...); with `parts` through these only, from the first one's input."""
        if self.before is None and self.after is None and parts is None:
            return super().forward(input)  # type: ignore[no-untyped-call]
        chosen = range(len(self._modules))[parts or slice(None)]
        value = input if self.before is None or 0 not in chosen else self.before.unpack(input)
        for i in chosen:
            part = self._modules[str(i)]
            assert part is not None
            value = call_network(part, value) if self.begins and not i else part(value)
        ends = len(self._modules) - 1 in chosen
        return value if self.after is None or not ends else self.after.pack(value)

    def global_name(self, local: str) -> str:
        """The name in the whole model's state dict of this module's tensor `local`."""
        index, _, rest = local.partition(".")
        prefix = self.prefixes[int(index)]
        return full_name(prefix, rest)


def make_single_unit_blocks(chain: Sequence[Unit]) -> list[BlockModule]:
    """Every unit as a block of its own."""
    return [
        BlockModule([unit], after) for unit, after in zip(chain, [*chain[1:], None], strict=True)
    ]


def check_shared_tensors(blocks: Sequence[BlockModule]) -> None:
    """ValueError if two blocks share a parameter or statistic: their copies would differ soon."""
    owner: dict[int, int] = {}
    for index, module in enumerate(blocks):
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        statistics = {id(b) for norm in norms for b in norm.buffers()}
        found: list[tuple[str, str, Tensor]]
        found = [(name, "parameter", p) for name, p in module.named_parameters()]
        found += [(n, "statistic", b) for n, b in module.named_buffers() if id(b) in statistics]
        for name, kind, tensor in found:
            if owner.setdefault(id(tensor), index) != index:
                raise ValueError(
                    f"blocks {owner[id(tensor)]} and {index} share the {kind} "
                    f"{module.global_name(name)!r}, and their copies would drift apart: cut "
                    "elsewhere, or give each its own"
                )
