"""A block's module in units, each with a separate backward pass and step."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.solvers.acting import Needs
from hybrid.solvers.block import Block
from hybrid.solvers.delayed.base import NOT_COMPILED, DelayedProgram
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.engine.policies import Stash
from hybrid.solvers.metrics import failure
from hybrid.solvers.micro_batches import MicroBatch
from hybrid.solvers.numerics.weights import NothingRecomputed
from hybrid.solvers.peers import statistics
from hybrid.solvers.state import State, Tensors
from hybrid.solvers.sync.reduction import pack, unpack
from hybrid.solvers.windows import LossAndMetric, PhaseStats
from hybrid_messages.by_unit.summed_steps import SummedSteps

NOT_FLOAT16 = Needs(
    "train.precision is not 'float16', whose loss scale may change between the steps of its units",
    lambda run: run.train.precision != "float16",
    "choose bfloat16",
)
BY_UNITS = (NOT_COMPILED, NOT_FLOAT16)
"""What a method needs whose units step one by one."""

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
    remaining = iter(grads)
    return [None if edge is None else next(remaining) for edge in inputs], [*remaining]


def with_strides_of(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory layout of another tensor of its shape, as autograd leaves a gradient."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


@dataclass
class UnitFlight(Flight):
    """A micro-batch whose backward pass goes through the block unit by unit."""

    item: int = 0
    """Its number since the last drain."""
    units_left: int = 0
    """Units whose backward pass is yet to come, counted from the first."""
    value: Any = None
    """The input of the next unit's forward pass."""
    input_edges: list[Edges] = field(default_factory=list)
    """Of the input of each unit, and of the loss."""
    output_edges: list[Edges] = field(default_factory=list)
    """Of the output of each unit."""
    versions: list[Tensors] = field(default_factory=list)
    """The version of each unit's weights that its forward pass used."""
    adjoint: list[Tensor | None] = field(default_factory=list)
    """Of the output of the next unit's backward pass; empty where it has not arrived."""


class CopyingStash(Stash):
    """Copies the weights for every forward pass, while a step may be changing them."""

    def newest_version(self) -> Tensors:
        return {name: nn.Parameter(p.detach().clone()) for name, p in self.trained.items()}


