"""A stretch of a network's pass as a module: its own code, without what other blocks compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from hybrid.networks.absent import (
    METADATA,
    Absent,
    AbsentError,
    absent_like,
    call_on_absent,
    writes,
)
from hybrid.networks.boundaries import Crossing
from hybrid.networks.passes import (
    CallId,
    Frame,
    Key,
    Network,
    Pass,
    in_function,
    in_reentrant_checkpoint,
    watched,
)
from hybrid.networks.recording import INPUT, SAMPLES, Shapes, shapes_by_rows
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.numerics.draws import NumberedDraws

MOST_DRAWS = 1 << 12
"""Random operations in the code of one call."""


class _Reached(BaseException):
    """The pass has come to the end of its stretch."""


@dataclass(frozen=True)
class Inputs:
    """How a network takes its inputs."""

    structure: TreeSpec
    shapes: tuple[torch.Size, ...]
    """Of one sample."""
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, value: Any) -> Inputs:
        leaves, structure = tree_flatten(value)
        return cls(structure, tuple(x.shape[1:] for x in leaves), tuple(x.dtype for x in leaves))

    def __deepcopy__(self, memo: dict[int, Any]) -> Inputs:
        return self  # it is immutable

    def ordered(self, named: dict[str, Any]) -> dict[str, Any]:
        """Inputs by name in the order in which they are numbered."""
        names = tree_unflatten(range(len(self.shapes)), self.structure)
        return {name: named[name] for name in names} if isinstance(names, dict) else named


@dataclass(frozen=True)
class Code:
    """What is known of a network's pass, whatever stretch of it is run."""

    inputs: Inputs
    own: Mapping[CallId, tuple[Shapes, list[Any], TreeSpec]]
    """Calls of which only shapes are needed where another block makes them, and for `SAMPLES`
    samples: the shapes that they take, what they give, on the meta device, and its structure."""
    random: Mapping[CallId, tuple[int, frozenset[Any]]]
    """The operations that draw random numbers in the code of calls that may be cut, and a number
    of each such call."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return self  # it is immutable


class Stretch(NumberedDraws):
    """Runs a network from one boundary to another, by the network's own forward.

    Before the start a call of a module with parameters is not made: it gives tensors that have a
    shape alone (`Absent`), and what is computed of these has no numbers either. Masks, positions
    and whatever else depends on integers alone are made again. At the start what has crossed it
    takes the place of absent tensors; from there on the code runs as ever, until it calls the
    module behind the end.

    The modules and tensors of the stretch have the names that they have in the network.
    """

    def __init__(
        self,
        network: Network,
        code: Code,
        start: Crossing | None,
        end: Crossing | None,
        numbers: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.network, self.code, self.start, self.end = network, code, start, end
        self.numbers = numbers
        """Of the calls, within it, of each module that draws random numbers."""
        around = [each.contexts for each in (start, end) if each is not None]
        drawing = {call[:n] for call in code.random for n in range(1, len(call) + 1)}
        self.contexts = frozenset[CallId](drawing).union(*around)
        """The calls that are watched: the others are made whole, or not at all."""
        self.templates: dict[Any, Any] = {}
        """What calls and operations on absent tensors give, by the shapes that they are given."""
        self.draws_numbers = bool(numbers or code.random)
        whole = network.copy
        self._modules, self._parameters = whole._modules, whole._parameters
        self._buffers = whole._buffers
        self._non_persistent_buffers_set = whole._non_persistent_buffers_set

    @property
    def runs(self) -> nn.Module:  # type: ignore[override]
        return self.network.copy

    @property
    def training(self) -> bool:
        """The mode of the network's outermost module, which is none of this module's modules."""
        return self.network.copy.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "network" in vars(self):
            self.network.copy.training = mode

    def train(self, mode: bool = True) -> Stretch:
        """Training or evaluation mode, as the network sets it."""
        self.network.copy.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's outputs, or what crosses the end, for its inputs or what crosses the start.

        What crosses is one tensor or a tuple of several; of the inputs all that are integers and
        needed behind the cut come last. Raises AbsentError, a ValueError, where the network's own
        code needs what it cannot have.
        """
        run = _Run(self, args, self.code.inputs.ordered(kwargs) if kwargs else {})
        with watched(run), run:
            try:
                if self.start is None:
                    out = self.network.copy(*args, **kwargs)
                else:
                    out = call_network(self.network.copy, run.inputs)
            except _Reached:
                return run.leaving()
        if self.end is not None:
            raise AbsentError(
                f"the pass ends before {self.end.call[-1][0]} is called: if it is left out of some "
                "passes at random (layerdrop), switch that off, or cut elsewhere"
            )
        return tree_map(_plain, out)


