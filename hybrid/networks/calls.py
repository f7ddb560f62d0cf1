"""Any module as a chain of units: its own forward, cut before calls of modules within it."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.errors import code_line, one_line
from hybrid.networks.boundaries import (
    Boundary,
    Crossing,
    agreed,
    find_boundaries,
    find_changed,
    find_not_called,
    find_owners,
)
from hybrid.networks.passes import CallId, Network
from hybrid.networks.recording import SAMPLES, Recorder, recorded
from hybrid.networks.stretch import Code, Inputs, Stretch
from hybrid.networks.units import Unit, full_name, mode
from hybrid.solvers.acting import nearest
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.numerics.attributes import ELSEWHERE

FIRST = 1 << 20
"""The first number of a network's calls, beyond those of units."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass
class CallUnit(Unit):
    """Units `start` to `stop` - 1 of a network that is cut between calls."""

    calls: Calls | None = None
    start: int = 0
    stop: int = 0

    def tensors(self) -> dict[str, Tensor]:
        assert self.calls is not None
        return self.calls.tensors_of(self.start, self.stop)

    def parameters(self) -> dict[str, nn.Parameter]:
        assert self.calls is not None
        return self.calls.parameters_of(self.start, self.stop)

    def merged(self, run: Sequence[Unit]) -> Unit:
        assert self.calls is not None
        stop = self.start + sum(u.stop - u.start for u in run if isinstance(u, CallUnit))
        return replace(self, stop=stop, parts={"": self.calls.stretch(self.start, stop, False)})

    def block_parts(self, run: Sequence[Unit]) -> list[tuple[str, nn.Module]]:
        assert self.calls is not None
        stop = self.start + sum(u.stop - u.start for u in run if isinstance(u, CallUnit))
        return [("", self.calls.stretch(self.start, stop, True))]