class Units:
    """Passes through a block by units: runs of its parts, each beginning with one with parameters.

    Parts that share a tensor are of one unit. Every graph is kept, over the versions of the weights
    that the forward passes used.
    """

    def __init__(
        self,
        block: Block,
        clip_norm: float,
        slices: Sequence[slice] | None = None,
        stash: type[Stash] = Stash,
        lag: int = 0,
    ) -> None:
        self.block, self.clip_norm, self.lag = block, clip_norm, lag
        self.slices = unit_slices(block.module) if slices is None else list(slices)
        self.parameters: list[dict[str, nn.Parameter]] = [
            {
                name: parameter
                for name, parameter in block.module.named_parameters()
                if int(name.partition(".")[0]) in range(parts.start, parts.stop)
            }
            for parts in self.slices
        ]
        self.stashes = [
            stash(block.module, weights, [str(i) for i in range(parts.start, parts.stop)])
            for weights, parts in zip(self.parameters, self.slices, strict=True)
        ]
        self.summed = SummedSteps(self.step, block, self.parameters)
        self._locks = [Lock() for _ in self.slices]
        """Within one a thread steps the weights of a unit."""
        self._looked = set[int]()
        """Units whose backward pass has been seen to make no part of the forward pass again."""

    @property
    def count(self) -> int:
        """M."""
        return len(self.slices)

    def new_flight(self, part: MicroBatch, lam: Tensor) -> UnitFlight:
        """A flight before its first unit; lam is a leaf."""
        return UnitFlight(
            part, lam, units_left=self.count, value=lam, input_edges=[gradient_edges(lam)]
        )

    def forward(self, flight: UnitFlight, unit: int) -> None:
        stash = self.stashes[unit]
        flight.versions.append(stash.newest_version())
        with stash.forward_pass(flight.buffers):
            self._compute(flight, unit)

    def repeat_forward(self, flight: UnitFlight, unit: int, weights: Tensors) -> None:
        """Run a unit's forward pass again, with weights that a checkpoint held."""
        stash = self.stashes[unit]
        shared = stash.parameters.keys() & weights.keys()
        flight.versions.append({name: weights[name] for name in shared})
        with stash.repeated_pass(flight.versions[-1], flight.buffers):
            self._compute(flight, unit)

    def _compute(self, flight: UnitFlight, unit: int) -> None:
        weights, parts = flight.versions[unit], self.slices[unit]
        value = self.block.forward(flight.value, flight.part.key, weights, parts)
        flight.output_edges.append(gradient_edges(value))
        # one of several tensors may pass a unit by and go into the next: its graph ends here
        flight.value = value if isinstance(value, Tensor) else tree_map(_cut, value)
        flight.input_edges.append(gradient_edges(flight.value))

    def compute_loss(self, flight: UnitFlight, labels: Tensor) -> LossAndMetric:
        """Loss and metric of the last unit's output, whose adjoint the flight then has.

        The loss is the part's term of the mean over this replica's samples.
        """
        result = self.block.compute_loss(flight.value, labels, flight.part.weight)
        loss = result.loss * flight.part.share
        flight.value = None
        flight.adjoint, _ = vjp([loss], [torch.ones_like(loss)], flight.input_edges[-1], [])
        return result._replace(loss=result.loss.detach() * flight.part.replica_share)

    def backward(self, flight: UnitFlight, unit: int) -> None:
        """The backward pass of a unit, and its step if the flight completes a mini-batch."""
        del flight.input_edges[unit + 1 :]
        version = flight.versions[unit]
        weights = {name: w for name, w in version.items() if w.requires_grad}
        # forward passes on another thread have replaced the parameters by theirs
        apart = isinstance(self.stashes[unit], CopyingStash)
        new = unit not in self._looked
        looks = NothingRecomputed("solver.any_order=false") if new else nullcontext()
        at_version = looks if apart else self.block.replaced(version)
        with self.block.span("backward", flight.part.key), at_version:
            p_in, gradients = vjp(
                flight.output_edges.pop(),
                flight.adjoint,
                flight.input_edges[-1],
                [*weights.values()],
            )
        self._looked.add(unit)
        separate = _separate_memory(dict(zip(weights, gradients, strict=True)), p_in)
        with self._locks[unit]:
            self.stashes[unit].release(flight.versions.pop(), flight.buffers)
            self._apply(flight, unit, separate)
        flight.adjoint, flight.units_left = p_in, unit

    def _apply(self, flight: UnitFlight, unit: int, gradients: Gradients) -> None:
        """Add gradients (by name); step if that was the mini-batch's last micro-batch.

        Replicas step `lag` ticks later, when the table says so.
        """
        self.add(unit, gradients)
        if not flight.part.is_last:
            return
        if self.block.sync is None:
            self.step(unit, flight.part.learning_rate)
            return
        self.summed.begin(unit, flight.item, flight.part.learning_rate)
        if not self.lag:
            self.summed.complete(unit)

    def add(self, unit: int, gradients: Gradients) -> None:
        """Add gradients, by name, to those of the unit's next step."""
        for name, g in gradients.items():
            parameter = self.parameters[unit][name]
            g = with_strides_of(g, parameter)
            parameter.grad = g if parameter.grad is None else parameter.grad + g

    def step(self, unit: int, rate: float) -> None:
        trained = [p for p in self.parameters[unit].values() if p.requires_grad]
        if trained:
            self.stashes[unit].before_step()
            self.block.step("local", rate, self.clip_norm, only=trained)

    def save(self, flight: UnitFlight, versions: dict[tuple[int, ...], Tensors]) -> None:
        """Put what the flight still needs where a checkpoint finds it.

        `versions` holds the weights that earlier flights have put there.
        """
        flight.stash = {"left": torch.tensor([flight.units_left, len(flight.adjoint)])}
        flight.stash |= {f"p {j}": p for j, p in enumerate(flight.adjoint) if p is not None}
        weights = {name: w for version in flight.versions for name, w in version.items()}
        flight.weights = versions.setdefault(tuple(map(id, flight.versions)), weights)

    def rebuild(self, flight: Flight) -> UnitFlight:
        """Restore a flight of a checkpoint for its backward pass."""
        rebuilt = self._without_graph(flight)
        for unit in range(rebuilt.units_left):
            self.repeat_forward(rebuilt, unit, flight.weights or {})
        rebuilt.value = None
        return rebuilt

    def _without_graph(self, flight: Flight) -> UnitFlight:
        """A flight of a checkpoint before its forward pass has been repeated."""
        assert flight.lam is not None
        rebuilt = self.new_flight(flight.part, flight.lam)
        rebuilt.units_left, tensors = flight.stash["left"].tolist()
        rebuilt.adjoint = [flight.stash.get(f"p {j}") for j in range(tensors)]
        rebuilt.buffers = flight.buffers
        return rebuilt


