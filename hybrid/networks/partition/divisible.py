"""A network as a chain of units: the parts of a sequence, and the insides of parts that are cut."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hybrid.networks.blocks import Blocks
from hybrid.networks.calls import Calls
from hybrid.networks.recording import SAMPLES
from hybrid.networks.units import Unit, is_sequence, units
from hybrid.solvers.acting import nearest
from hybrid.solvers.layers.branches import Reversible, survival
from hybrid.solvers.layers.projection import Projection


class Divisible:
    """A chain of parts that run one after the other, each of which may be cut inside.

    The parts of an `nn.Sequential` are its units; any other network is one part. Inside, a part is
    cut between the calls of its forward (see `Calls`), for which it needs a sample of the inputs.
    """

    def __init__(self, model: nn.Module, sample: Any) -> None:
        self.model, self.sample, self.fault = model, sample, ""
        self.is_sequence = is_sequence(model)
        self.parts = units(model) if self.is_sequence else [Unit("model", {"": model})]

    @cached_property
    def whole(self) -> list[Unit]:
        """The units that balanced blocks have: a sequence's, or those of any other network's lists.

        Nothing but tensors with a row for each sample goes between them.
        """
        if not self.is_sequence:
            return self._calls(0).units()
        if self.sample is None:
            return self.parts
        return Blocks(self.model, self.parts, [0]).with_bundles(self.sample).units

    @cached_property
    def opened(self) -> list[Unit]:
        """The units where each of them is cut inside, one level deeper, as far as that can be.

        A part stays whole that may be left out, that is reversible, or a constraint.
        """
        if not self.is_sequence:
            return self._calls(0, opened=[u.name.partition("@")[0] for u in self.whole]).units()
        return [unit for place in range(len(self.parts)) for unit in self._open(place)]

    def _open(self, place: int) -> list[Unit]:
        part = self.parts[place]
        module, fixed = next(iter(part.parts.values())), (Reversible, Projection)
        if not self._is_open(place) or isinstance(module, fixed) or survival(module) < 1:
            return [part]
        try:
            return self._calls(place).units()
        except ValueError:  # such as a module that torch has compiled
            return [part]

    def cut_at(self, cuts: Sequence[str]) -> tuple[list[Unit], list[int]]:
        """The units, and where blocks start if these are cut: only a part with a cut is cut inside.

        ValueError for unknown names or another order.
        """
        chain, found = list[Unit](), {part.name: part.name for part in self.parts}
        for place, part in enumerate(self.parts):
            path = f"{next(iter(part.parts))}."
            inside = [c for c in cuts if c not in found and (path == "." or c.startswith(path))]
            if not self.is_sequence or (inside and self._is_open(place)):
                calls = self._calls(place, inside)
                found |= dict(zip(inside, calls.find_units_named(inside), strict=True))
                chain += calls.units()
            else:
                chain.append(part)
        starts = find_cut_indices([found.get(c, c) for c in cuts], [u.name for u in chain])
        return chain, [0, *starts]

    def _is_open(self, place: int) -> bool:
        """Whether a part is one module with one tensor as its input, which is known."""
        single = self.sample is not None and len(self.parts[place].parts) == 1
        return single and isinstance(self._values[place], Tensor)

    @cached_property
    def _values(self) -> list[Any]:
        """A few rows of what goes into each part."""
        if not self.is_sequence:
            return [self.sample]
        return Blocks(self.model, self.parts, [0]).values(self.sample, SAMPLES + 1)

    def _calls(self, place: int, cuts: Sequence[str] = (), opened: Collection[str] = ()) -> Calls:
        """The calls inside a part, which is cut before these modules, too, or inside of these."""
        ((prefix, module),) = self.parts[place].parts.items()
        if self.sample is None:
            raise ValueError(
                f"a {type(module).__name__} is cut between the calls of its forward, which needs "
                "sample=, a batch of its inputs"
            )
        inner = [cut.removeprefix(f"{prefix}.") if prefix else cut for cut in cuts]
        calls = Calls(module, self._values[place], inner, opened, prefix, place)
        self.fault = calls.fault or self.fault
        return calls


def find_cut_indices(cuts: Sequence[str], names: Sequence[str]) -> list[int]:
    """The places of cuts among the units; ValueError for unknown names or another order."""
    indices: list[int] = []
    for cut in cuts:
        if cut not in names:
            near = nearest(cut, names, 0.6)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(
                f"no unit {cut!r} among the {len(names)} units ({', '.join(names)}){hint}"
            )
        indices.append(names.index(cut))
    if 0 in indices:
        raise ValueError(f"a cut before {names[0]!r}, the first unit, would leave block 0 empty")
    if indices != sorted(set(indices)):
        raise ValueError(f"cuts {list(cuts)} are not in the model's order: {', '.join(names)}")
    return indices
