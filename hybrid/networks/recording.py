"""Two recorded passes of any network: where it may be cut, what crosses, and who uses what."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import inf
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.export import register_dataclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hybrid.errors import calling_line
from hybrid.networks.passes import (
    INPUT,
    OUTPUT,
    CallId,
    ModuleCall,
    TensorKey,
    WatchedNetwork,
    WatchedPass,
    watched,
)
from hybrid.networks.units import mode
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.numerics.draws import RandomOperations
from hybrid.solvers.state import sha256

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
SAMPLES = 2
"""Those of the pass in which calls are recorded, in training; one more in evaluation."""


@dataclass
class TensorLife:
    """A tensor of a pass that depends on parameters or samples."""

    tensor: ReferenceType[Tensor]
    """It may live no longer: all tensors of a pass would take much memory."""
    shape: torch.Size
    births: list[tuple[int, TensorKey]] = field(default_factory=list)
    """When it came to be, or was written to, and how."""
    last_use: float = -1


class PassRecorder(WatchedPass):
    """A pass over samples that notes when every tensor comes to be, and is used."""

    def __init__(self, network: WatchedNetwork) -> None:
        super().__init__(network)
        self.time = 0
        self.calls: dict[CallId, ModuleCall] = {(): self.open[0]}
        """All calls, in the order in which they begin."""
        self.lives: list[TensorLife] = []
        self._by_id: dict[int, TensorLife] = {}
        self.uses: dict[int, tuple[ReferenceType[Tensor], list[tuple[int, str]]]] = {}
        """By identity of a tensor: when it is used, and the path of the module that uses it."""
        self.drawing: dict[str, set[Any]] = {}
        """By path of a module: the operations of its code that draw random numbers."""
        self.read: dict[CallId, tuple[int, str]] = {}
        """When the code of a call first reads numbers that depend on samples, and the line."""
        self.integers_needed: float = 0
        """When what is computed of integers among the inputs is needed for the last time."""
        self.changed: dict[str, Tensor] = {}
        """The buffers that the pass writes to or puts anew, by name: as they are afterwards."""
        self._of_integers: dict[int, Tensor] = {}
        """What is computed of integers among the inputs and depends on nothing else."""

    def run(self, inputs: Any) -> None:
        """Pass a batch of inputs through the network."""
        for i, x in enumerate(tree_leaves(inputs)):
            if x.is_floating_point():
                self.tensor(x, TensorKey((), INPUT, i))
            else:
                self._of_integers[id(x)] = x
        buffers = dict(self.network.copy.named_buffers(remove_duplicate=False))
        before = {name: (x, x._version) for name, x in buffers.items()}
        with watched(self), self:
            out = call_network(self.network.copy, inputs)
        _register_dataclasses(out)
        after = dict(self.network.copy.named_buffers(remove_duplicate=False))
        for name, (x, version) in before.items():
            if after.get(name, x) is not x or x._version != version:
                self.changed[name] = after.get(name, x)
        for x in tree_leaves(out):
            if life := self._life_of(x):
                life.last_use = inf
            if isinstance(x, nn.Parameter):
                self._note_use(x, "")
            if id(x) in self._of_integers:
                self.integers_needed = inf

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.time += 1
        _register_dataclasses((args, kwargs))
        call = ModuleCall(self.open[-1].child(path), self.time)
        self.open[-1].calls[path] += 1
        self.calls[call.id] = call
        out = self.run_call(call, forward, args, kwargs)
        self.time += 1
        call.end = self.time
        _register_dataclasses(out)
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        dependent = bool(tensors) and all(map(self.is_dependent, tensors))
        if not dependent and path not in self.network.stateful:
            return out
        with torch._C.DisableTorchFunction():
            leaves, structure = tree_flatten(out)
            call.outputs = [*map(_without_numbers, leaves)], structure
        return self.produced(out, call.id, OUTPUT)

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        self.time += 1
        with RandomOperations() as random:
            out = func(*args, **kwargs)
        path, leaves = self.open[-1].path, tree_leaves(out)
        if random.drew:
            self.drawing.setdefault(path, set()).add(func)
        results = [x for x in leaves if isinstance(x, Tensor)]
        dependent = any(map(self.is_dependent, tensors))
        if random.read and dependent:
            self.read.setdefault(self.open[-1].id, (self.time, calling_line()))
        if not (results or random.read or func == Tensor.__setitem__):
            return out  # a shape or number format
        for x in tensors:
            self._note_use(x, path)
        if any(id(x) in self._of_integers for x in tensors):
            if dependent:
                self.integers_needed = max(self.integers_needed, self.time)
            else:
                self.integers_needed = inf if random.read else self.integers_needed
                self._of_integers |= {id(x): x for x in results}
        return out

    def _note_use(self, x: Tensor, path: str) -> None:
        if life := self._life_of(x):
            life.last_use = self.time
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        if id(x) not in self.uses or self.uses[id(x)][0]() is not x:
            self.uses[id(x)] = ref(x), []
        self.uses[id(x)][1].append((self.time, path))

    def _life_of(self, x: Any) -> TensorLife | None:
        life = self._by_id.get(id(x))
        return life if life and life.tensor() is x else None

    def tensor(self, x: Tensor, key: TensorKey) -> Tensor:
        if not isinstance(x, nn.Parameter):
            life = self._life_of(x)
            if life is None:
                life = self._by_id[id(x)] = TensorLife(ref(x), x.shape)
                self.lives.append(life)
            life.shape = x.shape
            life.births.append((self.time, key))
        return super().tensor(x, key)

    def uses_of(self, name: str, x: Tensor) -> list[tuple[int, str]]:
        """When a parameter or buffer of that name is used, and by which module."""
        versions = {id(each): each for each in (x, self.changed.get(name, x))}
        noted = [(*self.uses[i], each) for i, each in versions.items() if i in self.uses]
        return [use for tensor, uses, each in noted if tensor() is each for use in uses]

    def begins(self, path: str) -> list[int]:
        """When calls of a module begin, or of the next one around it that is called."""
        begins = [call.begin for call in self.calls.values() if call.path == path]
        return begins or self.begins(path.rpartition(".")[0])


def _without_numbers(x: Any) -> Any:
    """A tensor on the meta device, a number or a text; None for anything else, such as a cache."""
    if isinstance(x, Tensor):
        return x.detach().to("meta")
    return x if isinstance(x, bool | int | float | str) else None


def _register_dataclasses(value: Any) -> None:
    """Let torch know what is in a value's dataclasses, as it does for tuples and dicts."""
    for x in tree_leaves(value):
        if is_dataclass(x) and not isinstance(x, type | nn.Module):
            with suppress(ValueError):  # it has fields that its constructor does not take
                register_dataclass(type(x))
                _register_dataclasses([getattr(x, field.name) for field in fields(x)])


