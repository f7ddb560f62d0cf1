"""Where the pass of any network may be cut, found by watching two passes over a few samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import register_dataclass
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from hybrid.errors import calling_line
from hybrid.networks.absent import writes
from hybrid.networks.passes import (
    GRADIENTS,
    CallId,
    Frame,
    Key,
    Network,
    Pass,
    differentiated,
    enclosure,
    in_function,
    unwrapped,
    watched,
)
from hybrid.networks.units import mode
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.numerics.draws import RandomOperations

SAMPLES = 2
"""Those of the pass in which calls are recorded, in training; one more in evaluation."""
INPUT = -2
"""The operation of a `Key` of one of the network's inputs."""


@dataclass
class Call:
    """A call of a module, in the time of its pass."""

    id: CallId
    begin: int
    around: Call | None
    end: float = inf
    own: bool = True
    """Whether all that it gives depends on parameters or samples: then it need not be made where
    only shapes are needed."""
    takes: Shapes = ()
    """The shapes of the tensors among its arguments, as `shapes_by_rows` has them."""
    gives: tuple[list[Any], TreeSpec] | None = None
    """What it gives, as tensors on the meta device, and their structure."""

    @property
    def path(self) -> str:
        """Of its module."""
        return self.id[-1][0] if self.id else ""

    def ancestors(self) -> Iterator[Call]:
        """The calls around it, the innermost first."""
        around = self.around
        while around is not None:
            yield around
            around = around.around


def _without_numbers(x: Any) -> Any:
    """A tensor on the meta device, a number or a text; None for anything else, such as a cache."""
    if isinstance(x, Tensor):
        return x.detach().to("meta")
    return x if isinstance(x, bool | int | float | str) else None


Shapes = tuple[tuple[Any, ...], ...]


def shapes_by_rows(value: Any, rows: int) -> Shapes:
    """The shapes of all tensors of a value, so many rows in the first place being "rows"."""
    tensors = (x for x in tree_leaves(value) if isinstance(x, Tensor))
    return tuple(("rows", *x.shape[1:]) if x.shape[:1] == (rows,) else (*x.shape,) for x in tensors)


@dataclass
class Life:
    """A tensor of a pass."""

    tensor: Tensor
    born: list[tuple[int, Key, Call]] = field(default_factory=list)
    """When it came to be, how, and within which call."""
    first_use: float = inf
    last_use: float = -1
    last_function: float = -1
    """When the forward of a torch.autograd.Function uses it for the last time."""
    replaced_later: bool = False
    """Whether it came to be where a block cannot put in its place what has crossed: inside such a
    forward, or by being written to."""
    inputs: frozenset[int] = frozenset()
    """The integers among the network's inputs that it was computed of, and of nothing else."""


