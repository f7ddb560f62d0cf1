"""A model cut into blocks, and what a run needs to know of them: costs, shapes, random draws."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from html import escape
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.errors import ON_META
from hybrid.networks.call_unit import CallUnit
from hybrid.networks.calls import Calls
from hybrid.networks.costs import count_costs, merge_packed_units
from hybrid.networks.units import BlockModule, Modes, Unit, mode
from hybrid.solvers.base import Shape
from hybrid.solvers.layers.bundle import Bundle, call_network
from hybrid.solvers.local_work.budget import Cost
from hybrid.solvers.metrics import FAULTS, failure
from hybrid.solvers.numerics.draws import NumberedDraws, find_random_parts

SAMPLES = 32
"""Batch size for the units' cost: weights are read once for each batch."""


@dataclass(repr=False)
class Blocks:
    """A model cut into blocks: block k runs units starts[k] .. starts[k+1]-1."""

    model: nn.Module
    units: list[Unit]
    starts: list[int]
    costs: list[Cost] = field(default_factory=list)
    """The cost of each unit for one sample, as it was balanced; empty for explicit cuts."""
    pending: Any = None
    """Weights in files that are read when a training begins: `local_init.PendingWeights`."""
    modes: Modes | None = None
    """Of the model's modules; None: they are not settled."""
    speeds: tuple[float, ...] = ()
    """Of the blocks' machines, relative; empty: they are equal."""
    recut: Callable[[Callable[[Blocks], Sequence[float]]], Blocks] | None = None
    """Cuts the network anew where machines have the bytes that blocks need; None: no limits."""
    cut_at: Callable[[Sequence[str]], Blocks] | None = None
    """Cuts the network anew before units of these names."""

    def __len__(self) -> int:
        return len(self.starts)

    def __repr__(self) -> str:
        """One line for each block: its units, its parameters and, if known, its cost share."""
        return "\n".join(
            f"block {k}: {units}, {parameters} parameters"
            + "".join(f", {s} of the cost" for s in share)
            for k, units, parameters, *share in self._rows()
        )

    def _repr_html_(self) -> str:
        head = ["block", "units", "parameters", *["share of the cost"] * bool(self.costs)]
        lines = [("th", head), *(("td", row) for row in self._rows())]
        cells = ("".join(f"<{tag}>{escape(x)}</{tag}>" for x in row) for tag, row in lines)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    def _rows(self) -> Iterator[list[str]]:
        """For each block its number, its first and last unit, its parameters and its cost share."""
        ends, total = [*self.starts[1:], len(self.units)], sum(map(sum, self.costs))
        for k, (start, end) in enumerate(zip(self.starts, ends, strict=True)):
            parameters = {id(p): p for u in self.units_of(k) for p in u.parameters().values()}
            count = sum(p.numel() for p in parameters.values())
            share = sum(map(sum, self.costs[start:end])) / total if total else 0.0
            units = f"{self.units[start].name} to {self.units[end - 1].name}"
            yield [str(k), units, f"{count:,}", *[f"{share:.0%}"] * bool(total)]

    @property
    def cuts(self) -> list[str]:
        """The first unit of every block but the first."""
        return [self.units[start].name for start in self.starts[1:]]

    def units_of(self, index: int) -> list[Unit]:
        """The units of block `index`."""
        ends = [*self.starts[1:], len(self.units)]
        return self.units[self.starts[index] : ends[index]]

    def module(self, index: int) -> BlockModule:
        """Block `index` as one module, sharing the model's parameters."""
        after = self.units[self.starts[index + 1]] if index + 1 < len(self) else None
        return BlockModule(self.units_of(index), after, modes=self.modes)

    @property
    def bundled(self) -> bool:
        """Whether the input of some block is several tensors."""
        return any(self.units[start].bundle for start in self.starts)

    @property
    def packed_cuts(self) -> frozenset[int]:
        """The cuts that several tensors cross."""
        return frozenset(k for k, i in enumerate(self.starts) if k and self.units[i].bundle)

    def cuts_changed_by(self, number_format: str) -> list[str]:
        """The cuts where a number format would change the integers that cross them."""
        behind = [self.units[start] for start in self.starts[1:]]
        return [u.name for u in behind if u.bundle and not u.bundle.survives(number_format)]

    def pack_inputs(self, inputs: Any) -> Tensor:
        """A batch of the network's inputs as the one tensor that the first block takes.

        It has the memory layout of a training.
        """
        bundle = self.units[0].bundle
        packed: Tensor = inputs if bundle is None else bundle.pack(inputs)
        return laid_out(packed.to(self._device))

    def count_costs(self, inputs: Any) -> list[Cost]:
        """Counted operations of each block for one sample of `inputs`, as for `with_bundles`."""
        bundled = self.with_bundles(inputs)
        runs = [merge_packed_units(bundled.units_of(k)) for k in range(len(self))]
        units = [unit for run in runs for unit in run]
        each = iter(count_costs(self.model, units, bundled.pack_inputs(inputs)))
        return [Cost(*map(sum, zip(*islice(each, len(run)), strict=True))) for run in runs]

    def with_bundles(self, inputs: Any) -> Blocks:
        """The same blocks, whose units know how their input tensors are packed, and their modes.

        `inputs` is a batch of the network's inputs: a tensor, a tuple by position, a dict by name.
        Raises ValueError if the model does not take it, or if anything but tensors with one row for
        each sample would cross a cut. A unit into which anything else goes joins the one before.
        """
        if any(x.is_meta for x in tree_leaves(inputs) if isinstance(x, Tensor)):
            raise ValueError(f"a sample of the inputs is {ON_META}")
        modes = Modes.of(self.model)
        for each, _, _ in self._calls:
            each.take_attributes()
        bundles = replace(self, modes=modes)._bundles(inputs)
        runs = [*pairwise([*bundles, len(self.units)])]
        units = []
        for a, b in runs:
            parts = {n: m for unit in self.units[a:b] for n, m in unit.parts.items()}
            units.append(replace(self.units[a], parts=parts, bundle=bundles[a], begins=a == 0))
        costs = [Cost(*map(sum, zip(*self.costs[a:b], strict=True))) for a, b in runs if self.costs]
        starts = [[*bundles].index(start) for start in self.starts]
        return replace(self, units=units, starts=starts, costs=costs, modes=modes)

    def _bundles(self, inputs: Any) -> dict[int, Bundle | None]:
        """Bundles of the units' inputs, by unit; one of a single tensor may be missing."""
        values, bundles = self.values(inputs, 2), dict[int, Bundle | None]()
        others: list[Any] = []
        for i, (unit, value) in enumerate(zip(self.units, values, strict=True)):
            where = f"what goes into {unit.name}" if i else "an input"
            try:
                single = isinstance(value, Tensor) and i == 0
                bundle = None if single else Bundle.of(value, 2, where)
                if bundle is not None and not isinstance(unit, CallUnit):
                    others = others or self.values(inputs, 3)
                    Bundle.of(others[i], 3, where)  # one of two recurrent layers is no row
                bundles[i] = bundle
            except ValueError:
                if i == 0 or i in self.starts or isinstance(unit, CallUnit):
                    raise
        return bundles

    def crossing_bytes(self, inputs: Any) -> list[float]:
        """Bytes of a sample of the floating-point tensors that go into each unit."""
        each = [tree_leaves(value) for value in self.values(inputs, 2)]
        return [sum(x.nbytes for x in leaves if x.is_floating_point()) / 2 for leaves in each]

    def values(self, inputs: Any, rows: int) -> list[Any]:
        """The inputs of each unit in evaluation mode, for `rows` rows of the network's."""
        ids, values = torch.arange(rows), list[Any]()
        try:
            for value in self._pass(tree_map(lambda x: x[ids % (len(x) or 1)], inputs)):
                values.append(value)
        except Exception as error:  # whatever a forward does with what it does not expect
            shapes = ", ".join(str(tuple(x.shape[1:])) for x in tree_leaves(inputs))
            unit = self.units[len(values) - 1]
            raise ValueError(
                f"inputs of shape {shapes} do not fit the model: unit {unit.name} says: "
                f"{(str(error).splitlines() or ['nothing'])[0]}"
            ) from None
        return values[:-1]

    def _pass(self, inputs: Any) -> Iterator[Any]:
        """The inputs of each unit in evaluation mode, then the network's outputs."""
        value: Any = tree_map(lambda x: x.to(self._device), inputs)
        with self.mode(training=False), torch.no_grad():
            for i, unit in enumerate(self.units):
                yield value
                for n, part in enumerate(unit.parts.values()):
                    value = call_network(part, value) if i == n == 0 else part(value)
        yield value

    def varying(self, others: Sequence[Any]) -> Blocks:
        """The same blocks after `with_bundles`, for inputs of other lengths, too.

        Those that the model does not take are no matter.
        """
        values: list[list[Any]] = [[] for _ in self.units]
        for inputs in others:
            with suppress(Exception):  # whatever a forward does with what it does not expect
                passed = self._pass(tree_map(lambda x: x[:2], inputs))
                for value, of_unit in zip(passed, values, strict=False):
                    of_unit.append(value)
        pairs = zip(self.units, values, strict=True)
        units = [replace(u, bundle=u.bundle and u.bundle.varying(each)) for u, each in pairs]
        return replace(self, units=units)

    def compute_outputs(self, inputs: Any) -> Any:
        """The network's outputs for a batch of inputs, in evaluation mode, on the CPU."""
        (out,) = deque(self._pass(inputs), maxlen=1)
        return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, out)

    @property
    def _device(self) -> torch.device:
        """The device of the model: a GPU, after a training there."""
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def cut_shapes(self, sample: Tensor) -> list[Shape]:
        """One sample's shape at every cut; `sample` is a batch (N, ...) of at least one."""
        return [tuple(x.shape[1:]) for x in self.cut_tensors(sample)]

    def cut_tensors(self, sample: Tensor) -> list[Tensor]:
        """One sample at every cut; `sample` is a batch (N, ...) of at least one."""
        tensors = [sample[:1]]
        modules = [self.module(index) for index in range(len(self) - 1)]
        with self.mode(training=False), torch.no_grad():
            for module in modules:
                tensors.append(module(tensors[-1]))
        return tensors[1:]

    def find_random_modules(self, sample: Tensor) -> list[dict[nn.Module, tuple[int, ...]]]:
        """For each block, the modules that draw random numbers in training, with numbers.

        The numbers distinguish their draws. They are that of the unit or, for a module that a graph
        calls, the places of the calls there; they do not depend on the cuts.
        """
        x = sample[:2]  # two, because BatchNorm needs more than one value for each channel
        modules = [self.module(index) for index in range(len(self))]
        numbers: list[dict[nn.Module, tuple[int, ...]]] = []
        with self.mode(training=True), torch.no_grad():
            for index, module in enumerate(modules):
                numbered = [p for p in module.children() if isinstance(p, NumberedDraws)]
                known: dict[nn.Module, tuple[int, ...]] = {}
                for i, unit in zip(self._places_of(index), self.units_of(index), strict=True):
                    for part in () if isinstance(unit, CallUnit) else unit.parts.values():
                        known[part] = (*known.get(part, ()), i)
                try:
                    draws, x = find_random_parts(module, known, x)
                except FAULTS as error:
                    raise ValueError(
                        f"block {index} fails on {len(x)} samples in training mode: "
                        f"{failure(error)}"
                    ) from error
                drawing = {part: known[part] for part in draws}
                numbers.append(drawing | {part: () for part in numbered if part.draws_numbers})
            for each, starts, _ in self._calls:
                each.check_numbers(starts)
        return numbers

    def _places_of(self, index: int) -> list[int]:
        """The places of a block's units among all, where a part that is cut inside counts once."""
        calls = [u.calls if isinstance(u, CallUnit) else None for u in self.units]
        new = (b is None or a is not b for a, b in pairwise([None, *calls]))
        places = [place - 1 for place in accumulate(new)]
        return places[self.starts[index] :][: len(self.units_of(index))]

    def sync_buffers(self, only: int | None = None) -> None:
        """Let the model have the buffers and attributes that passes of the blocks have put anew.

        `only` that block has been trained in this process; None: all.
        """
        for each, starts, first in self._calls:
            own = range(len(starts)) if only is None else [only - first]
            each.sync_buffers(starts, [s for k, s in enumerate(starts) if k in own])

    def shared_module(self, index: int) -> str:
        """Name a module with buffers that another block has, too; empty without one."""
        others = (self.module(k) for k in range(len(self)) if k != index)
        theirs = {id(part) for module in others for part in module.modules()}
        mine = self.module(index).named_modules()
        return next((name for name, part in mine if part._buffers and id(part) in theirs), "")

    def check_changed_buffers(self) -> None:
        """ValueError if a pass changes a buffer that several blocks use."""
        for each, starts, first in self._calls:
            each.check_changed(starts, first)

    @property
    def num_inputs(self) -> int:
        """How many tensors the network was cut with, as its inputs; 0: that does not matter."""
        whole = (calls for calls, _, _ in self._calls if calls.model is self.model)
        return next((len(calls.whole.inputs) for calls in whole), 0)

    @property
    def ties(self) -> dict[tuple[int, ...], list[list[str]]]:
        """Tied parameters by the blocks that have copies: all names of each."""
        each = (calls.tied(starts, first) for calls, starts, first in self._calls)
        return {blocks: names for ties in each for blocks, names in ties.items()}

    @property
    def _calls(self) -> list[tuple[Calls, list[int], int]]:
        """The recorded calls of each part that is cut between calls, where blocks start among its
        units, and the first block that has any of these.
        """
        firsts: dict[Calls, int] = {}
        for i, unit in enumerate(self.units):
            if isinstance(unit, CallUnit):
                firsts.setdefault(unit.calls, i)
        return [
            (
                calls,
                [0, *(start - i for start in self.starts if i < start < i + calls.count)],
                bisect_right(self.starts, i) - 1,
            )
            for calls, i in firsts.items()
        ]

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """`mode` of the model, and of the copies of it that units run."""
        with ExitStack() as stack:
            copies = [(n, calls.prefix) for calls, _, _ in self._calls for n in calls.networks()]
            for network, prefix in [(self.model, ""), *copies]:
                stack.enter_context(mode(network, training))
                if self.modes is not None:  # a copy is older than what the user has set
                    self.modes.apply(training, network, prefix)
            yield


def laid_out(x: Tensor) -> Tensor:
    """A tensor in the memory layout of training."""
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    # with a single channel, torch takes one layout for the other
    return torch.empty_like(x, memory_format=layout).copy_(x)
