"""Side effects of a trace or a graph: constants in the model, writes in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.graph import inplace_methods


@contextmanager
def collect_constants(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A context that collects the tensors that a trace adds to the model, and removes them."""
    before, found = set(vars(model)), dict[str, Tensor]()
    try:
        yield found
    finally:
        for name in set(vars(model)) - before:
            if name.startswith("_tensor_constant"):
                found[name] = vars(model).pop(name)


def list_buffer_versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity and version of each buffer, which change when it is replaced or written to."""
    return {name: (id(b), b._version) for name, b in model.named_buffers(remove_duplicate=False)}


def find_written_buffer(before: dict[str, Any], model: nn.Module, graph: fx.Graph) -> str | None:
    """A buffer that the trace has changed, or that the graph would change; None: no buffer."""
    after = list_buffer_versions(model)
    changed = [name for name in before if before[name] != after.get(name)]
    to = [n.all_input_nodes[0] for n in graph.nodes if writes_in_place(n) and n.all_input_nodes]
    changed += [str(n.target) for n in to if n.op == "get_attr" and n.target in before]
    return changed[0] if changed else None


def find_writing_module(
    model: nn.Module, buffer: str, whole: set[type[nn.Module]]
) -> type[nn.Module]:
    """The class of the module that writes to this buffer; ValueError if it is the model itself."""
    owner = model.get_submodule(buffer.rpartition(".")[0])
    if owner is model or type(owner) in whole:
        raise ValueError(
            f"{type(model).__name__} cannot be cut: its forward writes to the buffer {buffer!r}: "
            "move that code into the forward of a module of its own, which has the buffer"
        )
    return type(owner)


def writes_in_place(node: fx.Node) -> bool:
    """Whether the node is a function that changes its first input."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    named = name.endswith("_") and not name.endswith("__")
    written = name in inplace_methods or name == "setitem"
    return named or written or node.kwargs.get("inplace") is True
