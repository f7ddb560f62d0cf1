"""Where the pass of any network may be cut, found by watching two passes over a few samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_dataclass, tree_flatten, tree_leaves, tree_map

from hybrid.errors import calling_line
from hybrid.networks.passes import CallId, Frame, Key, Network, Pass, watched
from hybrid.networks.units import mode
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.numerics.draws import RandomOperations

SAMPLES = 2
"""Those of the pass in which calls are recorded, in training; one more in evaluation."""
INPUT = -2
"""The operation of a `Key` of one of the network's inputs."""


@dataclass(frozen=True)
class Boundary:
    """A place in a pass, before a call of a module with parameters, where it may be cut."""

    time: int
    """When it is reached in the pass."""
    contexts: frozenset[CallId]
    """The calls that are under way there."""
    names: list[str]
    """The paths of the modules whose calls begin there, the outermost first."""
    crossing: dict[Key, Tensor]
    """The tensors that cross it, but for integers, which every block has."""
    alike: frozenset[Key] = frozenset()
    """Those of them that are the same for all samples."""


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
class _Life:
    """A tensor of a pass."""

    tensor: Tensor
    born: list[tuple[int, Key, Call]] = field(default_factory=list)
    """When it came to be, how, and within which call."""
    last_use: float = -1
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
        self.lives: dict[int, _Life] = {}
        self.uses: dict[int, list[tuple[int, str]]] = {}
        """When a parameter is used, and the path of the module in whose code that is."""
        self.written: list[tuple[int, int, Call]] = []
        """When a memory is written to, which, and in whose code."""
        self.drawing: dict[CallId, set[Any]] = {}
        """The operations in a call's own code that draw random numbers."""
        self._buffers: dict[str, tuple[bool, int]] = {}
        """Whether each buffer has been put anew, and the memory that it had."""
        self.read: dict[CallId, tuple[int, str]] = {}
        """When a call's own code reads numbers that depend on samples, for the first time, and the
        line that does."""
        self.needed: dict[int, float] = {}
        """When an input of integers is needed for the last time, by its place."""

    def run(self, inputs: Any) -> None:
        """Pass a batch of inputs through the network."""
        self.samples = len(tree_leaves(inputs)[0])
        for i, x in enumerate(tree_leaves(inputs)):
            if x.is_floating_point():
                self.tensor(x, Key((), INPUT, i))
            else:
                self._life(x).inputs = frozenset({i})
        before = dict(self.network.copy.named_buffers())
        with watched(self), self:
            out = call_network(self.network.copy, inputs)
        _know_dataclasses(out)
        after = dict(self.network.copy.named_buffers())
        self._buffers = {n: (after.get(n) is not b, _memory(b)) for n, b in before.items()}
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._life(x).last_use = inf
                self.needed |= dict.fromkeys(self._life(x).inputs, inf)

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.time += 1
        _know_dataclasses((args, kwargs))
        id = (*self.frames[-1].id, (path, self.frames[-1].calls[path]))
        takes = shapes_by_rows((args, kwargs), self.samples)
        self.calls[id] = Call(id, self.time, self._open[-1], takes=takes)
        self._open.append(self.calls[id])
        return super().call(path, forward, args, kwargs)

    def ended(self, frame: Frame, out: Any) -> Any:
        self.time += 1
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
        for x in tensors:
            self._life(x).last_use = self.time
            if isinstance(x, nn.Parameter):
                self.uses.setdefault(id(x), []).append((self.time, call.path))
        versions = [x._version for x in tensors]
        with RandomOperations() as random:
            out = func(*args, **kwargs)
        if random.drew:
            self.drawing.setdefault(call.id, set()).add(func)
        if random.read and any(map(self.is_dependent, tensors)):
            self.read.setdefault(call.id, (self.time, calling_line()))
        for x, version in zip(tensors, versions, strict=True):
            if x._version != version:
                self.written.append((self.time, _memory(x), call))
        self._follow_integers(tensors, out)
        return out

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
        self._life(x).born.append((self.time, key, self._open[-1]))
        return super().tensor(x, key)

    def changed_buffers(self, calls: frozenset[CallId]) -> list[str]:
        """The buffers that the code of some calls writes to, or puts anew."""
        paths = {call[-1][0] if call else "" for call in calls}
        written = {memory for _, memory, call in self.written if call.id in calls}
        return [
            name
            for name, (buffer, memory) in self._buffers.items()
            if memory in written or (buffer and name.rpartition(".")[0] in paths)
        ]

    def _life(self, x: Tensor) -> _Life:
        return self.lives.setdefault(id(x), _Life(x))

    def boundaries(self) -> dict[CallId, Boundary | str]:
        """The places before calls where it can be told what crosses, and nothing of it changes.

        A text says why others are none.
        """
        births = sorted(
            time for x in self.lives.values() for time, key, _ in x.born if key.operation != INPUT
        )
        boundaries, begun = dict[CallId, Boundary | str](), -1
        first: CallId = ()
        used = min((time for uses in self.uses.values() for time, _ in uses), default=inf)
        for call in self.calls.values():
            if call.path not in self.network.owners or not call.id:
                continue
            if (count := bisect_left(births, call.begin)) == begun:
                before = boundaries.get(first)
                if isinstance(before, Boundary):  # it begins together with the one before
                    before.names.append(call.path)
                continue
            begun, first = count, call.id
            if used >= call.begin:
                continue  # there is nothing to train before it
            crossing = self._crossing(call)
            for around in call.ancestors():
                when, line = self.read.get(around.id, (inf, ""))
                if when < call.begin:
                    crossing = (
                        f"code in {around.path or 'the forward'!r} reads numbers of a tensor "
                        f"({line}) before, on which its calls may depend: move that code into a "
                        "module of its own, or cut outside of it"
                    )
            if isinstance(crossing, str):
                boundaries[call.id] = crossing
            elif crossing:
                contexts = frozenset(around.id for around in call.ancestors())
                boundaries[call.id] = Boundary(call.begin, contexts, [call.path], crossing)
        return boundaries

    def _crossing(self, call: Call) -> dict[Key, Tensor] | str:
        """What is alive when a call begins, in the order of its birth; else why that is not known.

        A tensor that came to be inside a call which has ended, and did not leave it as what the
        call gives, is not to be had there. Nor is one that is written to later, or was by way of
        another tensor that shares its memory.
        """
        crossing: list[tuple[int, Key, Tensor]] = []
        written: dict[int, tuple[int, str]] = {
            memory: (time, each.path) for time, memory, each in self.written
        }
        for x in self.lives.values():
            past = [birth for birth in x.born if birth[0] < call.begin]
            if not past or x.last_use < call.begin or isinstance(x.tensor, nn.Parameter):
                continue
            there = [birth for birth in past if _is_under_way(birth[2], call.begin)]
            if not there:
                return f"a tensor that is made inside {past[-1][2].path!r} is used behind it"
            when, where = written.get(_memory(x.tensor), (-1, ""))
            if when > there[-1][0]:
                return (
                    f"code in {where or 'the forward'!r} writes to a tensor of shape "
                    f"{tuple(x.tensor.shape)} in place that would cross: let it make a new one"
                )
            crossing.append((there[-1][0], there[-1][1], x.tensor))
        return {key: x for _, key, x in sorted(crossing, key=lambda each: each[:2])}


