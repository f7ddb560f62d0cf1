"""A unit of a network that is cut between calls of its modules."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from torch import Tensor, nn

from hybrid.networks.units import Parts, Unit, full_name

X = TypeVar("X", bound=Tensor)


@dataclass
class CallUnit(Unit):
    """Units `start` to `stop` - 1 of a network that is cut between calls."""

    calls: Any = field(kw_only=True)
    """The `Calls` of the network."""
    start: int = 0
    stop: int = 0

    def tensors(self) -> dict[str, Tensor]:
        return self._named(self.calls.tensors_of(self.start, self.stop))

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._named(self.calls.parameters_of(self.start, self.stop))

    def _named(self, tensors: dict[str, X]) -> dict[str, X]:
        return {full_name(self.calls.prefix, name): x for name, x in tensors.items()}

    def begin_parts(self, run: Sequence[Unit], local: bool) -> tuple[Parts, int]:
        same = [*takewhile(lambda u: isinstance(u, CallUnit) and u.calls is self.calls, run)]
        stop = self.start + sum(u.stop - u.start for u in same if isinstance(u, CallUnit))
        return [(self.calls.prefix, self.calls.stage(self.start, stop, local))], len(same)
