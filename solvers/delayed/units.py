"""A block's module in units, each of which comes home and steps by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from solvers.blocks.asking import failure
from solvers.blocks.block import Block
from solvers.blocks.buffers import captured_buffers, frozen_statistics, has_others, standing_in
from solvers.delayed.base import Flight
from solvers.exact.micro_batches import MicroBatch
from solvers.state import Tensors, entries
from solvers.windows import Classified

Turn = AbstractContextManager[Any]
"""Within it a thread may read and step the weights of a unit."""

Gradients = dict[str, Tensor]

Edges = list[GradientEdge | None]
"""Where the adjoints of a value's tensors go, in order; None: nowhere."""


@dataclass
class UnitFlight(Flight):
    """A micro-batch that comes home unit by unit."""

    left: int = 0
    """Units that have yet to come home: the first so many."""
    value: Any = None
    """What the next unit is given, on the way up."""
    ins: list[Edges] = field(default_factory=list)
    """Of what goes into each unit, and into the loss."""
    outs: list[Edges] = field(default_factory=list)
    """Of what comes out of each unit, if its graph is kept."""
    inputs: list[Tensor] = field(default_factory=list)
    """What goes into each unit, if that is needed again."""
    versions: list[Tensors] = field(default_factory=list)
    """The version of each unit's weights that it met, if that is needed again."""
    buffers: Tensors = field(default_factory=dict)
    """Those that its units have moved, as they met them, but for BatchNorm's."""
    adjoint: list[Tensor | None] = field(default_factory=list)
    """Of the tensors that come out of the last unit to come home; empty: not there yet."""


class Units(ABC):
    """Passes of a block by units: runs of its parts, each beginning with one that has parameters.

    Parts that share a tensor are of one unit.
    """

    def __init__(
        self, block: Block, clip_norm: float, slices: Sequence[slice] | None = None
    ) -> None:
        self.block, self.clip_norm = block, clip_norm
        self.slices = runs(block.module) if slices is None else list(slices)
        self.parameters: list[dict[str, nn.Parameter]] = [
            {
                name: parameter
                for name, parameter in block.module.named_parameters()
                if int(name.partition(".")[0]) in range(some.start, some.stop)
            }
            for some in self.slices
        ]

    @property
    def count(self) -> int:
        """M."""
        return len(self.slices)

    def begin(self, part: MicroBatch, lam: Tensor) -> UnitFlight:
        """A flight before its first unit; lam is a leaf."""
        return UnitFlight(part, lam, left=self.count, value=lam, ins=[_edges(lam)])

    @abstractmethod
    def up(self, flight: UnitFlight, unit: int, turn: Turn) -> None:
        """The forward pass of a unit."""

    @abstractmethod
    def classify(self, flight: UnitFlight, labels: Tensor) -> Classified:
        """Loss and metric of what has come out of the last unit, and its adjoint."""

    @abstractmethod
    def down(self, flight: UnitFlight, unit: int, rate: float, turn: Turn) -> None:
        """The backward pass of a unit, and its step if the flight ends a mini-batch."""

    @abstractmethod
    def keep(self, flight: UnitFlight, known: dict[tuple[int, ...], Tensors]) -> None:
        """Put what the flight still needs where a checkpoint takes it; `known`: weights so far."""

    @abstractmethod
    def again(self, flight: Flight) -> UnitFlight:
        """A flight as a checkpoint has kept it."""

    def _land(self, flight: UnitFlight, unit: int, gradients: Gradients, rate: float) -> None:
        """Add gradients (by name); step if that was the mini-batch's last micro-batch."""
        self._add(unit, gradients)
        if flight.part.ends:
            self._step(unit, rate)

    def _add(self, unit: int, gradients: Gradients) -> None:
        for name, g in gradients.items():
            parameter = self.parameters[unit][name]
            g = laid_out(g, parameter)
            parameter.grad = g if parameter.grad is None else parameter.grad + g

    def _step(self, unit: int, rate: float) -> None:
        trained = [p for p in self.parameters[unit].values() if p.requires_grad]
        if trained:
            self._set_apart(unit)
            self.block.step("local", rate, self.clip_norm, only=trained)

    def _set_apart(self, unit: int) -> None:  # noqa: B027
        """Leave the unit's weights to the flights that have met them, if any: they will move."""

    def _kept(self, flight: UnitFlight) -> Tensors:
        found = {"left": torch.tensor([flight.left, len(flight.adjoint)])}
        return found | {f"p {j}": p for j, p in enumerate(flight.adjoint) if p is not None}

    def _given_back(self, flight: Flight) -> UnitFlight:
        """A flight without its graph or its inputs."""
        assert flight.lam is not None
        made, stash = self.begin(flight.part, flight.lam), flight.stash
        made.left, tensors = stash["left"].tolist()
        made.adjoint = [stash.get(f"p {j}") for j in range(tensors)]
        made.buffers = entries(stash, "buffer ")
        return made