def _is_under_way(call: Call, time: int) -> bool:
    """Whether what comes to be within a call is to be had at that time."""
    return not any(each.own and each.end <= time for each in (call, *call.ancestors()))


def _know_dataclasses(value: Any) -> None:
    """Let torch know what is in a value's dataclasses, as it does for tuples and dicts."""
    for x in tree_leaves(value):
        if is_dataclass(x) and not isinstance(x, type | nn.Module):
            with suppress(ValueError):  # it has fields that its constructor does not take
                register_dataclass(type(x))
                _know_dataclasses([getattr(x, field.name) for field in fields(x)])


def _memory(x: Tensor) -> int:
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


def agreed(one: Boundary | str, other: Boundary | str) -> Boundary | str:
    """A place in training, as it is in evaluation; why it is none, where they differ."""
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else other
    if [*one.crossing] != [*other.crossing]:
        return "other tensors would cross in training than in evaluation"
    alike = set()
    for (key, x), y in zip(one.crossing.items(), other.crossing.values(), strict=True):
        if x.shape == y.shape:
            alike.add(key)
        elif (len(x), len(y)) != (SAMPLES, SAMPLES + 1):
            return (
                f"for {SAMPLES} samples a tensor of shape {tuple(x.shape)} would cross, which has "
                "no row for each: reshape it behind the cut"
            )
    return replace(one, alike=frozenset(alike))