def saved_besides(model: nn.Module) -> dict[str, str]:
    """SHA-256 by name of the tensors that a model saves besides its parameters and buffers."""
    pairs = model.named_parameters(remove_duplicate=False), model.named_buffers()
    known = {name for each in pairs for name, _ in each}
    saved = model.state_dict().items()
    return {n: sha256(x) for n, x in saved if n not in known and isinstance(x, Tensor)}


def record(network: WatchedNetwork, inputs: Any) -> Iterator[PassRecorder]:
    """A pass in training and one in evaluation; ValueError if the network does not take the inputs.

    The inputs are repeated as need be.
    """
    for samples, training in ((SAMPLES, True), (SAMPLES + 1, False)):
        recorder = PassRecorder(network)
        try:
            some = tree_map(lambda x, n=samples: x[torch.arange(n) % len(x)], inputs)
            with mode(network.copy, training), torch.set_grad_enabled(training):
                recorder.run(some)
        except Exception as error:  # whatever a user's module raises
            shapes = ", ".join(str(tuple(x.shape[1:])) for x in tree_leaves(inputs))
            raise ValueError(
                f"sample of shape {shapes} does not fit {type(network.copy).__name__}, which says: "
                f"{(str(error).splitlines() or ['nothing'])[0]}"
            ) from None
        yield recorder


@dataclass(frozen=True)
class StageInterface:
    """A place in a pass, before a call of a module with parameters, and what crosses it."""

    call: CallId
    """The call that begins there."""
    time: int
    """When it is reached in the recorded pass."""
    names: list[str]
    """The paths of the modules whose calls begin there, the outermost first."""
    shapes: Mapping[TensorKey, torch.Size]
    """What crosses of the tensors that depend on parameters, or on inputs that are no integers."""
    integers: tuple[int, ...] = ()
    """The places of the inputs that are integers and cross, too."""
    shared: frozenset[TensorKey] = frozenset()
    """The tensors that are the same for all samples, which cross as a row for each."""

    @property
    def around(self) -> set[str]:
        """The paths of the modules whose calls are under way there."""
        return {"", *(path for path, _ in self.call[:-1])}

    @property
    def inside(self) -> set[CallId]:
        """The calls that are under way there, or in whose code a tensor that crosses comes to be.

        What a call returns comes to be in the code around it.
        """
        calls = [key.call[:-1] if key.operation == OUTPUT else key.call for key in self.shapes]
        return {call[:n] for call in (self.call[:-1], *calls) for n in range(len(call) + 1)}

    def rows(self, tensors: Mapping[TensorKey, Tensor], count: int) -> list[Tensor]:
        """What crosses, as tensors with `count` rows."""
        crossing = ((tensors[key], key in self.shared) for key in self.shapes)
        return [x.expand(count, *x.shape) if is_shared else x for x, is_shared in crossing]

    def tensors(self, rows: Sequence[Tensor]) -> dict[TensorKey, Tensor]:
        """What has crossed, as it was."""
        pairs = zip(self.shapes, rows, strict=False)
        return {key: x[0] if key in self.shared else x for key, x in pairs}


