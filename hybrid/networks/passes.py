"""A pass through a network by its code, watched call by call."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from threading import local
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec

from hybrid.errors import one_line
from hybrid.networks.remote_tensor import RemoteTensor
from hybrid.solvers.layers.trees import map_leaves, tensors_of

OUTPUT, INPUT = -1, -2
"""The `operation` of a `TensorKey` of a call's output, and of an input of the network."""
CallId = tuple[tuple[str, int], ...]
"""A call of a module within a pass: from the outermost one on, the path of each module that is
called, and how often the call around it has called it before. () is the call of the network."""


class TensorKey(NamedTuple):
    """Identifies a tensor in every pass, whatever the samples and the cuts are."""

    call: CallId
    """The call that returns it, or whose code computes it by an operation."""
    operation: int
    """The number of that operation, or `OUTPUT` or `INPUT`."""
    leaf: int
    """Its place among the tensors that the call or the operation gives."""


@dataclass
class ModuleCall:
    """A call of a module in a pass."""

    id: CallId
    begin: int = 0
    end: float = inf
    operations: int = 0
    """Operations of its code so far that depend on parameters or samples."""
    calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How often its code has called each module so far, by path."""
    outputs: tuple[list[Any], TreeSpec] | None = None
    """Its outputs on the meta device, if all of them depend on parameters or samples."""

    @property
    def path(self) -> str:
        """The path of its module."""
        return self.id[-1][0] if self.id else ""

    def child(self, path: str) -> CallId:
        """The next call of a module in its code."""
        return (*self.id, (path, self.calls[path]))


_thread = local()
"""Its `watch`: the pass that is under way on this thread."""


class WatchedNetwork:
    """A copy of a network that shares its tensors, and whose calls a `WatchedPass` sees.

    The network itself is not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            if fault := _fault(module):
                name = path or type(model).__name__
                raise ValueError(f"{name} cannot be cut into blocks, because it {fault}")
        tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
        try:
            self.copy = deepcopy(model, tensors)
        except Exception as error:  # whatever a user's object does with it
            raise ValueError(
                f"{type(model).__name__} cannot be copied for each block "
                f"({one_line(error)[:120]}): make what cannot be copied where it is used, or, if "
                "it is a weight of torch.nn.utils, take torch.nn.utils.parametrizations"
            ) from None
        modules = dict(self.copy.named_modules())
        self.stateful = {path for path, m in modules.items() if m.state_dict()}
        """The paths of modules with parameters or statistics."""
        self.executed = {""}
        """The paths of modules whose code was run, not only for its shapes."""
        for path, module in modules.items():
            if path:
                module.forward = partial(self._forward, path, module.forward)

    def _forward(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch: WatchedPass | None = getattr(_thread, "watch", None)
        if watch is None or watch.network is not self:
            return forward(*args, **kwargs)
        if not watch.aside:
            return watch.call(path, forward, args, kwargs)
        if path not in watch.noted:
            return forward(*args, **kwargs)
        return watch.call_aside(path, forward, args, kwargs)


def _fault(module: nn.Module) -> str:
    """Why blocks cannot have calls of a module as they are; "" if they can."""
    tensors = [*module._parameters.values(), *module._buffers.values()]
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by torch.jit: give the Python module that this was made of"
    if type(module).__name__ == "OptimizedModule":
        return "is compiled: give the module itself (its _orig_mod), and set train.compile"
    if any(x is not None and is_lazy(x) for x in tensors):
        return "is a lazy module without parameters: pass a batch through the network first"
    if any(isinstance(x, torch.Generator) for x in vars(module).values()):
        return (
            "has its own torch.Generator, whose state no checkpoint has: leave it out, and "
            "random numbers are the same for any number of blocks"
        )
    return ""


@contextmanager
def watched(watch: "WatchedPass") -> Iterator[None]:
    """Within it that pass sees the calls of its network on this thread."""
    before = getattr(_thread, "watch", None)
    _thread.watch = watch
    try:
        yield
    finally:
        _thread.watch = before


class WatchedPass(TorchFunctionMode):
    """Numbers calls and operations, so that tensors have the same keys in every pass.

    An operation counts if it gives a tensor, and one of its arguments depends on parameters or on
    samples that are no integers. What depends on nothing else (masks, positions) every block makes
    again by itself.
    """

    aside = False
    """Whether it is within a call whose code is not watched."""
    noted: frozenset[str] = frozenset()
    """The paths of modules whose calls in such code are of interest all the same."""

    def __init__(self, network: WatchedNetwork) -> None:
        super().__init__()
        self.network = network
        self.open = [ModuleCall(())]
        """The calls that have not ended, the innermost last."""
        self._dependent: dict[int, ReferenceType[Tensor]] = {}
        """What depends on parameters or samples, by identity; it may live no longer."""

    def is_dependent(self, x: Any) -> bool:
        """Whether a value is a tensor that depends on parameters or samples."""
        known = self._dependent.get(id(x))
        return (known is not None and known() is x) or isinstance(x, RemoteTensor | nn.Parameter)

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module in code that is watched."""
        raise NotImplementedError

    def call_aside(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module in `noted` in code that is not."""
        raise NotImplementedError

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """What an operation gives."""
        raise NotImplementedError

    def run_call(self, call: ModuleCall, forward: Callable[..., Any], *args: Any) -> Any:
        """Run a module's code, watched."""
        self.network.executed.add(call.path)
        self.open.append(call)
        try:
            return forward(*args[0], **args[1])
        finally:
            self.open.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, call = kwargs or {}, self.open[-1]
        tensors = tensors_of(args, kwargs)
        out = self.operate(func, args, kwargs, tensors)
        if not any(map(self.is_dependent, tensors)):
            return out
        number = call.operations
        if func == Tensor.__setitem__:  # x[:, 0] = 0
            call.operations += 1
            self.produced(args[0], call.id, number)
        elif tensors_of(out):
            call.operations += 1
            return self.produced(out, call.id, number)
        return out

    def produced(self, out: Any, call: CallId, operation: int) -> Any:
        """What takes the place of a value with tensors that have come to be."""
        if isinstance(out, Tensor):
            return self.tensor(out, TensorKey(call, operation, 0))
        leaf = count()

        def replaced(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return self.tensor(x, TensorKey(call, operation, next(leaf)))

        return map_leaves(replaced, out)

    def tensor(self, x: Tensor, key: TensorKey) -> Tensor:
        """What takes the place of a tensor that has come to be."""
        self._dependent[id(x)] = ref(x)
        return x