class UnitProgram(DelayedProgram):
    """A program whose passes go through a block unit by unit.

    A unit's step need not wait for the backward pass of the whole block.
    """

    units: Units
    apart: ClassVar[bool] = False  # a unit's graph ends in one tensor

    def forward_units(self, flight: UnitFlight) -> None:
        for unit in range(self.units.count):
            self.units.forward(flight, unit)

    def backward_units(self, flight: UnitFlight) -> None:
        """The backward passes of the units that are left, from the last one on."""
        for unit in reversed(range(flight.units_left)):
            self.backward_unit(flight, unit)

    def drain(self) -> PhaseStats:
        for flight in self.unit_flights.values():
            self.backward_units(flight)
        self.units.summed.complete_all()
        if self._ticks and self.block.sync is not None and self.setup.replicas > 1:
            running = statistics(self.block.module)
            terms = pack([x * self.block.sync.share for x in running])
            unpack(self.block.sync.total(terms), running)
        self._flights, self._ticks = {}, 0
        self.links.flush()
        return PhaseStats()

    def backward_unit(self, flight: UnitFlight, unit: int) -> None:
        """The backward pass of a unit; the first one's ends with a message down."""
        self.units.backward(flight, unit)
        if unit == 0 and not self.block.first:
            lam, (p_in,) = flight.lam, flight.adjoint
            assert lam is not None
            if self.block.sends_adjoint:
                p_in = torch.zeros_like(lam) if p_in is None else with_strides_of(p_in, lam)
            self._send_adjoint(p_in, flight)

    @property
    def unit_flights(self) -> dict[int, UnitFlight]:
        """What is under way, oldest first."""
        return {n: flight for n, flight in self._flights.items() if isinstance(flight, UnitFlight)}

    def state(self) -> State:
        versions: dict[tuple[int, ...], Tensors] = {}
        for flight in self.unit_flights.values():
            self.units.save(flight, versions)
        state = super().state()
        state.flight |= self.units.summed.state()
        return state

    def load_state(self, state: State) -> None:
        self.units.summed.load_state(state.flight)
        super().load_state(state)

    def _restored(self, flight: Flight) -> Flight:
        return self.units.rebuild(flight)


def unit_slices(module: nn.Module) -> list[slice]:
    """The units among a module's parts."""
    parts = [*module._modules.values()]
    tensors = [[] if part is None else [*part.parameters(), *part.buffers()] for part in parts]
    weighty = [
        i for i, held in enumerate(tensors) if any(isinstance(t, nn.Parameter) for t in held)
    ]
    begins, first = {0, *weighty[1:]}, dict[int, int]()
    for i, held in enumerate(tensors):
        for tensor in held:
            begins -= {*range(first.setdefault(id(tensor), i) + 1, i + 1)}
    starts = sorted(begins)
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(parts)], strict=True)]


def _separate_memory(
    gradients: dict[str, Tensor | None], p_in: Sequence[Tensor | None]
) -> Gradients:
    """The gradients that exist, each in separate memory: a step may write to it."""
    seen = {p.untyped_storage().data_ptr() for p in p_in if p is not None}
    separate: Gradients = {}
    for name, g in gradients.items():
        if g is not None:
            address = g.untyped_storage().data_ptr()
            separate[name] = g.clone() if address in seen else g
            seen.add(address)
    return separate


def _cut(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x