class Recorder(Pass):
    """A pass over samples that notes when every tensor comes to be, is used and is written to."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.time = 0
        self.calls: dict[CallId, Call] = {(): Call((), 0, None)}
        """All calls, in the order in which they begin."""
        self._open = [self.calls[()]]
        self.lives: dict[int, Life] = {}
        self.uses: dict[int, list[tuple[int, str]]] = {}
        """When a tensor is used, by identity, and the path of the module in whose code that is."""
        self.written: list[tuple[int, int, Call]] = []
        """When a memory is written to, which, and in whose code."""
        self.drawing: dict[CallId, set[Any]] = {}
        """The operations in a call's own code that draw random numbers."""
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        """Each buffer before and after the pass."""
        self.read: dict[CallId, tuple[int, str]] = {}
        """When a call's own code reads numbers that depend on samples, for the first time, and the
        line that does."""
        self.needed: dict[int, float] = {}
        """When an input of integers is needed for the last time, by its place."""
        self.enclosed: dict[CallId, str] = {}
        """Why there can be no cut before a call, by what runs around it."""
        self.unseen: dict[CallId, str] = {}
        """By call, a line of its own code where a tensor with a graph is used that was not watched
        coming to be."""
        self.gradients: list[tuple[float, int, str]] = []
        """Where the graph begins of which code takes a gradient, when it does, and its line."""
        self._with_graph: dict[int, Tensor] = {}
        """What has a graph and depends neither on parameters nor on samples, by identity."""

    def run(self, inputs: Any) -> None:
        """Pass a batch of inputs through the network."""
        self.samples = len(tree_leaves(inputs)[0])
        for i, x in enumerate(tree_leaves(inputs)):
            if x.is_floating_point():
                self.tensor(x, Key((), INPUT, i))
            else:
                self._life(x).inputs = frozenset({i})
        before = dict(self.network.copy.named_buffers(remove_duplicate=False))
        with watched(self), self:
            out = call_network(self.network.copy, inputs)
        _know_dataclasses(out)
        after = dict(self.network.copy.named_buffers(remove_duplicate=False))
        self._buffers = {n: (b, after.get(n, b)) for n, b in before.items()}
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._life(x).last_use = inf
                self.uses.setdefault(id(x), []).append((self.time, ""))
                self.needed |= dict.fromkeys(self._life(x).inputs, inf)

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.time += 1
        _know_dataclasses((args, kwargs))
        id = (*self.frames[-1].id, (path, self.frames[-1].calls[path]))
        takes = shapes_by_rows((args, kwargs), self.samples)
        self.calls[id] = Call(id, self.time, self._open[-1], takes=takes)
        if why := enclosure(Recorder.run.__code__):
            self.enclosed[id] = why
        self._find_unseen((args, kwargs))
        self._open.append(self.calls[id])
        return super().call(path, forward, args, kwargs)

    def ended(self, frame: Frame, out: Any) -> Any:
        self.time += 1
        self._find_unseen(out)
        call = self._open.pop()
        call.end = self.time
        _know_dataclasses(out)
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        computed = bool(tensors) and all(map(self.is_dependent, tensors))
        call.own = frame.own = call.path in self.network.owners or computed
        if call.own:
            with torch._C.DisableTorchFunction():
                leaves, structure = tree_flatten(out)
                call.gives = [*map(_without_numbers, leaves)], structure
        return super().ended(frame, out)

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        self.time += 1
        call = self._open[-1]
        self._find_unseen(tensors)
        if func in GRADIENTS:
            self._find_gradient(differentiated(func, args, kwargs))
        function = in_function(Recorder.run.__code__)
        for x in tensors:
            life = self._life(x)
            life.first_use, life.last_use = min(life.first_use, self.time), self.time
            life.last_function = self.time if function else life.last_function
            self.uses.setdefault(id(unwrapped(x)), []).append((self.time, call.path))
        versions = [x._version for x in tensors]
        with RandomOperations() as random:
            out = func(*args, **kwargs)
        if random.drew:
            self.drawing.setdefault(call.id, set()).add(func)
        if random.read and any(map(self.is_dependent, tensors)):
            self.read.setdefault(call.id, (self.time, calling_line()))
        for x, version in zip(tensors, versions, strict=True):
            if x._version != version:
                self.written.append((self.time, memory_of(x), call))
        self._follow_integers(tensors, out)
        for x in tree_leaves(args[0] if out is None and args else out):
            if isinstance(x, Tensor):
                self._life(x).replaced_later |= writes(func)
                if x.grad_fn is not None:
                    self._with_graph[id(x)] = x
        return out

    def _find_unseen(self, value: Any) -> None:
        """Note the line that runs now, if a value has a tensor that unwatched code has computed."""
        for x in tree_leaves(value):
            if not isinstance(x, Tensor) or x.grad_fn is None or self.is_dependent(x):
                continue
            if id(x) not in self._with_graph:
                self.unseen.setdefault(self._open[-1].id, calling_line())

    def _find_gradient(self, inputs: Any) -> None:
        """Note where the graph begins of which a gradient is taken now."""
        leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        lives = [self._life(x) for x in leaves]
        begins = [min([each.first_use, *(time for time, _, _ in each.born)]) for each in lives]
        known = begins and not any(isinstance(x, nn.Parameter) for x in leaves)
        self.gradients.append((min(begins) if known else -1, self.time, calling_line()))

    def _follow_integers(self, tensors: list[Tensor], out: Any) -> None:
        """Note which inputs of integers an operation needs, or hands on to what it gives."""
        inputs = frozenset[int]().union(*(self._life(x).inputs for x in tensors))
        if not inputs:
            return
        given = tree_leaves(out)
        if any(map(self.is_dependent, tensors)):
            self.needed |= dict.fromkeys(inputs, self.time)
        elif all(isinstance(x, Tensor) for x in given):
            for x in given:
                self._life(x).inputs |= inputs
        else:
            self.needed |= dict.fromkeys(inputs, inf)  # the code depends on their numbers

    def tensor(self, x: Tensor, key: Key) -> Tensor:
        life = self._life(x)
        life.born.append((self.time, key, self._open[-1]))
        life.replaced_later |= in_function(Recorder.run.__code__)
        return super().tensor(x, key)

    def begun(self) -> dict[str, list[int]]:
        """When calls of each module begin, by its path."""
        begun: dict[str, list[int]] = {}
        for call in self.calls.values():
            begun.setdefault(call.path, []).append(call.begin)
        return begun

    def uses_of(self, x: Tensor) -> list[tuple[int, str]]:
        """When a parameter or buffer of the network is used, and in whose code."""
        anew = [b for a, b in self._buffers.values() if a is x and b is not x]
        return [use for each in (x, *anew) for use in self.uses.get(id(each), [])]

    def changed(self) -> list[str]:
        """The buffers that are written to in the pass, or put anew."""
        written = {memory for _, memory, _ in self.written}
        pairs = self._buffers.items()
        return [n for n, (a, b) in pairs if a is not b or memory_of(a) in written]

    def changed_buffers(self, calls: frozenset[CallId]) -> list[str]:
        """The buffers that the code of some calls writes to, or puts anew."""
        paths = {call[-1][0] if call else "" for call in calls}
        written = {memory for _, memory, call in self.written if call.id in calls}
        return [
            name
            for name, (a, b) in self._buffers.items()
            if memory_of(a) in written or (a is not b and name.rpartition(".")[0] in paths)
        ]

    def _life(self, x: Tensor) -> Life:
        return self.lives.setdefault(id(x), Life(x))