def find_boundaries(recorder: PassRecorder) -> dict[CallId, StageInterface]:
    """The places before calls at which tensors that depend on parameters are alive.

    Calls between which no tensor comes to be begin at one place.
    """
    births = sorted(
        time for x in recorder.lives for time, key in x.births if key.operation != INPUT
    )
    weights = {id(p) for p in recorder.network.copy.parameters()}
    uses = [use for each in weights & recorder.uses.keys() for use in recorder.uses[each][1]]
    first_use = min((time for time, _ in uses), default=inf)
    boundaries: dict[int, StageInterface] = {}
    for call in recorder.calls.values():
        if call.path not in recorder.network.stateful or call.begin <= first_use:
            continue
        begun = bisect_left(births, call.begin)
        if begun in boundaries:
            boundaries[begun].names.append(call.path)
        elif shapes := _crossing(recorder, call.begin):
            boundaries[begun] = StageInterface(call.id, call.begin, [call.path], shapes)
    return {each.call: each for each in boundaries.values()}


def _crossing(recorder: PassRecorder, time: int) -> dict[TensorKey, torch.Size]:
    """The shapes of what is alive at a time, in the order in which it came to be."""
    crossing: list[tuple[int, TensorKey, torch.Size]] = []
    for x in recorder.lives:
        if past := [birth for birth in x.births if birth[0] < time <= x.last_use]:
            crossing.append((*past[-1], x.shape))
    return {key: shape for _, key, shape in sorted(crossing)}


def agree(one: StageInterface, other: StageInterface | None) -> StageInterface | str:
    """A place in training, as it is in evaluation; why it is none, where they differ."""
    if other is None:
        return "it is not called in evaluation"
    if [*one.shapes] != [*other.shapes]:
        return "other tensors would cross in training than in evaluation"
    for key, shape in one.shapes.items():
        longer = other.shapes[key]
        if shape != longer and (shape[:1], longer[:1]) != ((SAMPLES,), (SAMPLES + 1,)):
            return (
                f"for {SAMPLES} samples a tensor of shape {tuple(shape)} would cross, which has "
                "no row for each: reshape it behind the cut"
            )
    return replace(one, shared=frozenset(k for k, s in one.shapes.items() if s == other.shapes[k]))


def find_owners(
    model: nn.Module, passes: Sequence[tuple[PassRecorder, Sequence[int]]]
) -> dict[str, list[int]]:
    """By the name of every tensor that is saved, the units that use it, in order.

    `passes`: recorded passes, and when their units but the first begin. Whatever operation takes a
    tensor uses it, in the unit in which that happens. Of several names of one tensor those of the
    module whose code it is are meant, or else all; a name of which no use is known is used where
    the module is called that has it.
    """
    saved = model.state_dict(keep_vars=True)
    saved |= dict(model.named_parameters(remove_duplicate=False))
    aliases: dict[int, list[str]] = {}
    for name, x in saved.items():
        aliases.setdefault(id(x), []).append(name)
    owners: dict[str, set[int]] = {name: set() for name in saved}
    for names in aliases.values():
        everywhere = set[int]()
        for recorder, times in passes:
            for time, where in recorder.uses_of(names[0], saved[names[0]]):
                unit = bisect_right(times, time)
                everywhere.add(unit)
                for name in [n for n in names if n.rpartition(".")[0] == where] or names:
                    owners[name].add(unit)
        for name in names:
            owners[name] |= set() if owners[name] else everywhere
    recorder, times = passes[0]
    for name, units in owners.items():
        if not units:  # such as an expert's, or statistics that are only written to
            path = name.rpartition(".")[0]
            begins = [t for t in recorder.begins(path) if t or not path]
            units.update([bisect_right(times, t) for t in begins] or [len(times)])
    return {name: sorted(units) for name, units in owners.items()}


def find_divided(network: nn.Module, cuts: Sequence[str], opened: Iterable[str]) -> set[str]:
    """The paths of modules that are cut inside: `opened`, and those around `cuts` or long lists."""
    divided = {""}
    for path in opened:
        parts = path.split(".")
        divided |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    for path, module in network.named_modules():
        listed = [child for child in module.children() if child.state_dict()]
        parts = path.split(".")[: -1 if path in cuts else None]
        if path in cuts or (isinstance(module, CONTAINERS) and len(listed) > 1):
            divided |= {".".join(parts[:n]) for n in range(len(parts) + 1)}
    return divided