class _Run(Pass):
    """One pass of a stretch."""

    def __init__(self, stretch: Stretch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(stretch.network)
        self.stretch, self.start, self.end = stretch, stretch.start, stretch.end
        self.captured: dict[Key, Tensor] = {}
        """What leaves the stretch, as far as it has come to be."""
        self.present: dict[int, tuple[Tensor, Tensor]] = {}
        """A tensor that was written to, or is given by a torch.autograd.Function, by its identity,
        and what has taken its place."""
        self.begun = self.start is None
        self._has_graph = torch.is_grad_enabled()
        self._skipping = False
        self._draws = Counter[CallId]()
        """Random operations in the code of calls so far."""
        self._calls = Counter[str]()
        """Calls so far of modules that draw."""
        if self.start is None:
            given = tree_leaves(args[0] if len(args) == 1 and not kwargs else args or kwargs)
            self.entering: dict[Key, Tensor] = {}
            self.leaves = [x for x in given if isinstance(x, Tensor)]
        else:
            self._enter(self.start, args[0])
        for i, x in enumerate(self.leaves):
            if x.is_floating_point():
                self.leaves[i] = self.tensor(x, Key((), INPUT, i))

    def _enter(self, start: Crossing, value: Any) -> None:
        """Take what crosses the start; the inputs that do not are absent."""
        tensors = [value] if isinstance(value, Tensor) else [*value]
        self.entering = start.tensors(tensors)
        there = dict(zip(start.integers, tensors[len(start.keys) :], strict=True))
        self.device, spec = tensors[0].device, self.stretch.code.inputs
        self.leaves = [
            there[i]
            if i in there
            else Absent(
                torch.empty(len(tensors[0]), *shape, dtype=dtype, device="meta"), self.device
            )
            for i, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
        ]

    @property
    def inputs(self) -> Any:
        """The network's inputs."""
        return tree_unflatten(self.leaves, self.stretch.code.inputs.structure)

    def leaving(self) -> Any:
        """What crosses the end."""
        assert self.end is not None
        missing = [key for key in self.end.keys if key not in self.captured]
        if missing:
            raise AbsentError(
                f"{len(missing)} tensors that cross before {self.end.call[-1][0]} did not come to "
                "be: if modules are left out of some passes at random (layerdrop), switch that "
                "off, or cut elsewhere"
            )
        rows = len(self.leaves[0])
        tensors = self.end.rows(self.captured, rows)
        tensors += [self.leaves[i] for i in self.end.integers]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def call(
        self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        parent, code = self.frames[-1], self.stretch.code
        id = (*parent.id, (path, parent.calls[path]))
        if self.end is not None and id == self.end.call:
            raise _Reached
        self.begun |= self.start is not None and id == self.start.call
        owns = path in self.network.owners
        if id in self.stretch.contexts or not (owns or id in code.own):
            return super().call(path, forward, args, kwargs)
        frame = Frame(parent.call(path))
        if not self.begun:
            return self.ended(frame, self._skip(frame, forward, args, kwargs))
        if self.present:
            args, kwargs = tree_map(self._now, (args, kwargs))
        with watched(self, inside=True), self._aside():
            out = self.call_inside(path, forward, args, kwargs)
        return self.ended(frame, out)

    def call_inside(
        self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        numbers, draw = self.stretch.numbers.get(path, ()), self.stretch.draw
        if not numbers or draw is None or self._skipping:
            return forward(*args, **kwargs)
        number = numbers[self._calls[path] % len(numbers)]
        self._calls[path] += 1
        with draw(number):
            return forward(*args, **kwargs)

    def ended(self, frame: Frame, out: Any) -> Any:
        path = frame.id[-1][0]
        frame.own = path in self.network.owners or frame.id in self.stretch.code.own
        return super().ended(frame, out)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Within it operations are not watched."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _skip(
        self, frame: Frame, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """What a call gives whose module is another block's: it is made once for each shape."""
        known = (frame.id, self.stretch.training, *_shapes((args, kwargs)))
        if known in self.stretch.templates:
            return self.stretch.templates[known]
        takes, *_ = self.stretch.code.own.get(frame.id, (None,))
        if takes == shapes_by_rows((args, kwargs), len(self.leaves[0])):
            out = self._recorded(frame.id)
        else:
            self._skipping = True
            module = self.network.copy.get_submodule(frame.id[-1][0])
            states = [(vars(m), dict(vars(m)), dict(m._buffers)) for m in module.modules()]
            try:
                with watched(self, inside=True), torch.random.fork_rng(devices=[]):
                    out = forward(*args, **kwargs)
            except AbsentError:  # it depends on numbers: it gives what it gave before
                if takes is None:
                    raise
                out = self._recorded(frame.id)
            finally:
                self._skipping = False
                for state, before, buffers in states:  # what it has put there has no numbers
                    state.update(before)
                    state["_buffers"].update(buffers)
        self.stretch.templates[known] = absent_like(out, self.device)
        return self.stretch.templates[known]

    def _recorded(self, id: CallId) -> Any:
        """What a call gave in the recorded pass, with as many rows as this one has."""
        _, leaves, structure = self.stretch.code.own[id]
        return tree_unflatten([*map(self._resized, leaves)], structure)

    def _resized(self, x: Any) -> Any:
        """A tensor of a recorded pass with as many rows as this one has, without numbers."""
        if not isinstance(x, Tensor):
            return x
        shape = (len(self.leaves[0]), *x.shape[1:]) if x.shape[:1] == (SAMPLES,) else x.shape
        return Absent(torch.empty(shape, dtype=x.dtype, device="meta"), self.device)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._skipping:
            return super().__torch_function__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if writes(func) and args and type(args[0]) is Tensor:
            return args[0]  # statistics, for example, which the other block counts
        if any(isinstance(x, Absent | nn.Parameter) for x in tree_leaves((args, kwargs))):
            return call_on_absent(func, args, kwargs, self.device)
        return func(*args, **kwargs)

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        frame, code = self.frames[-1], self.stretch.code
        if self.present and (self.begun or not self._in_function()):
            tensors = [self._now(x) for x in tensors]
            args, kwargs = tree_map(self._now, (args, kwargs))
        number, functions = code.random.get(frame.id, (0, frozenset[Any]()))
        random = func in functions
        if random:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if hooks is not None or in_reentrant_checkpoint(Stretch.forward.__code__):
                raise AbsentError(
                    "the forward draws random numbers inside torch.utils.checkpoint, which would "
                    "be others in the backward pass: leave that out"
                )
            number = number * MOST_DRAWS + self._draws[frame.id]
            self._draws[frame.id] += 1
        foreign = Absent if self.begun else (Absent, nn.Parameter)
        if any(isinstance(x, foreign) for x in tensors):
            known = (frame.id, frame.operations, *_shapes((args, kwargs)))
            if writes(func) or known not in self.stretch.templates:
                self.stretch.templates[known] = call_on_absent(func, args, kwargs, self.device)
            return self.stretch.templates[known]
        draw = self.stretch.draw if random else None
        with nullcontext() if draw is None else draw(number):
            return func(*args, **kwargs)

    def tensor(self, x: Tensor, key: Key) -> Tensor:
        if not self.begun and key in self.entering:
            entering = self.entering[key]
            if x.shape != entering.shape:
                raise AbsentError(
                    f"a tensor of shape {tuple(entering.shape)} has crossed for one of shape "
                    f"{tuple(x.shape)}: the forward does other things in some passes than in others"
                )
            inside = self._in_function()
            if isinstance(x, Absent) or inside:
                self.present[id(x)] = x, entering
            x = x if inside else entering  # what a Function returns gets another graph
        if self.end is not None and key in self.end.keys:
            self.captured[key] = x
        return super().tensor(x, key)

    def _now(self, x: Any) -> Any:
        """A tensor, or what has taken its place."""
        return self.present.get(id(x), (x, x))[1]

    def _in_function(self) -> bool:
        return self._has_graph and in_function(Stretch.forward.__code__)


def _plain(x: Any) -> Any:
    """A tensor, a number or a text of an output; None for anything else, such as a cache."""
    return x if isinstance(x, Tensor | bool | int | float | str) else None


def _shapes(value: Any) -> Iterator[Any]:
    """What a call depends on that is made for its shapes alone."""
    for x in tree_leaves(value):
        if isinstance(x, Tensor):
            yield x.shape, x.dtype
        elif isinstance(x, bool | int | float | str | torch.dtype | torch.device | type(None)):
            yield x
