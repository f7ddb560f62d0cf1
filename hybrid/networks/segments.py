"""Any module as a chain of units: its traced graph, cut where few tensors are alive."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _copy_attr
from torch.utils._pytree import tree_map

from hybrid.networks.tracing import trace, writes_in_place
from hybrid.networks.units import Unit, mode
from hybrid.solvers.acting import nearest

FIRST = 1 << 20
"""The first number of a graph's calls, beyond those of units."""


@dataclass(frozen=True)
class Boundary:
    """A place in a graph where it may be cut."""

    at: int
    """The number of nodes before it."""
    names: tuple[str, ...]
    """Qualified names of the modules that begin there, the outermost first."""
    alive: tuple[fx.Node, ...]
    """The tensors that cross it."""


class Graph:
    """A traced module, and where it may be cut.

    A boundary lies before a module with parameters, if all that is alive there are tensors with one
    row for each sample, and none of them is changed in place later.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = model
        self._saved = set(model.state_dict())
        self.traced = trace(model, inputs)
        beside = ("placeholder", "output", "get_attr")
        self.steps = [n for n in self.traced.graph.nodes if n.op not in beside]
        tensors, self._memory = _find_row_tensors(model, self.traced, inputs)
        self.boundaries = [b for b in self._boundaries() if tensors.issuperset(b.alive)]

    def units(self) -> list[Unit]:
        """The pieces between all boundaries: a unit is never cut."""
        chosen = [b for b in self.boundaries if b.at > 0]
        first = next((b.names[0] for b in self.boundaries if b.at == 0), "inputs")
        starts = [0, *[b.at for b in chosen], len(self.steps)]
        alive: list[tuple[fx.Node, ...] | None] = [None, *[b.alive for b in chosen], None]
        names = [first, *[b.names[0] for b in chosen]]
        units = [
            Unit(name, {"": self._segment(starts[i], starts[i + 1], alive[i], alive[i + 1])})
            for i, name in enumerate(names)
        ]
        self._keep_rest(units)
        return units

    def find_units_named(self, cuts: Sequence[str]) -> list[str]:
        """The units that begin with these modules; ValueError if there is no such boundary."""
        known = {name: b.names[0] for b in self.boundaries if b.at for name in b.names}
        for cut in cuts:
            if cut not in known:
                near = nearest(cut, known, 0.6)
                hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(
                    f"there is no cut before {cut!r} in {type(self.model).__name__}: it is "
                    f"no module with parameters, or other things than tensors would cross; {hint}"
                )
        return [known[cut] for cut in cuts]

    @property
    def widths(self) -> list[int]:
        """How many tensors go into each unit but the first."""
        return [len(b.alive) for b in self.boundaries if b.at]

    def _keep_rest(self, units: list[Unit]) -> None:
        """Give the last unit the tensors that nothing uses: a checkpoint holds all tensors."""
        known = {name for unit in units for name in unit.tensors()}
        for name in sorted(self._saved - known):
            _copy_attr(self.model, units[-1].parts[""], name)

    def _boundaries(self) -> list[Boundary]:
        boundaries, seen = [], set[str]()
        inputs = [n for n in self.traced.graph.nodes if n.op == "placeholder"]
        place = {node: i for i, node in enumerate(self.steps)}
        last_use = {
            # the output comes after all steps
            n: max((place.get(user, len(place)) for user in n.users), default=-1)
            for n in [*inputs, *self.steps]
        }
        changed = [
            (i, a)
            for i, n in enumerate(self.steps)
            if self._in_place(n)
            for written in n.all_input_nodes[:1]
            for a in [*inputs, *self.steps[:i]]
            if a is written or self._memory.get(a, -1) == self._memory.get(written)
        ]
        for i, node in enumerate(self.steps):
            # a module that is called again has "@1" behind its name
            stack = [p for p in node.meta.get("nn_module_stack", {}) if p and "@" not in p]
            names = tuple(path for path in stack if path not in seen)
            seen.update(stack)
            if not names or not any(True for _ in self.model.get_submodule(names[0]).parameters()):
                continue
            alive = tuple(n for n in [*inputs, *self.steps[:i]] if last_use[n] >= i)
            if not any(at >= i and written in alive for at, written in changed):
                boundaries.append(Boundary(i, names, alive))
        return boundaries

    def _in_place(self, node: fx.Node) -> bool:
        """Whether the node changes its first input."""
        if node.op != "call_module":
            return writes_in_place(node)
        return bool(getattr(self.traced.get_submodule(str(node.target)), "inplace", False))

    def _segment(
        self,
        start: int,
        end: int,
        enters: tuple[fx.Node, ...] | None,
        leaves: tuple[fx.Node, ...] | None,
    ) -> fx.GraphModule:
        """Steps start .. end-1 as a module, with the whole model's names.

        Its input is the one tensor in `enters`, or a tuple of several, and its output likewise
        those in `leaves`. None stands for the model's own inputs or outputs.
        """
        graph, old = fx.Graph(), self.traced.graph
        env: dict[fx.Node, fx.Node] = {}
        if enters is None:
            env = {n: graph.node_copy(n) for n in old.nodes if n.op == "placeholder"}
        else:
            value = graph.placeholder("value")
            for i, node in enumerate(enters):
                several = len(enters) > 1
                env[node] = graph.call_function(operator.getitem, (value, i)) if several else value

        def copied(node: fx.Node) -> fx.Node:
            if node not in env:
                assert node.op == "get_attr"
                env[node] = graph.node_copy(node)
            return env[node]

        for place, node in enumerate(self.steps[start:end], start):
            env[node] = graph.node_copy(node, copied)
            env[node].meta["place"] = place
        if leaves is None:
            output = next(n for n in old.nodes if n.op == "output")
            graph.output(fx.map_arg(output.args[0], copied))
        else:
            values = tuple(copied(node) for node in leaves)
            graph.output(values if len(values) > 1 else values[0])
        segment = fx.GraphModule(self.traced, graph, type(self.model).__name__)
        for name, _ in [*segment.named_buffers(remove_duplicate=False)]:
            if name not in self._saved:
                path, _, field = name.rpartition(".")
                segment.get_submodule(path)._non_persistent_buffers_set.add(field)
        return segment


def number_module_calls(segment: fx.GraphModule) -> dict[nn.Module, tuple[int, ...]]:
    """The modules that a segment calls, and the places of the calls in the whole graph."""
    numbers: dict[nn.Module, tuple[int, ...]] = {}
    for node in segment.graph.nodes:
        if node.op == "call_module":
            module = segment.get_submodule(str(node.target))
            numbers[module] = (*numbers.get(module, ()), FIRST + node.meta["place"])
    return numbers


def _find_row_tensors(
    model: nn.Module, traced: fx.GraphModule, inputs: Any
) -> tuple[set[fx.Node], dict[fx.Node, int]]:
    """The nodes that are tensors with one row for each of two and of three samples.

    And the memory address of every tensor, by which views of one memory are known.
    """
    rows: list[set[fx.Node]] = []
    for count in (2, 3):
        some = tree_map(lambda x, n=count: _repeat_rows(x, n), inputs)
        values = _Values(traced)
        if isinstance(some, dict):
            names = [n.target for n in traced.graph.nodes if n.op == "placeholder"]
            arguments = [some[name] for name in names if name in some]
        else:
            arguments = [*some] if isinstance(some, tuple | list) else [some]
        try:
            with mode(model, training=False), torch.no_grad():
                values.run(*arguments)
        except Exception as error:  # whatever a user's module raises
            shapes = ", ".join(str(tuple(x.shape[1:])) for x in arguments)
            raise ValueError(
                f"sample of shape {shapes} does not fit {type(model).__name__}, which says: "
                f"{(str(error).splitlines() or ['nothing'])[0]}"
            ) from None
        rows.append({n for n, shape in values.shapes.items() if shape[:1] == (count,)})
    return rows[0] & rows[1], {n: x.data_ptr() for n, x in values.memory.items()}


def _repeat_rows(x: Tensor, count: int) -> Tensor:
    if len(x) == 0:
        raise ValueError("sample has no rows: give a batch of inputs with at least one")
    return x[torch.arange(count) % len(x)]


class _Values(fx.Interpreter):
    """Keeps the shape and memory of every node's value that is a tensor."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.memory: dict[fx.Node, torch.UntypedStorage] = {}
        """While it is referred to, no other storage has its address."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n], self.memory[n] = value.shape, value.untyped_storage()
        return value
