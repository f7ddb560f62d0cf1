"""A block's module in units, each of which has its own backward pass and its own step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.solvers.base import GraphBytes
from hybrid.solvers.block import Block
from hybrid.solvers.delayed.base import tensor_bytes
from hybrid.solvers.delayed.stash import Flight, Stash
from hybrid.solvers.exact.pipeline import MicroBatch
from hybrid.solvers.layers.residual import nothing_left_out
from hybrid.solvers.metrics import failure
from hybrid.solvers.numerics.buffers import frozen_statistics
from hybrid.solvers.state import Tensors, entries
from hybrid.solvers.windows import Classified

Gradients = dict[str, Tensor]

Edges = list[GradientEdge | None]
"""Where the adjoints of a value's tensors go in its graph, in order; None: nowhere."""


def gradient_edges(value: Any) -> Edges:
    """The edges of a tensor, or of the tensors in a tuple, list or dict."""
    return [
        get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else None
        for x in tree_leaves(value)
    ]


def vjp(
    out: Edges | list[Tensor],
    p_out: Sequence[Tensor | None],
    inputs: Edges,
    weights: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Adjoints of the inputs and gradients of the weights; None where nothing depends on them."""
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


def separate_memory(
    gradients: dict[str, Tensor | None], p_in: Sequence[Tensor | None]
) -> Gradients:
    """The gradients that there are, each in memory of its own: a step may write to it."""
    seen = {p.untyped_storage().data_ptr() for p in p_in if p is not None}
    found: Gradients = {}
    for name, g in gradients.items():
        if g is not None:
            address = g.untyped_storage().data_ptr()
            found[name] = g.clone() if address in seen else g
            seen.add(address)
    return found


def with_strides_of(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory layout of another tensor of its shape, as autograd leaves a gradient."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def detached_leaf(x: Any) -> Any:
    """A floating-point tensor as a leaf that gets a gradient; anything else as it is."""
    grows = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().requires_grad_() if grows else x


UnitLock = AbstractContextManager[Any]
"""Within it a thread may read and step the weights of a unit."""


@dataclass
class UnitFlight(Flight):
    """A micro-batch whose backward pass goes through the block unit by unit."""

    units_left: int = 0
    """Units whose backward pass is yet to come: the first so many."""
    value: Any = None
    """The input of the next unit's forward pass."""
    input_edges: list[Edges] = field(default_factory=list)
    """Of the input of each unit, and of the loss."""
    output_edges: list[Edges] = field(default_factory=list)
    """Of the output of each unit, if its graph is kept."""
    inputs: list[Tensor] = field(default_factory=list)
    """The input of each unit, if its forward pass is run again."""
    versions: list[Tensors] = field(default_factory=list)
    """The version of each unit's weights that its forward pass used, if it is stashed."""
    adjoint: list[Tensor | None] = field(default_factory=list)
    """Of the output of the next unit's backward pass; empty where it has not arrived."""


class Units(ABC):
    """Passes through a block by units: runs of its parts, each beginning with one with parameters.

    Parts that share a tensor are of one unit.
    """

    def __init__(
        self, block: Block, clip_norm: float, slices: Sequence[slice] | None = None
    ) -> None:
        self.block, self.clip_norm = block, clip_norm
        self.slices = unit_slices(block.module) if slices is None else list(slices)
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

    def new_flight(self, part: MicroBatch, lam: Tensor) -> UnitFlight:
        """A flight before its first unit; lam is a leaf."""
        return UnitFlight(
            part, lam, units_left=self.count, value=lam, input_edges=[gradient_edges(lam)]
        )

    @abstractmethod
    def forward(self, flight: UnitFlight, unit: int, lock: UnitLock) -> None:
        """The forward pass of a unit."""

    @abstractmethod
    def backward(self, flight: UnitFlight, unit: int, rate: float, lock: UnitLock) -> None:
        """The backward pass of a unit, and its step if the flight completes a mini-batch."""

    def classify(self, flight: UnitFlight, labels: Tensor) -> Classified:
        """Loss and metric of the last unit's output, whose adjoint the flight then has."""
        out, into = self._loss_input(flight)
        found = self.block.classify(out, labels, flight.part.weight)
        loss = found.loss * flight.part.share
        flight.value = None
        flight.adjoint, _ = vjp([loss], [torch.ones_like(loss)], into, [])
        return found._replace(loss=loss.detach())

    @abstractmethod
    def _loss_input(self, flight: UnitFlight) -> tuple[Any, Edges]:
        """The last unit's output, and its edges in the graph of the loss."""

    def save(self, flight: UnitFlight, known: dict[tuple[int, ...], Tensors]) -> None:
        """Put what the flight still needs where a checkpoint finds it.

        `known` holds the weights that earlier flights have put there.
        """
        found = {"left": torch.tensor([flight.units_left, len(flight.adjoint)])}
        found |= {f"p {j}": p for j, p in enumerate(flight.adjoint) if p is not None}
        flight.stash = found

    @abstractmethod
    def rebuild(self, flight: Flight) -> UnitFlight:
        """A flight of a checkpoint, made ready for its backward pass."""

    def _from_checkpoint(self, flight: Flight) -> UnitFlight:
        """The same without its graph or its inputs."""
        assert flight.lam is not None
        made, stash = self.new_flight(flight.part, flight.lam), flight.stash
        made.units_left, tensors = stash["left"].tolist()
        made.adjoint = [stash.get(f"p {j}") for j in range(tensors)]
        made.buffers = flight.buffers
        return made

    def _differentiate(
        self, flight: UnitFlight, out: Edges, into: Edges, weights: Tensors
    ) -> tuple[list[Tensor | None], Gradients]:
        """The adjoints of a unit's input, and the gradients of its weights by name."""
        trained = {name: w for name, w in weights.items() if w.requires_grad}
        with self.block.span("backward", flight.part.key):
            p_in, found = vjp(out, flight.adjoint, into, [*trained.values()])
        return p_in, separate_memory(dict(zip(trained, found, strict=True)), p_in)

    def _apply(self, flight: UnitFlight, unit: int, gradients: Gradients, rate: float) -> None:
        """Add gradients (by name); step if that was the mini-batch's last micro-batch."""
        self._add(unit, gradients)
        if flight.part.is_last:
            self._step(unit, rate)

    def _add(self, unit: int, gradients: Gradients) -> None:
        for name, g in gradients.items():
            parameter = self.parameters[unit][name]
            g = with_strides_of(g, parameter)
            parameter.grad = g if parameter.grad is None else parameter.grad + g

    def _step(self, unit: int, rate: float) -> None:
        trained = [p for p in self.parameters[unit].values() if p.requires_grad]
        if trained:
            self._before_step(unit)
            self.block.step("local", rate, self.clip_norm, only=trained)

    def _before_step(self, unit: int) -> None:  # noqa: B027
        """The unit's weights are about to change."""


class Stashed(Units):
    """Keeps every graph, over the versions of the weights that the forward passes used."""

    def __init__(
        self,
        block: Block,
        clip_norm: float,
        slices: Sequence[slice] | None = None,
        stash: type[Stash] = Stash,
    ) -> None:
        super().__init__(block, clip_norm, slices)
        self.stashes = [
            stash(block.module, own, [str(i) for i in range(some.start, some.stop)])
            for own, some in zip(self.parameters, self.slices, strict=True)
        ]

    def forward(self, flight: UnitFlight, unit: int, lock: UnitLock) -> None:
        stash = self.stashes[unit]
        with lock:
            flight.versions.append(stash.newest_version())
        with stash.forward_pass(flight.buffers):
            self._compute(flight, unit)

    def _compute(self, flight: UnitFlight, unit: int) -> None:
        weights, parts = flight.versions[unit], self.slices[unit]
        value = self.block.forward(flight.value, flight.part.key, weights, parts)
        flight.output_edges.append(gradient_edges(value))
        # one of several tensors may pass a unit by and go into the next: its graph ends here
        flight.value = value if isinstance(value, Tensor) else tree_map(_cut, value)
        flight.input_edges.append(gradient_edges(flight.value))

    def backward(self, flight: UnitFlight, unit: int, rate: float, lock: UnitLock) -> None:
        del flight.input_edges[unit + 1 :]
        out, into = flight.output_edges.pop(), flight.input_edges[-1]
        p_in, gradients = self._differentiate(flight, out, into, flight.versions[unit])
        with lock:
            self.stashes[unit].release(flight.versions.pop(), flight.buffers)
            self._apply(flight, unit, gradients, rate)
        flight.adjoint, flight.units_left = p_in, unit

    def _loss_input(self, flight: UnitFlight) -> tuple[Any, Edges]:
        return flight.value, flight.input_edges[-1]

    def _before_step(self, unit: int) -> None:
        self.stashes[unit].before_step()

    def save(self, flight: UnitFlight, known: dict[tuple[int, ...], Tensors]) -> None:
        super().save(flight, known)
        weights = {name: w for version in flight.versions for name, w in version.items()}
        flight.weights = known.setdefault(tuple(map(id, flight.versions)), weights)

    def rebuild(self, flight: Flight) -> UnitFlight:
        made = self._from_checkpoint(flight)
        for unit in range(made.units_left):
            self._repeat_forward(made, unit, flight.weights or {})
        made.value = None
        return made

    def _repeat_forward(self, flight: UnitFlight, unit: int, weights: Tensors) -> None:
        """Run a unit's forward pass again, with weights that a checkpoint held."""
        stash = self.stashes[unit]
        flight.versions.append({name: weights[name] for name in stash.parameters})
        with stash.repeated_pass(flight.versions[-1], flight.buffers):
            self._compute(flight, unit)


class Recomputed(Units):
    """Keeps the inputs of the units, and runs them again with their newest weights."""

    def __init__(
        self, block: Block, clip_norm: float, slices: Sequence[slice] | None = None
    ) -> None:
        super().__init__(block, clip_norm, slices)
        self._modules = [
            nn.ModuleList([*block.module._modules.values()][some])  # type: ignore[arg-type]
            for some in self.slices
        ]
        self._writes: dict[int, bool] = {}
        """Whether a unit changes its input in place."""

    def forward(self, flight: UnitFlight, unit: int, lock: UnitLock) -> None:
        x = flight.value
        if not isinstance(x, Tensor):
            raise ValueError(
                f"solver.weights is 'current', which runs a unit again on the one tensor that it "
                f"was given, but unit {unit} of block {self.block.index} is given a "
                f"{type(x).__name__}: choose stashed"
            )
        flight.inputs.append(x)
        given = x.clone() if self._writes.get(unit, True) else x
        with lock, torch.no_grad():
            key, parts = flight.part.key, self.slices[unit]
            flight.value = self.block.forward(given, key, parts=parts)
        self._writes.setdefault(unit, given is not x and given._version > 0)

    def backward(self, flight: UnitFlight, unit: int, rate: float, lock: UnitLock) -> None:
        x = flight.inputs.pop().detach()
        x = x if self.block.first and unit == 0 else detached_leaf(x)
        with lock:
            with frozen_statistics(self._modules[unit]):
                given = x.clone() if self._writes.get(unit, True) else x
                out = self.block.forward(given, flight.part.key, parts=self.slices[unit])
            weights: Tensors = {**self.parameters[unit]}
            p_in, gradients = self._differentiate(
                flight, gradient_edges(out), gradient_edges(x), weights
            )
            self._apply(flight, unit, gradients, rate)
        flight.adjoint, flight.units_left = p_in, unit

    def _loss_input(self, flight: UnitFlight) -> tuple[Any, Edges]:
        out = tree_map(detached_leaf, flight.value)
        return out, gradient_edges(out)

    def save(self, flight: UnitFlight, known: dict[tuple[int, ...], Tensors]) -> None:
        super().save(flight, known)
        flight.stash |= {f"input {unit:04d}": x for unit, x in enumerate(flight.inputs)}

    def rebuild(self, flight: Flight) -> UnitFlight:
        made = self._from_checkpoint(flight)
        made.inputs, made.value = [*entries(flight.stash, "input ").values()], None
        return made


def unit_slices(module: nn.Module) -> list[slice]:
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


class UnitMemory(NamedTuple):
    """Bytes that one unit needs for a micro-batch, and for its weights."""

    graph: int
    """What autograd keeps of its forward pass."""
    input: int
    weights: int


def unit_memories(
    module: nn.Module, slices: Sequence[slice], x: Tensor, graph: GraphBytes
) -> Iterator[UnitMemory]:
    """The memory of each unit of a block, for the block's input x."""
    parts = [*module._modules.values()]  # children() leaves out the second use of a module
    with torch.no_grad(), frozen_statistics(module), nothing_left_out():
        for some in slices:
            unit = nn.Sequential(*(part for part in parts[some] if part is not None))
            yield UnitMemory(graph(unit, x), tensor_bytes([x]), tensor_bytes(unit.parameters()))
            x = unit(x).detach().requires_grad_()


def _cut(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x
