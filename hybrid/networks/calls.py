"""Any module as a chain of units: its forward, cut before calls of modules inside it."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hybrid.networks.call_unit import CallUnit
from hybrid.networks.cut_check import CutCheck
from hybrid.networks.passes import WatchedNetwork
from hybrid.networks.recording import (
    SAMPLES,
    PassRecorder,
    StageInterface,
    agree,
    find_boundaries,
    find_divided,
    find_owners,
    record,
    saved_besides,
)
from hybrid.networks.stage_module import NetworkPass, StageModule
from hybrid.networks.units import Unit, full_name
from hybrid.solvers.acting import nearest
from hybrid.solvers.numerics.attributes import (
    ELSEWHERE,
    attributes,
    copy_attributes,
    find_closed,
    is_number,
    user_modules,
)

FIRST = 1 << 20
"""The first number of a network's calls, beyond those of units."""


class Calls:
    """Records two passes of a module over a few samples, and finds where it may be cut.

    A cut lies before a call of a module with parameters. Modules without a list of modules inside
    stay whole, unless one of `cuts` is in them. What crosses are tensors that depend on parameters
    or on inputs that are no integers, with a row for each sample. Inputs that are integers go
    along if they are needed, or if there are several, whose lengths may vary. A place is left out
    where the parts do not have the outputs and gradients of the whole.

    The module may be a part of a larger network: `prefix` is its path there, and `place` its place
    among the parts that run one after the other.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        cuts: Sequence[str] = (),
        opened: Collection[str] = (),
        prefix: str = "",
        place: int = 0,
    ) -> None:
        """`opened` are cut inside, beside modules with a list of modules, or with one of `cuts`."""
        self.model, self.prefix = model, prefix
        self._first_number = FIRST * (1 + place)
        self.network = WatchedNetwork(model)
        """The copy on which single units run."""
        self.fault = ""
        """Why the network cannot be cut somewhere."""
        self._faults: dict[str, str] = {}
        """By a module's path, why there is no cut before it."""
        self._stages: dict[tuple[int, int, bool], StageModule] = {}
        before, passes = saved_besides(model), [*record(self.network, inputs)]
        after = saved_besides(model)
        for name in [n for n in {**before, **after} if before.get(n) != after.get(n)][:1]:
            raise ValueError(
                f"{type(model).__name__} saves {name!r}, no parameter or buffer, which a pass "
                "changes: a library that quantizes weights must leave them as they are"
            )
        self._divided = find_divided(self.network.copy, cuts, opened)
        self._settle(inputs, passes, self._choose(inputs, passes))
        self._drop_faulty(inputs, passes)

    def _choose(self, inputs: Any, passes: Sequence[PassRecorder]) -> list[StageInterface]:
        """The boundaries alike in training and evaluation, of modules that are not kept whole."""
        training, evaluation = map(find_boundaries, passes)
        changed = {name.rpartition(".")[0]: name for each in passes for name in each.changed}
        leaves = tree_leaves(inputs)
        integers = [i for i, x in enumerate(leaves) if not x.is_floating_point()]
        interfaces = []
        for id, one in training.items():
            if (id[-2][0] if len(id) > 1 else "") not in self._divided:
                continue
            place = agree(one, evaluation.get(id))
            reads = [passes[0].read.get(id[:n], (one.time, "")) for n in range(len(id))]
            if any(time < one.time for time, _ in reads):
                place = (
                    f"the code around it reads numbers of a tensor ({min(reads)[1]}) before, on "
                    "which its calls may depend: move that code into a separate module, or cut "
                    "outside of it"
                )
            if buffer := next((changed[path] for path in one.around if path in changed), None):
                place = (
                    f"the forward writes to the buffer {buffer!r}: move that code into the forward "
                    "of a separate module, which has the buffer"
                )
            if isinstance(place, str):
                self._note_fault(one, place)
            else:
                needed = len(leaves) > 1 or passes[0].integers_needed >= one.time
                interfaces.append(replace(place, integers=tuple(integers) if needed else ()))
        for _, line in [*passes[0].read.values()][:1] if not training else ():
            self.fault = f"its calls depend on numbers ({line}): move that code into a module"
        return interfaces

    def _note_fault(self, place: StageInterface, fault: str) -> None:
        self._faults |= {name: fault for name in place.names if name not in self._faults}
        self.fault = self.fault or f"no cut before {place.names[0]!r}: {fault}"

    def _settle(
        self, inputs: Any, passes: Sequence[PassRecorder], interfaces: list[StageInterface]
    ) -> None:
        """Decide where the network is cut into units, and which unit has each tensor."""
        training, evaluation = passes
        self._stages.clear()
        self.interfaces = interfaces
        opened = frozenset[str]().union(*(each.around for each in interfaces))
        drawing = training.drawing.keys() | evaluation.drawing.keys()
        random = frozenset[Any]().union(*(p.drawing.get(m, ()) for p in passes for m in opened))
        leaves, structure = tree_flatten(inputs)
        self.whole = NetworkPass(
            structure,
            tuple(x[:1].expand(SAMPLES, *x.shape[1:]).to("meta") for x in leaves),
            opened,
            frozenset() if random else find_closed(self.model, opened),
            {
                id: call.outputs
                for id, call in training.calls.items()
                if call.outputs and id in evaluation.calls and evaluation.calls[id].outputs
            },
            random,
        )
        begins = [[each.calls[i.call].begin for i in interfaces] for each in passes]
        units = [*zip(passes, begins, strict=True)]
        self._owners = find_owners(self.model, units)
        """By the name of every tensor that is saved, the units that use it, in order."""
        buffers = dict(self.network.copy.named_buffers(remove_duplicate=False))
        self._changed = {
            name: {
                bisect_right(times, t)
                for each, times in units
                for t, _ in each.uses_of(name, buffers[name])
            }
            for name in {name for each in passes for name in each.changed} & buffers.keys()
        }
        """By the name of a buffer that the pass changes, the units that use it."""
        self._number_calls(training, {*drawing} - opened)

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self.interfaces) + 1

    def units(self) -> list[Unit]:
        """The pieces between all places where it may be cut: a unit is never cut."""
        return [
            CallUnit(
                name, {self.prefix: self.stage(i, i + 1, False)}, calls=self, start=i, stop=i + 1
            )
            for i, name in enumerate(self.unit_names)
        ]

    @property
    def unit_names(self) -> list[str]:
        """The innermost module that begins each unit and is not cut itself, such as "layers.3".

        A module that is called again has "@1" behind its name, and all have the prefix of a part,
        whose own name the first unit has.
        """
        seen, names = Counter[str](), []
        for begin in (self._first, *(each.names for each in self.interfaces)):
            # the element of a list of one has no parent that is divided: it is the outermost
            inner = [path for path in begin if path.rpartition(".")[0] in self._divided]
            name = [begin[0], *inner][-1]
            names.append(f"{name}@{seen[name]}" if seen[name] else name)
            seen[name] += 1
        return [full_name(self.prefix, n) if i else self.prefix or n for i, n in enumerate(names)]

    def find_units_named(self, cuts: Sequence[str]) -> list[str]:
        """The units that begin with these modules; ValueError if there is no such place."""
        pairs = zip(self.unit_names[1:], self.interfaces, strict=True)
        units = {
            n: u
            for u, each in pairs
            for n in (u, *map(partial(full_name, self.prefix), each.names))
        }
        for cut in cuts:
            if cut not in units and cut != self.prefix:
                other = f"it is no module with parameters, or {self.fault or 'nothing can cross'}"
                inner = cut.removeprefix(f"{self.prefix}.")
                fault, near = self._faults.get(inner, other), nearest(cut, units, 0.6)
                hint = f"did you mean {near!r}?" if near else f"known: {', '.join(units) or 'none'}"
                raise ValueError(
                    f"there is no cut before {cut!r} in {type(self.model).__name__}: "
                    f"{fault}; {hint}"
                )
        return [units.get(cut, cut) for cut in cuts]

    def stage(self, start: int, stop: int, local: bool) -> StageModule:
        """Units start .. stop-1 as one module; `local`: on a copy that has their tensors alone."""
        key = (start, stop, local)
        if key not in self._stages:
            network = self._local_network(start, stop) if local else self.network
            first, last = [None, *self.interfaces, None][start : stop + 1 : stop - start]
            times = [0, *(each.time for each in self.interfaces), 1 << 62]
            numbers = {
                path: tuple(
                    self._first_number + n
                    for n, time in calls
                    if times[start] <= time < times[stop]
                )
                for path, calls in self._numbers.items()
            }
            called = {path: each for path, each in numbers.items() if each}
            self._stages[key] = StageModule(network, self.whole, first, last, called)
        return self._stages[key]

    def networks(self) -> list[nn.Module]:
        """The copies of the model that stages run."""
        return list({id(s.network): s.network.copy for s in self._stages.values()}.values())

    def tensors_of(self, start: int, stop: int) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name, each in the first unit that has it."""
        everything = self.model.state_dict()
        for stage in self._local_stages(start, stop):
            everything |= stage.state_dict()  # a forward may have put others in their place
        return {n: x for n, x in everything.items() if start <= self._owners[n][0] < stop}

    def parameters_of(self, start: int, stop: int) -> dict[str, nn.Parameter]:
        """The parameters by name, each in all units that use it; their copies, where it has any."""
        everything = dict(self.model.named_parameters(remove_duplicate=False))
        for stage in self._local_stages(start, stop):
            everything |= dict(stage.named_parameters(remove_duplicate=False))
        return {n: p for n, p in everything.items() if self._is_used(n, start, stop)}

    def _local_stages(self, start: int, stop: int) -> list[StageModule]:
        """Those of blocks that have any of these units."""
        return [s for (a, b, local), s in self._stages.items() if local and a < stop and start < b]

    def _is_used(self, name: str, start: int, stop: int) -> bool:
        return any(start <= unit < stop for unit in self._owners[name])

    def tied(self, starts: Sequence[int], first: int) -> dict[tuple[int, ...], list[list[str]]]:
        """By the blocks that have them, the names of parameters that several blocks have.

        Blocks start at these units, from number `first` on.
        """
        names: dict[int, list[str]] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        ties: dict[tuple[int, ...], list[list[str]]] = {}
        for each in names.values():
            units = (unit for name in each for unit in self._owners[name])
            if len(blocks := _blocks_of(starts, units, first)) > 1:
                ties.setdefault(blocks, []).append([full_name(self.prefix, name) for name in each])
        return ties

    def check_changed(self, starts: Sequence[int], first: int) -> None:
        """ValueError for a buffer that the pass changes, and that several blocks use."""
        for name, units in self._changed.items():
            blocks = _blocks_of(starts, units, first)
            if len(blocks) > 1:
                raise ValueError(
                    f"blocks {blocks[0]} and {blocks[1]} share the statistic "
                    f"{full_name(self.prefix, name)!r}, and their "
                    "copies would drift apart: cut elsewhere, or give each its own"
                )

    def take_attributes(self) -> None:
        """Let the copies of the model have its attributes as they are."""
        models = user_modules(self.model)
        for network in self.networks():
            for path, module in user_modules(network).items():
                copy_attributes(models[path], module)

    def sync_buffers(self, starts: Sequence[int], own: Collection[int]) -> None:
        """Let the model have the buffers and attributes that its blocks have put anew.

        Of several blocks the last one has come to the end of a module's code. Those that start at
        `own` have been trained in this process.
        """
        for start, stop in pairwise((*starts, self.count)):
            for name, buffer in self.stage(start, stop, True).named_buffers():
                path, _, field = name.rpartition(".")
                self.model.get_submodule(path)._buffers[field] = buffer
        for start, path, module in self._executed(starts):
            if start in own:
                copy_attributes(module, self.model.get_submodule(path))

    def check_numbers(self, starts: Sequence[int]) -> None:
        """ValueError if a pass of all blocks has left numbers in a module that differ between them.

        Code behind a cut is run by the blocks behind it alone.
        """
        seen: dict[tuple[str, str], Any] = {}
        for start, path, module in self._executed(starts):
            for name, value in attributes(module).items():
                if is_number(value) and seen.setdefault((path, name), value) != value:
                    raise ValueError(
                        f"{path or type(self.model).__name__} changes its attribute {name!r} "
                        f"behind the cut before {self.unit_names[start]}, and the block before it "
                        "does not come there: change it where the forward begins, or in a module "
                        "of its own, or cut elsewhere"
                    )

    def _executed(self, starts: Sequence[int]) -> Iterator[tuple[int, str, nn.Module]]:
        """The first unit of each block, and the user's modules that it has run, by path."""
        for start, stop in pairwise((*starts, self.count)):
            network = self.stage(start, stop, True).network
            for path, module in user_modules(network.copy).items():
                if path in network.executed:
                    yield start, path, module

    def _local_network(self, start: int, stop: int) -> WatchedNetwork:
        """A copy with the tensors of its units; others are there for their shapes, unnamed.

        It has copies of parameters that an earlier block has, too.
        """
        network = WatchedNetwork(self.model)
        units: dict[int, set[int]] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            units.setdefault(id(weight), set()).update(self._owners[name])
        copies: dict[int, nn.Parameter] = {}
        for path, module in network.copy.named_modules():
            remote = vars(module)[ELSEWHERE] = []
            for table in (module._parameters, module._buffers):
                for name, x in [*table.items()]:
                    used, full = units.get(id(x), set[int]()), full_name(path, name)
                    if used and min(used) < start and any(start <= unit < stop for unit in used):
                        copy = nn.Parameter(x.detach().clone(), x.requires_grad)
                        table[name] = copies.setdefault(id(x), copy)
                    if full in self._owners and not self._is_used(full, start, stop):
                        vars(module)[name] = table.pop(name)
                        remote.append(name)
        return network

    def _drop_faulty(self, inputs: Any, passes: Sequence[PassRecorder]) -> None:
        """Leave out the places before which the units do not compute what the network does."""
        check = CutCheck(self.network.copy, tree_map(lambda x: x[:SAMPLES], inputs))
        while self.interfaces:
            fault, unit = check.fault([self.stage(i, i + 1, False) for i in range(self.count)])
            if not fault:
                return
            faults = {max(0, (unit or 0) - 1): fault}
            if unit is None and len(self.interfaces) > 1:  # which place it is shows by itself
                halves = (
                    [self.stage(0, i + 1, False), self.stage(i + 1, self.count, False)]
                    for i in range(len(self.interfaces))
                )
                alone = dict(enumerate(check.fault(each)[0] for each in halves))
                faults = {i: fault for i, fault in alone.items() if fault}
                faults = faults or dict.fromkeys(alone, fault)
            for i, fault in faults.items():
                self._note_fault(self.interfaces[i], fault)
            left = [each for i, each in enumerate(self.interfaces) if i not in faults]
            self._settle(inputs, passes, left)

    def _number_calls(self, recorder: PassRecorder, drawing: set[str]) -> None:
        """The calls of each module that draws: their numbers in the whole pass, and their times."""
        self._numbers: dict[str, list[tuple[int, int]]] = {}
        first: list[str] = []
        for number, call in enumerate(recorder.calls.values()):
            inside = not first or call.path.startswith(f"{first[-1]}.")
            if call.id and inside and call.path in self.network.stateful:
                first.append(call.path)
            if call.path in drawing:
                self._numbers.setdefault(call.path, []).append((number, call.begin))
        called, count = {call.path for call in recorder.calls.values()}, len(recorder.calls)
        for number, (path, module) in enumerate(self.network.copy.named_modules(), count):
            drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
            if drops and path not in called:
                self._numbers[path] = [(number, recorder.begins(path)[0])]  # of an expert
        self._first = first or ["inputs"]
        """The modules that begin the first unit, the outermost first."""


def _blocks_of(starts: Sequence[int], units: Iterable[int], first: int) -> tuple[int, ...]:
    """The blocks, numbered from `first` on, that have units, in order."""
    return tuple(sorted({first + bisect_right(starts, unit) - 1 for unit in units}))