class Calls:
    """Two watched passes of a module over a few samples, and where it may be cut.

    A cut lies before a call of a module with parameters. Modules without a list of modules inside
    stay whole, unless one of `cuts` is in them. What crosses are tensors that depend on parameters
    or on inputs that are no integers, with a row for each sample. Inputs that are integers go
    along if they are needed, or if there are several, whose lengths may vary.
    """

    def __init__(self, model: nn.Module, inputs: Any, cuts: Sequence[str] = ()) -> None:
        _check_inputs(model, inputs)
        self.model = model
        self.network = Network(model)
        """The copy on which single units run."""
        self.fault = ""
        """Why the network cannot be cut somewhere."""
        self._faults: dict[str, str] = {}
        """By a module's path, why there is no cut before it."""
        self._stretches: dict[tuple[int, int, bool], Stretch] = {}
        training = recorded(self.network, inputs, SAMPLES, True)
        evaluation = recorded(self.network, inputs, SAMPLES + 1, False)
        self._places = self._choose(training, evaluation, cuts)
        self._training = training
        self.settle(inputs, evaluation)
        self._drop_faulty(inputs, evaluation)
        del self._training, self._places  # they hold the tensors of both passes

    def settle(self, inputs: Any, evaluation: Recorder) -> None:
        """Settle what crosses at the places that are left, and whose the tensors are."""
        training, places = self._training, self._places
        self._stretches.clear()
        leaves = tree_leaves(inputs)
        integers = [i for i, x in enumerate(leaves) if not x.is_floating_point()]
        needed = {i: len(leaves) > 1 or training.needed.get(i, 0) for i in integers}
        self.crossings = [
            Crossing(
                call,
                tuple(place.crossing),
                tuple(i for i in integers if needed[i] is True or needed[i] >= place.time),
                place.contexts,
                place.alike,
            )
            for call, place in places.items()
        ]
        self.names = [tuple(place.names) for place in places.values()]
        """The modules that begin at each place, the outermost first."""
        self._times = [place.time for place in places.values()]
        around = frozenset[CallId]().union(*(place.contexts for place in places.values()))
        draws = {
            id: training.drawing.get(id, set()) | evaluation.drawing.get(id, set())
            for id in (*training.drawing, *evaluation.drawing)
        }
        cut = sorted(id for id in draws if id in around)
        both = {id for id, call in evaluation.calls.items() if id and call.own}
        self.code = Code(
            Inputs.of(inputs),
            {
                id: (call.takes, *call.gives)
                for id, call in training.calls.items()
                if call.gives and id in both
            },
            {id: (FIRST + n, frozenset(draws[id])) for n, id in enumerate(cut)},
        )
        begins = [[r.calls[call].begin for call in places] for r in (training, evaluation)]
        passes = [*zip((training, evaluation), begins, strict=True)]
        self._owners = find_owners(self.model, passes)
        """By the name of every tensor that is saved, the units that use it, in order."""
        self._changed = find_changed(self.network.copy, passes)
        """By the name of a buffer that the pass changes, the units that use it."""
        self._not_called = find_not_called(self.network.copy, training)
        self.begun: dict[str, set[int]] = {}
        """By the paths of modules that are called, the units in which their calls begin."""
        for call in training.calls.values():
            self.begun.setdefault(call.path, set()).add(bisect_right(self._times, call.begin))
        self._number_calls(training, {id[-1][0] for id in draws if id and id not in cut})

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self.crossings) + 1

    def units(self) -> list[Unit]:
        """The pieces between all places where it may be cut: a unit is never cut."""
        return [
            CallUnit(name, {"": self.stretch(i, i + 1, False)}, calls=self, start=i, stop=i + 1)
            for i, name in enumerate(self.unit_names)
        ]

    @property
    def unit_names(self) -> list[str]:
        """The innermost module that begins each unit and is not cut itself, such as "layers.3".

        A module that is called again has "@1" behind its name.
        """
        seen, names = Counter[str](), []
        for begin in (self.first, *self.names):
            # the element of a list of one has no parent that is opened: it is the outermost
            inner = [path for path in begin if path.rpartition(".")[0] in self._opened]
            name = [begin[0], *inner][-1]
            names.append(f"{name}@{seen[name]}" if seen[name] else name)
            seen[name] += 1
        return names

    @property
    def widths(self) -> list[int]:
        """How many tensors go into each unit but the first, beside integers."""
        return [len(each.keys) for each in self.crossings]

    def find_units_named(self, cuts: Sequence[str]) -> list[str]:
        """The units that begin with these modules; ValueError if there is no such place."""
        units = self.unit_names[1:]
        pairs = zip(units, self.names, strict=True)
        known = {name: unit for unit, names in pairs for name in (unit, *names)}
        for cut in cuts:
            if cut not in known:
                other = f"it is no module with parameters, or {self.fault or 'nothing can cross'}"
                fault, near = self._faults.get(cut, other), nearest(cut, known, 0.6)
                hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(
                    f"there is no cut before {cut!r} in {type(self.model).__name__}: "
                    f"{fault}; {hint}"
                )
        return [known[cut] for cut in cuts]

    def stretch(self, start: int, stop: int, own: bool) -> Stretch:
        """Units start .. stop-1 as one module; `own`: on a copy that has their tensors alone."""
        key = (start, stop, own)
        if key not in self._stretches:
            network = self.network
            if own:
                network = Network(self.model)
                network.drawing = self.network.drawing
                self._keep_own(network, start, stop)
            first, last = [None, *self.crossings, None][start : stop + 1 : stop - start]
            times = [0, *self._times, 1 << 62]
            numbers = {
                path: tuple(FIRST + n for n, time in calls if times[start] <= time < times[stop])
                for path, calls in self._numbers.items()
            }
            called = {path: each for path, each in numbers.items() if each}
            self._stretches[key] = Stretch(network, self.code, first, last, called)
        return self._stretches[key]

    def networks(self) -> list[nn.Module]:
        """The copies of the model that stretches run."""
        return list({id(s.network): s.network.copy for s in self._stretches.values()}.values())

    def tensors_of(self, start: int, stop: int) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name, each in the first unit that has it."""
        everything = self.model.state_dict()
        for stretch in self._own_stretches(start, stop):
            everything |= stretch.state_dict()  # a forward may have put others in their place
        return {n: x for n, x in everything.items() if start <= self._owners[n][0] < stop}

    def parameters_of(self, start: int, stop: int) -> dict[str, nn.Parameter]:
        """The parameters by name, each in all units that use it; their copies, where it has any."""
        everything = dict(self.model.named_parameters(remove_duplicate=False))
        for stretch in self._own_stretches(start, stop):
            everything |= dict(stretch.named_parameters(remove_duplicate=False))
        return {n: p for n, p in everything.items() if self._is_used(n, start, stop)}

    def _own_stretches(self, start: int, stop: int) -> list[Stretch]:
        """Those of blocks that have any of these units."""
        return [s for (a, b, own), s in self._stretches.items() if own and a < stop and start < b]

    def _is_used(self, name: str, start: int, stop: int) -> bool:
        return any(start <= unit < stop for unit in self._owners[name])

    def tied(self, starts: Sequence[int]) -> dict[tuple[int, ...], list[list[str]]]:
        """By the blocks that have them, the names of parameters that several blocks have."""
        names: dict[int, list[str]] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        ties: dict[tuple[int, ...], list[list[str]]] = {}
        for each in names.values():
            units = {unit for name in each for unit in self._owners[name]}
            blocks = tuple(sorted({bisect_right(starts, unit) - 1 for unit in units}))
            if len(blocks) > 1:
                ties.setdefault(blocks, []).append(each)
        return ties

    def check_changed(self, starts: Sequence[int]) -> None:
        """ValueError for a buffer that the pass changes, and that several blocks use."""
        for name, units in self._changed.items():
            blocks = sorted({bisect_right(starts, unit) - 1 for unit in units})
            if len(blocks) > 1:
                raise ValueError(
                    f"blocks {blocks[0]} and {blocks[1]} share the statistic {name!r}, and their "
                    "copies would drift apart: cut elsewhere, or give each its own"
                )

    def sync_buffers(self) -> None:
        """Let the model have the buffers that forward passes of its blocks have put anew."""
        for (_, _, own), stretch in self._stretches.items():
            for name, buffer in stretch.named_buffers() if own else ():
                path, _, field = name.rpartition(".")
                self.model.get_submodule(path)._buffers[field] = buffer

    def _keep_own(self, network: Network, start: int, stop: int) -> None:
        """Leave the copy the tensors of its units; others are there for their shapes, unnamed."""
        for path, module in network.copy.named_modules():
            known = {
                name: full_name(path, name) for name in (*module._parameters, *module._buffers)
            }
            foreign = [
                name
                for name, full in known.items()
                if full in self._owners and not self._is_used(full, start, stop)
            ]
            vars(module)[ELSEWHERE] = foreign
            for name in foreign:
                among = module._parameters if name in module._parameters else module._buffers
                vars(module)[name] = among.pop(name)
        self._copy_tied(network, start, stop)

    def _copy_tied(self, network: Network, start: int, stop: int) -> None:
        """Give the copy parameters of its own in place of those that an earlier block has, too."""
        units: dict[int, set[int]] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            units.setdefault(id(weight), set()).update(self._owners[name])
        copies: dict[int, nn.Parameter] = {}
        for module in network.copy.modules():
            for among in (module._parameters, vars(module)):
                for name, p in [*among.items()]:
                    used = units.get(id(p), ())
                    if not (used and min(used) < start and any(start <= u < stop for u in used)):
                        continue
                    if id(p) not in copies:
                        copies[id(p)] = nn.Parameter(p.detach().clone(), p.requires_grad)
                    among[name] = copies[id(p)]

    def _choose(
        self, training: Recorder, evaluation: Recorder, cuts: Sequence[str]
    ) -> dict[CallId, Boundary]:
        """The boundaries alike in training and evaluation, of modules that are not kept whole."""
        self._opened, places = self._find_opened(cuts), dict[CallId, Boundary]()
        others = find_boundaries(evaluation)
        for call, one in find_boundaries(training).items():
            if (call[-2][0] if len(call) > 1 else "") not in self._opened:
                continue
            changed = training.changed_buffers(frozenset(call[:n] for n in range(len(call))))
            place = (
                f"the forward writes to the buffer {changed[0]!r}: move that code into the "
                "forward of a module of its own, which has the buffer"
                if changed
                else agreed(one, others.get(call, "it is not called in evaluation"))
            )
            if isinstance(place, Boundary):
                places[call] = place
            else:
                name = call[-1][0]
                self._faults.setdefault(name, place)
                self.fault = self.fault or f"no cut before {name!r}: {place}"
        if not places and not self.fault and training.read:
            _, line = next(iter(training.read.values()))
            self.fault = f"its calls depend on numbers ({line}): move that code into a module"
        return places

    def _drop_faulty(self, inputs: Any, evaluation: Recorder) -> None:
        """Try the units one after the other, and leave out the places where one cannot begin.

        None is left if the units together compute something else.
        """
        some = tree_map(lambda x: x[:2], inputs)
        while self._places:
            value, units = some, self.units()
            with mode(self.network.copy, False), torch.no_grad():
                try:
                    for i, unit in enumerate(units):
                        part = unit.parts[""]
                        value = part(value) if i else call_network(part, value)
                except Exception as error:  # whatever a forward does without numbers
                    self.fault = (
                        f"its forward needs what only a part of it computes "
                        f"({code_line(error, True)}: {one_line(error)[:160]}); move that "
                        "code into a module of its own"
                    )
                    del self._places[self.crossings[max(0, i - 1)].call]
                    self.settle(inputs, evaluation)
                    continue
                whole = [call_network(self.network.copy, some) for _ in range(2)]
            if _differ(value, whole[0]) and not _differ(*whole):
                self.fault = "its units give other numbers than its own forward"
                self._places = {}
                self.settle(inputs, evaluation)
            break

    def _find_opened(self, cuts: Sequence[str]) -> set[str]:
        """The paths of modules that are cut inside: those that have a list of several in them."""
        opened = {""}
        for path, module in self.network.copy.named_modules():
            inside = [child for child in module.children() if child.state_dict()]
            parts = path.split(".")[: -1 if path in cuts else None]
            if path in cuts or (isinstance(module, CONTAINERS) and len(inside) > 1):
                opened |= {".".join(parts[:n]) for n in range(len(parts) + 1)}
        return opened

    def _number_calls(self, recorder: Recorder, drawing: set[str]) -> None:
        """The calls of each module that draws: their numbers in the whole pass, and their times."""
        self._numbers: dict[str, list[tuple[int, int]]] = {}
        first: list[str] = []
        for number, call in enumerate(recorder.calls.values()):
            inside = not first or call.path.startswith(f"{first[-1]}.")
            if call.id and inside and call.path in self.network.owners:
                first.append(call.path)
            if call.path in drawing:
                self._numbers.setdefault(call.path, []).append((number, call.begin))
        for number, (path, when) in enumerate(self._not_called.items(), len(recorder.calls)):
            rate = getattr(self.network.copy.get_submodule(path), "p", 0)
            if when and isinstance(rate, float) and rate > 0:  # dropout of an expert, for example
                self._numbers[path] = [(number, when[0])]
        self.network.drawing = {*self._numbers}
        self.first = first or ["inputs"]
        """The modules that begin the first unit, the outermost first."""


def _check_inputs(model: nn.Module, inputs: Any) -> None:
    """ValueError for inputs that a module's forward does not take, by their names or number."""
    signature = inspect.signature(model.forward)
    try:
        if isinstance(inputs, dict):
            signature.bind(**inputs)
        else:
            signature.bind(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    except TypeError as error:
        raise ValueError(f"{type(model).__name__} does not take these inputs: {error}") from None


def _differ(one: Any, other: Any) -> bool:
    """Whether tensors of two outputs differ in a number."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=False)
    tensors = ((a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
    return any(not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in tensors)
