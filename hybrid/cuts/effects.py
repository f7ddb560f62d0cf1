"""What a trace leaves behind or a graph does beside its values: constants, writes in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.graph import inplace_methods


@contextmanager
def constants_made(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The tensors that a trace makes on its way; the model is rid of them afterwards."""
    before, found = set(vars(model)), dict[str, Tensor]()
    try:
        yield found
    finally:
        for name in set(vars(model)) - before:
            if name.startswith("_tensor_constant"):
                found[name] = vars(model).pop(name)


def versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """What tells whether a buffer is the same, and unchanged."""
    return {name: (id(b), b._version) for name, b in model.named_buffers(remove_duplicate=False)}


def written_buffer(before: dict[str, Any], model: nn.Module, graph: fx.Graph) -> str | None:
    """A buffer that the trace has changed, or that the graph would."""
    after = versions(model)
    changed = [name for name in before if before[name] != after.get(name)]
    to = [n.all_input_nodes[0] for n in graph.nodes if in_place(n) and n.all_input_nodes]
    changed += [str(n.target) for n in to if n.op == "get_attr" and n.target in before]
    return changed[0] if changed else None


def writer(model: nn.Module, buffer: str, whole: set[type[nn.Module]]) -> type[nn.Module]:
    """The kind of the module that writes to its buffer; ValueError if that is the model itself."""
    owner = model.get_submodule(buffer.rpartition(".")[0])
    if owner is model or type(owner) in whole:
        raise ValueError(
            f"{type(model).__name__} cannot be cut: its forward writes to the buffer {buffer!r}: "
            "move that code into the forward of a module of its own, which has the buffer"
        )
    return type(owner)


def in_place(node: fx.Node) -> bool:
    """Whether it is a function that changes its first input."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    named = name.endswith("_") and not name.endswith("__")
    written = name in inplace_methods or name == "setitem"
    return named or written or node.kwargs.get("inplace") is True
