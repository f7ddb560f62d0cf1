"""A module's graph by torch's tracer; modules that cannot be traced stay whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from math import inf
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import inplace_methods
from torch.fx.proxy import TraceError

from hybrid.errors import code_line, one_line
from hybrid.networks.units import mode

ATTEMPTS = 50
"""Most classes of modules that may turn out to be untraceable."""


class _Tracer(fx.Tracer):
    """Traces into every module except torch's own and those that cannot be traced."""

    def __init__(self, whole: set[type[nn.Module]]) -> None:
        super().__init__()
        self.whole = whole
        self.inside: list[nn.Module] = []
        """The modules that are being traced, the outermost first."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) is nn.TransformerEncoder:
            return type(m) in self.whole
        return type(m) in self.whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        self.inside.append(m)
        if type(m) is nn.TransformerEncoder and type(m) not in self.whole:
            forward = _layers_of(m)
        out = super().call_module(m, forward, args, kwargs)
        self.inside.pop()  # not after a failure: the innermost module is then last
        return out


def _layers_of(encoder: nn.TransformerEncoder) -> Callable[..., Any]:
    """An encoder's layers one after the other, as it computes them in training."""

    def forward(
        src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
    ) -> Any:
        if isinstance(mask, fx.Proxy):
            raise TraceError("its mask is computed, not a buffer")
        if is_causal is None and mask is not None:
            # as the encoder itself does: this decides which kernel computes attention
            is_causal = _is_causal(mask)
        for layer in encoder.layers:
            src = layer(src, mask, src_key_padding_mask, bool(is_causal))
        return src if encoder.norm is None else encoder.norm(src)

    return forward


def _is_causal(mask: Tensor) -> bool:
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(mask.cpu(), -inf)
    causal = nn.Transformer.generate_square_subsequent_mask(len(mask), dtype=mask.dtype)
    return mask.shape == causal.shape and bool((mask.cpu() == causal).all())


def trace(model: nn.Module, inputs: Any) -> fx.GraphModule:
    """The graph of `model` on `inputs` (a tensor, a tuple by position, a dict by name).

    A class of modules whose forward cannot be traced (its control flow depends on numbers), or
    differs between training and evaluation, is one node of the graph. ValueError, with the line of
    code, if that is the model itself.
    """
    whole: set[type[nn.Module]] = set()
    unused = _default_arguments(model, inputs)
    for _ in range(ATTEMPTS):
        graphs = []
        for training in (True, False):
            tracer = _Tracer(whole)
            try:
                with mode(model, training), collect_constants(model) as constants:
                    before = _buffer_versions(model)
                    graph = tracer.trace(model, dict(unused))
                    written = _written_buffer(before, model, graph)
            except Exception as error:  # a forward may fail in any way on what is no tensor
                whole.add(_untraceable(tracer, model, error))
                break
            if written is not None:
                whole.add(_writing_class(model, written, whole))
                break
            graphs.append((graph, constants))
        else:
            other = _first_difference(model, *graphs)
            if other is None:
                return _as_module(model, *graphs[0])
            whole.add(other)
    name = type(model).__name__
    raise ValueError(f"{name} has more than {ATTEMPTS} kinds of modules that cannot be traced")


def _untraceable(tracer: _Tracer, model: nn.Module, error: Exception) -> type[nn.Module]:
    """The class of the innermost module; ValueError if that is the model itself."""
    if tracer.inside and type(tracer.inside[-1]) not in tracer.whole:
        return type(tracer.inside[-1])
    where = code_line(error) or "somewhere"
    raise ValueError(
        f"{type(model).__name__} cannot be cut: its forward is no graph ({where}: "
        f"{one_line(error)[:160]}); move that code into a module of its own, or write the network "
        "as an nn.Sequential"
    ) from None


def _as_module(model: nn.Module, graph: fx.Graph, constants: dict[str, Tensor]) -> fx.GraphModule:
    with collect_constants(model):
        vars(model).update(constants)
        traced = fx.GraphModule(model, graph)
    # a call whose value is not used may write to its input, or to statistics
    traced.graph.eliminate_dead_code(
        lambda n: n.op == "call_module" or writes_in_place(n) or n.is_impure()
    )
    return traced


def _first_difference(
    model: nn.Module,
    training: tuple[fx.Graph, dict[str, Tensor]],
    evaluation: tuple[fx.Graph, dict[str, Tensor]],
) -> type[nn.Module] | None:
    """The class of the first module whose graph differs between training and evaluation.

    ValueError if that is the model itself.
    """
    (one, constants), (other, others) = training, evaluation
    for a, b in zip_longest(one.nodes, other.nodes):
        same = a and b and _describe(a) == _describe(b)
        if same and a.op == "get_attr" and a.target in constants:
            same = torch.equal(constants[str(a.target)], others[str(b.target)])
        if same:
            continue
        node = a or b
        stack = list(node.meta.get("nn_module_stack", {}))
        if not stack:
            raise ValueError(
                f"{type(model).__name__} cannot be cut: its own forward does something else in "
                f"training than in evaluation (at {node.name}): move that code into a module of "
                "its own"
            )
        return type(model.get_submodule(stack[-1]))
    return None


def _describe(node: fx.Node) -> tuple[str, ...]:
    return node.op, node.name, str(node.target), str(node.args), str(node.kwargs)


def _default_arguments(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The parameters of forward that get no input, with their defaults."""
    signature = inspect.signature(model.forward)
    try:
        if isinstance(inputs, dict):
            bound = signature.bind(**inputs)
        else:
            bound = signature.bind(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    except TypeError as error:
        raise ValueError(f"{type(model).__name__} does not take these inputs: {error}") from None
    rest = [p for name, p in signature.parameters.items() if name not in bound.arguments]
    return {p.name: p.default for p in rest if p.default is not p.empty}


@contextmanager
def collect_constants(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A context that collects the tensors that a trace adds to the model, and removes them."""
    before, constants = set(vars(model)), dict[str, Tensor]()
    try:
        yield constants
    finally:
        for name in set(vars(model)) - before:
            if name.startswith("_tensor_constant"):
                constants[name] = vars(model).pop(name)


def _buffer_versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity and version of each buffer, which change when it is replaced or written to."""
    return {name: (id(b), b._version) for name, b in model.named_buffers(remove_duplicate=False)}


def _written_buffer(before: dict[str, Any], model: nn.Module, graph: fx.Graph) -> str | None:
    """A buffer that the trace has changed, or that the graph would change; None: no buffer."""
    after = _buffer_versions(model)
    changed = [name for name in before if before[name] != after.get(name)]
    to = [n.all_input_nodes[0] for n in graph.nodes if writes_in_place(n) and n.all_input_nodes]
    changed += [str(n.target) for n in to if n.op == "get_attr" and n.target in before]
    return changed[0] if changed else None


def _writing_class(model: nn.Module, buffer: str, whole: set[type[nn.Module]]) -> type[nn.Module]:
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