class Stashed(Units):
    """Keeps every graph, over the versions of the weights that it met."""

    def __init__(
        self, block: Block, clip_norm: float, slices: Sequence[slice] | None = None
    ) -> None:
        super().__init__(block, clip_norm, slices)
        self._newest: list[Tensors] = [{} for _ in self.slices]
        self._buffered = has_others(block.module.modules())
        self._open: list[dict[int, UnitFlight]] = [{} for _ in self.slices]
        """Flights that have yet to come home to each unit, where there are buffers to keep."""
        self._holders = [0] * self.count
        """Flights that have met the newest weights of each unit, and will need them."""

    def up(self, flight: UnitFlight, unit: int, turn: Turn) -> None:
        with turn:
            flight.versions.append(self._version(unit))
        if not self._buffered:
            self._run(flight, unit)
            return
        own = self.slices[unit]
        parts = [str(part) for part in range(own.start, own.stop)]
        with captured_buffers(self.block.module, first=parts) as moved:
            self._run(flight, unit)
        self._opened(flight, unit)
        for earlier in self._open[unit].values():  # what moves now they have met as it was
            earlier.buffers = moved | earlier.buffers

    def _opened(self, flight: UnitFlight, unit: int) -> None:
        if self._buffered:
            self._open[unit][id(flight)] = flight

    def _run(self, flight: UnitFlight, unit: int) -> None:
        weights, parts = flight.versions[unit], self.slices[unit]
        value = self.block.forward(flight.value, flight.part.key, weights, parts)
        flight.outs.append(_edges(value))
        # of several tensors one may go by and into another: their graphs end here
        flight.value = value if isinstance(value, Tensor) else tree_map(_cut, value)
        flight.ins.append(_edges(flight.value))

    def _version(self, unit: int) -> Tensors:
        """The weights as they are, in the parameters' own memory, to be differentiated by."""
        own, newest = self.parameters[unit], self._newest[unit]
        if any(n not in newest or newest[n].data_ptr() != p.data_ptr() for n, p in own.items()):
            # .data has a count of its own of changes in place: autograd would take a step for one
            newest = {name: p.data.requires_grad_(p.requires_grad) for name, p in own.items()}
            self._newest[unit], self._holders[unit] = newest, 0
        self._holders[unit] += 1
        return newest

    def classify(self, flight: UnitFlight, labels: Tensor) -> Classified:
        found = self.block.classify(flight.value, labels)
        loss = found.loss * flight.part.share
        flight.value = None
        flight.adjoint, _ = _vjp([loss], [torch.ones_like(loss)], flight.ins[-1], [])
        return found._replace(loss=loss.detach())

    def down(self, flight: UnitFlight, unit: int, rate: float, turn: Turn) -> None:
        del flight.ins[unit + 1 :]
        self._open[unit].pop(id(flight), None)
        out, weights = flight.outs.pop(), flight.versions[unit]
        trained = {name: w for name, w in weights.items() if w.requires_grad}
        with self.block.span("backward", flight.part.key):
            p_in, found = _vjp(out, flight.adjoint, flight.ins[-1], [*trained.values()])
        gradients = _apart(dict(zip(trained, found, strict=True)), p_in)
        with turn:
            if flight.versions.pop() is self._newest[unit]:
                self._holders[unit] -= 1
            self._land(flight, unit, gradients, rate)
        flight.adjoint, flight.left = p_in, unit

    def _set_apart(self, unit: int) -> None:
        if self._holders[unit]:
            for parameter in self.parameters[unit].values():
                parameter.data = parameter.data.clone()
        self._newest[unit], self._holders[unit] = {}, 0

    def keep(self, flight: UnitFlight, known: dict[tuple[int, ...], Tensors]) -> None:
        flight.stash = self._kept(flight)
        flight.stash |= {f"buffer {name}": b for name, b in flight.buffers.items()}
        weights = {name: w for version in flight.versions for name, w in version.items()}
        flight.weights = known.setdefault(tuple(map(id, flight.versions)), weights)

    def again(self, flight: Flight) -> UnitFlight:
        made, weights = self._given_back(flight), flight.weights or {}
        module = self.block.module
        with frozen_statistics(module), standing_in(module, made.buffers):
            for unit in range(made.left):
                own = self.parameters[unit]
                made.versions.append(
                    {n: weights[n].requires_grad_(own[n].requires_grad) for n in own}
                )
                self._run(made, unit)
                self._opened(made, unit)
        made.value = None
        return made


class Copied(Stashed):
    """Keeps every graph over a copy of the weights, which may move while they are copied."""

    def _version(self, unit: int) -> Tensors:
        own = self.parameters[unit]
        return {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in own.items()}