def _know_dataclasses(value: Any) -> None:
    """Let torch know what is in a value's dataclasses, as it does for tuples and dicts."""
    for x in tree_leaves(value):
        if is_dataclass(x) and not isinstance(x, type | nn.Module):
            with suppress(ValueError):  # it has fields that its constructor does not take
                register_dataclass(type(x))
                _know_dataclasses([getattr(x, field.name) for field in fields(x)])


def memory_of(x: Tensor) -> int:
    """What tells memories apart."""
    return int(x.untyped_storage()._cdata)


def record(network: Network, inputs: Any, samples: int, training: bool) -> Recorder:
    """A pass over so many of the inputs, which are repeated as need be."""
    some = tree_map(lambda x: _repeat_rows(x, samples), inputs)
    recorder = Recorder(network)
    with mode(network.copy, training), torch.set_grad_enabled(training):
        recorder.run(some)
    return recorder


def _repeat_rows(x: Tensor, count: int) -> Tensor:
    if len(x) == 0:
        raise ValueError("sample has no rows: give a batch of inputs with at least one")
    return x[torch.arange(count) % len(x)]


def recorded(network: Network, inputs: Any, samples: int, training: bool) -> Recorder:
    """A recorded pass; ValueError if the network does not take the inputs."""
    try:
        return record(network, inputs, samples, training)
    except Exception as error:  # whatever a user's module raises
        shapes = ", ".join(str(tuple(x.shape[1:])) for x in tree_leaves(inputs))
        raise ValueError(
            f"sample of shape {shapes} does not fit {type(network.copy).__name__}, which says: "
            f"{(str(error).splitlines() or ['nothing'])[0]}"
        ) from None
