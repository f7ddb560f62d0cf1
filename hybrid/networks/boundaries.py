"""Where a recorded pass may be cut, what crosses there, and which pieces use which tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from torch import Tensor, nn

from hybrid.networks.passes import CallId, Key
from hybrid.networks.recording import INPUT, SAMPLES, Call, Recorder, memory_of


@dataclass(frozen=True)
class Crossing:
    """What crosses a boundary of a network's pass."""

    call: CallId
    """The call that begins there."""
    keys: tuple[Key, ...]
    """The tensors that depend on parameters, or on inputs that are no integers."""
    integers: tuple[int, ...]
    """The places of the inputs that are integers and needed behind it."""
    contexts: frozenset[CallId]
    """The calls that are under way there."""
    alike: frozenset[Key] = frozenset()
    """The tensors that are the same for all samples, which cross as a row for each."""

    def rows(self, tensors: Mapping[Key, Tensor], count: int) -> list[Tensor]:
        """What crosses, a row for each of so many samples."""
        return [
            x.expand(count, *x.shape) if key in self.alike else x
            for key, x in ((key, tensors[key]) for key in self.keys)
        ]

    def tensors(self, rows: Sequence[Tensor]) -> dict[Key, Tensor]:
        """What has crossed, as it was."""
        pairs = zip(self.keys, rows, strict=False)
        return {key: x[0] if key in self.alike else x for key, x in pairs}


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


def find_boundaries(recorder: Recorder) -> dict[CallId, Boundary | str]:
    """The places before calls where it can be told what crosses, and nothing of it changes.

    A text says why others are none.
    """
    births = sorted(
        time for x in recorder.lives.values() for time, key, _ in x.born if key.operation != INPUT
    )
    boundaries, begun = dict[CallId, Boundary | str](), -1
    first: CallId = ()
    weights = [recorder.uses.get(id(p), []) for p in recorder.network.copy.parameters()]
    used = min((time for uses in weights for time, _ in uses), default=inf)
    for call in recorder.calls.values():
        if call.path not in recorder.network.owners or not call.id:
            continue
        if (count := bisect_left(births, call.begin)) == begun:
            before = boundaries.get(first)
            if isinstance(before, Boundary):  # it begins together with the one before
                before.names.append(call.path)
            continue
        begun, first = count, call.id
        if used >= call.begin:
            continue  # there is nothing to train before it
        crossing = _fault(recorder, call) or _crossing(recorder, call)
        if isinstance(crossing, str):
            boundaries[call.id] = crossing
        elif crossing:
            contexts = frozenset(around.id for around in call.ancestors())
            boundaries[call.id] = Boundary(call.begin, contexts, [call.path], crossing)
    return boundaries


def _fault(recorder: Recorder, call: Call) -> str:
    """Why the code around a call must not be cut before it; "" if it may."""
    for since, when, line in recorder.gradients:
        if since < call.begin < when:
            return (
                f"the forward takes a gradient ({line}) of what is computed there: cut "
                "elsewhere, or leave it whole"
            )
    fault = recorder.enclosed.get(call.id, "")
    for around in call.ancestors():
        code = f"code in {around.path or 'the forward'!r}"
        read, line = recorder.read.get(around.id, (inf, ""))
        if read < call.begin:
            fault = (
                f"{code} reads numbers of a tensor ({line}) before, on which its calls may "
                "depend: move that code into a module of its own, or cut outside of it"
            )
        if around.id in recorder.unseen:
            fault = (
                f"{code} uses a tensor ({recorder.unseen[around.id]}) whose making cannot be "
                "watched (torch.jit, torch.func, a C++ extension, numpy): "
                "move the code that makes it into a module of its own, or cut outside of it"
            )
    return fault


