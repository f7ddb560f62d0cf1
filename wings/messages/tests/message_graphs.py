"""Small graphs of nodes in float64, and the same networks by plain autograd."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid_messages import Entry, Graph, Layer, Loss, Node, Source

WIDTH = 3


class Key(NamedTuple):
    instance: int
    place: Any = 0


def modules(*names: str) -> dict[str, nn.Module]:
    """A small non-linear module a name, of seeded weights."""
    torch.manual_seed(0)
    return {name: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for name in names}


def layers(modules: Mapping[str, nn.Module], every: int) -> dict[str, Layer]:
    """A layer each, SGD with lr 1, so that a step shows the gradient."""
    return {
        name: Layer(module, torch.optim.SGD(module.parameters(), lr=1.0), every)
        for name, module in modules.items()
    }


def graph(nodes: Mapping[str, Node], edges: Iterable[tuple[str, str]]) -> Graph:
    """With a source "in" and a loss "loss" against 1."""
    loss = Loss(lambda x, y: (x - y).square().sum(), lambda key: torch.ones(()).double())
    return Graph({"in": Source(), **nodes, "loss": loss}, edges)


def samples(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *(shape or (WIDTH,)), dtype=torch.float64, generator=generator())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def entries(inputs: Sequence[Tensor]) -> list[list[Entry]]:
    return [[Entry("in", Key(number), x)] for number, x in enumerate(inputs)]


def dense_step(
    modules: Mapping[str, nn.Module],
    counts: Mapping[str, int],
    network: Callable[[int], Tensor],
    instances: int,
) -> dict[str, list[Tensor]]:
    """Weights after one step with lr 1 of the gradient over `counts`, by plain autograd."""
    for instance in range(instances):
        (network(instance) - 1).square().sum().backward()
    return {
        name: [
            w.detach().clone() if w.grad is None else w.detach() - w.grad / max(1, counts[name])
            for w in module.parameters()
        ]
        for name, module in modules.items()
    }


def assert_empty(graph: Graph) -> None:
    """Nothing is left in any cache."""
    assert not any(cache._items for node in graph.nodes for cache in node.caches())


def assert_stepped(modules, expected, tolerance=1e-12):
    for name, module in modules.items():
        for w, wanted in zip(module.parameters(), expected[name], strict=True):
            assert (w.detach() - wanted).abs().max() <= tolerance, name
