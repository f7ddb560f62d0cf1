"""The graph: named nodes, and edges from outputs to inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hybrid.solvers.acting import unknown
from hybrid_messages.control import Loss
from hybrid_messages.layer import Layer
from hybrid_messages.node import Letter, Message, Node


class Graph:
    """Nodes by name, and edges (from, to): "name" or "name:port", the first port being 0.

    Every port has one edge. To send one output to two nodes, put a `Bcast` between; to bring two
    outputs to one input, a `Phi` (either of them) or a `Sum` (both). Circles are allowed.
    """

    def __init__(self, nodes: Mapping[str, Node], edges: Iterable[tuple[str, str]]) -> None:
        self.names, self.nodes = list(nodes), list(nodes.values())
        self._up: list[dict[int, tuple[int, int]]] = [{} for _ in nodes]
        self._down: list[dict[int, tuple[int, int]]] = [{} for _ in nodes]
        for start, end in edges:
            self._join(self._port(start), self._port(end), f"{start} -> {end}")
        self._check()

    def index(self, name: str) -> int:
        """The number of a node; ValueError for an unknown name."""
        if name not in self.names:
            raise ValueError(unknown(name, self.names, "node"))
        return self.names.index(name)

    @property
    def layers(self) -> dict[str, Layer]:
        """The nodes that learn."""
        pairs = zip(self.names, self.nodes, strict=True)
        return {name: node for name, node in pairs if isinstance(node, Layer)}

    @property
    def losses(self) -> list[Loss]:
        """The nodes where messages turn around."""
        return [node for node in self.nodes if isinstance(node, Loss)]

    def handle(self, at: int, forward: bool, message: Message, learn: bool) -> list[Letter]:
        """What a node sends for a message; an error names the node."""
        node, state = self.nodes[at], message.state
        try:
            sent = node.forward(message, learn) if forward else node.backward(message)
        except Exception as error:
            kind = "" if type(error) in (ValueError, RuntimeError) else f"{type(error).__name__}: "
            text, shape = str(error).partition("\n")[0], tuple(message.payload.shape)
            raise ValueError(
                f"node {self.names[at]!r}, {state}, payload {shape}: {kind}{text}"
            ) from error
        for each in sent:
            if each.state.instance != state.instance:
                raise ValueError(
                    f"node {self.names[at]!r} sends a message of instance {each.state.instance} "
                    f"for one of {state}: states must keep their instance"
                )
        rises = forward and not isinstance(node, Loss)
        ways = self._up[at] if rises else self._down[at]
        targets = [ways[each.port] for each in sent]
        return [
            Letter(to, rises, Message(port, each.state, each.payload))
            for (to, port), each in zip(targets, sent, strict=True)
        ]

    def check_forgotten(self, instance: int) -> None:
        """ValueError if a node still keeps something of an instance that has ended."""
        for name, node in zip(self.names, self.nodes, strict=True):
            if left := node.waiting_states(instance):
                raise ValueError(
                    f"node {name!r} still waits for messages of {left[0]}"
                    f"{f' and {len(left) - 1} more' if left[1:] else ''}, and none is under way"
                )

    def _port(self, end: str) -> tuple[int, int]:
        name, _, port = end.partition(":")
        return self.index(name), int(port or 0)

    def _join(self, start: tuple[int, int], end: tuple[int, int], edge: str) -> None:
        for (at, port), ways, other, kind, remedy in (
            (start, self._up, end, "output", "Bcast"),
            (end, self._down, start, "input", "Phi or a Sum"),
        ):
            name, ports = self.names[at], getattr(self.nodes[at], f"{kind}s")
            if port >= ports:
                raise ValueError(f"{edge}: {name!r} has {ports} {kind}s, so no {kind} {port}")
            if port in ways[at]:
                raise ValueError(
                    f"{edge}: {kind} {port} of {name!r} has an edge already; put a {remedy} there"
                )
            ways[at][port] = other

    def _check(self) -> None:
        for kind, ways in (("output", self._up), ("input", self._down)):
            for name, node, joined in zip(self.names, self.nodes, ways, strict=True):
                for port in range(getattr(node, f"{kind}s")):
                    if port not in joined:
                        raise ValueError(f"{kind} {port} of {name!r} has no edge")
        owner: dict[int, str] = {}
        for name, layer in self.layers.items():
            for parameter in layer.parameters:
                other = owner.setdefault(id(parameter), name)
                if other != name:
                    raise ValueError(
                        f"{other!r} and {name!r} share a parameter; make them one layer, with a"
                        " Phi before it and a Cond behind it"
                    )