def _crossing(recorder: Recorder, call: Call) -> dict[Key, Tensor] | str:
    """What is alive when a call begins, in the order of its birth; else why that is not known.

    A tensor that came to be inside a call which has ended, and did not leave it as what the
    call gives, is not to be had there. Nor is one that is written to later, or was by way of
    another tensor that shares its memory.
    """
    crossing: list[tuple[int, Key, Tensor]] = []
    written: dict[int, tuple[int, str]] = {
        memory: (time, each.path) for time, memory, each in recorder.written
    }
    for x in recorder.lives.values():
        past = [birth for birth in x.born if birth[0] < call.begin]
        if not past or x.last_use < call.begin or isinstance(x.tensor, nn.Parameter):
            continue
        there = [birth for birth in past if _is_under_way(birth[2], call.begin)]
        if not there:
            return f"a tensor that is made inside {past[-1][2].path!r} is used behind it"
        when, where = written.get(memory_of(x.tensor), (-1, ""))
        if when > there[-1][0]:
            return (
                f"code in {where or 'the forward'!r} writes to a tensor of shape "
                f"{tuple(x.tensor.shape)} in place that would cross: let it make a new one"
            )
        if x.replaced_later and x.last_function > call.begin:
            return (
                f"a tensor of shape {tuple(x.tensor.shape)} would cross from a "
                "torch.autograd.Function, or one written to, into a torch.autograd.Function "
                "(or torch.utils.checkpoint with use_reentrant=True): cut elsewhere"
            )
        crossing.append((there[-1][0], there[-1][1], x.tensor))
    return {key: x for _, key, x in sorted(crossing, key=lambda each: each[:2])}


def _is_under_way(call: Call, time: int) -> bool:
    """Whether what comes to be within a call is to be had at that time."""
    return not any(each.own and each.end <= time for each in (call, *call.ancestors()))


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


def find_not_called(model: nn.Module, recorder: Recorder) -> dict[str, list[int]]:
    """By the paths of modules that were not called, when the one around them that was began."""
    begun = recorder.begun()
    found: dict[str, list[int]] = {}
    for path, _ in model.named_modules(remove_duplicate=False):
        if path not in begun:
            around = path.rpartition(".")[0]
            found[path] = begun.get(around, found.get(around, [])) if around else []
    return found


def find_owners(
    model: nn.Module, passes: Sequence[tuple[Recorder, Sequence[int]]]
) -> dict[str, list[int]]:
    """By the name of every tensor that is saved, the units that use it, in order.

    `passes`: recorded passes, and when their units but the first begin. Whatever operation takes a
    tensor uses it, in the unit in which that happens. Of several names of one tensor those of the
    module whose code it is are meant, or else all; a name of which no use is known is used where
    the tensor is.
    """
    saved = model.state_dict(keep_vars=True)
    saved |= dict(model.named_parameters(remove_duplicate=False))
    aliases: dict[int, tuple[Tensor, list[str]]] = {}
    for name, x in saved.items():
        aliases.setdefault(id(x), (x, []))[1].append(name)
    owners: dict[str, set[int]] = {name: set() for name in saved}
    for x, names in aliases.values():
        everywhere = set[int]()
        for recorder, times in passes:
            for time, where in recorder.uses_of(x):
                unit = bisect_right(times, time)
                everywhere.add(unit)
                for name in [n for n in names if n.rpartition(".")[0] == where] or names:
                    owners[name].add(unit)
        for name in names:
            owners[name] |= set() if owners[name] else everywhere
    recorder, times = passes[0]
    begun = find_not_called(model, recorder) | recorder.begun()
    for name, units in owners.items():
        if not units:  # such as an expert's, or statistics that are only written to
            when = begun.get(name.rpartition(".")[0], [])
            units.update([bisect_right(times, t) for t in when] or [len(times)])
    return {name: sorted(units) for name, units in owners.items()}


def find_changed(
    model: nn.Module, passes: Sequence[tuple[Recorder, Sequence[int]]]
) -> dict[str, set[int]]:
    """By the name of a buffer that a pass changes, the units that use it; `passes` as above."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    changed = {name for recorder, _ in passes for name in recorder.changed()}
    return {
        name: {bisect_right(times, t) for r, times in passes for t, _ in r.uses_of(buffers[name])}
        for name in buffers
        if name in changed
    }