class Recomputed(Units):
    """Keeps what went into the units, and runs them again with the weights they have by then."""

    def __init__(
        self, block: Block, clip_norm: float, slices: Sequence[slice] | None = None
    ) -> None:
        super().__init__(block, clip_norm, slices)
        self._parts = [
            nn.ModuleList([*block.module._modules.values()][some])  # type: ignore[arg-type]
            for some in self.slices
        ]
        self._writes: dict[int, bool] = {}
        """Whether a unit changes its input in place."""

    def up(self, flight: UnitFlight, unit: int, turn: Turn) -> None:
        x = flight.value
        if not isinstance(x, Tensor):
            raise ValueError(
                f"solver.weights is 'current', which runs a unit again on the one tensor that it "
                f"was given, but unit {unit} of block {self.block.index} is given a "
                f"{type(x).__name__}: choose stashed"
            )
        flight.inputs.append(x)
        given = x.clone() if self._writes.get(unit, True) else x
        with turn, torch.no_grad():
            key, parts = flight.part.key, self.slices[unit]
            flight.value = self.block.forward(given, key, parts=parts)
        self._writes.setdefault(unit, given is not x and given._version > 0)

    def classify(self, flight: UnitFlight, labels: Tensor) -> Classified:
        out, flight.value = tree_map(_leaf, flight.value), None
        found = self.block.classify(out, labels)
        loss = found.loss * flight.part.share
        flight.adjoint, _ = _vjp([loss], [torch.ones_like(loss)], _edges(out), [])
        return found._replace(loss=loss.detach())

    def down(self, flight: UnitFlight, unit: int, rate: float, turn: Turn) -> None:
        x = flight.inputs.pop().detach()
        x = x if self.block.first and unit == 0 else _leaf(x)
        key, parts, own = flight.part.key, self.slices[unit], self.parameters[unit]
        with turn:
            with frozen_statistics(self._parts[unit]):
                given = x.clone() if self._writes.get(unit, True) else x
                out = self.block.forward(given, key, parts=parts)
            trained = {name: p for name, p in own.items() if p.requires_grad}
            with self.block.span("backward", key):
                p_in, found = _vjp(_edges(out), flight.adjoint, _edges(x), [*trained.values()])
            gradients = _apart(dict(zip(trained, found, strict=True)), p_in)
            self._land(flight, unit, gradients, rate)
        flight.adjoint, flight.left = p_in, unit

    def keep(self, flight: UnitFlight, known: dict[tuple[int, ...], Tensors]) -> None:
        inputs = {f"input {unit:04d}": x for unit, x in enumerate(flight.inputs)}
        flight.stash = self._kept(flight) | inputs

    def again(self, flight: Flight) -> UnitFlight:
        made = self._given_back(flight)
        made.inputs, made.value = [*entries(flight.stash, "input ").values()], None
        return made


def runs(module: nn.Module) -> list[slice]:
    """The units among a module's parts."""
    parts = [*module._modules.values()]
    tensors = [[] if part is None else [*part.parameters(), *part.buffers()] for part in parts]
    weighty = [i for i, own in enumerate(tensors) if any(isinstance(t, nn.Parameter) for t in own)]
    begins, first = {0, *weighty[1:]}, dict[int, int]()
    for i, own in enumerate(tensors):
        for tensor in own:
            begins -= {*range(first.setdefault(id(tensor), i) + 1, i + 1)}
    starts = sorted(begins)
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(parts)], strict=True)]


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """With the strides of another tensor of its shape, as autograd leaves a gradient."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def _edges(value: Any) -> Edges:
    return [
        get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else None
        for x in tree_leaves(value)
    ]


def _vjp(
    out: Edges | list[Tensor],
    p_out: Sequence[Tensor | None],
    inputs: Edges,
    weights: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Adjoints of the inputs and gradients of the weights; None where nothing comes."""
    pairs = [(o, p) for o, p in zip(out, p_out, strict=True) if o is not None and p is not None]
    wanted = [edge for edge in inputs if edge is not None]
    pairs = [(o, p) for o, p in pairs if not isinstance(o, Tensor) or o.requires_grad]
    if not pairs or not (wanted or weights):
        return [None] * len(inputs), [None] * len(weights)
    outputs, adjoints = zip(*pairs, strict=True)
    try:
        grads = torch.autograd.grad(outputs, [*wanted, *weights], adjoints, allow_unused=True)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(f"the backward pass fails: {failure(error)}") from error
    found = iter(grads)
    return [None if edge is None else next(found) for edge in inputs], [*found]


def _apart(gradients: dict[str, Tensor | None], p_in: Sequence[Tensor | None]) -> Gradients:
    """Those that there are, in memory of their own: a step may write to them."""
    seen = {p.untyped_storage().data_ptr() for p in p_in if p is not None}
    found: Gradients = {}
    for name, g in gradients.items():
        if g is not None:
            place = g.untyped_storage().data_ptr()
            found[name] = g.clone() if place in seen else g
            seen.add(place)
    return found


def _cut(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x


def _leaf(x: Any) -> Any:
    grows = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().requires_grad_() if grows else x
