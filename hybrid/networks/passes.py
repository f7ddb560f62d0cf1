"""A pass through a network by the network's own code, watched call by call."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from threading import local
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from hybrid.errors import one_line
from hybrid.networks.absent import METADATA, Absent, writes

GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""What takes gradients."""
_CHECKPOINT = CheckpointFunction.forward.__code__
CallId = tuple[tuple[str, int], ...]
"""A call of a module within a pass: from the outermost one on, the path of each module that is
called, and how often the call around it has called it before. () is the call of the network."""


class Key(NamedTuple):
    """How a tensor comes to be, the same in every pass, whatever the samples and the cuts."""

    call: CallId
    """The call that gives it, or in whose own code an operation does."""
    operation: int
    """The number of that operation; -1: it is what the call gives; -2: an input of the network."""
    leaf: int
    """Which of the tensors that come together."""


@dataclass
class Frame:
    """A call that has not ended."""

    id: CallId
    own: bool = True
    """Whether all that it gives depends on parameters or samples."""
    operations: int = 0
    """Its own operations so far of which an argument depends on parameters or samples."""
    calls: Counter[str] = field(default_factory=Counter)
    draws: int = 0
    """Its own operations so far that draw random numbers."""

    def call(self, path: str) -> CallId:
        """The next call of a module by this one."""
        number = self.calls[path]
        self.calls[path] += 1
        return (*self.id, (path, number))


_here = local()
"""Its `watch`: the pass that is under way on this thread."""


class Network:
    """A copy of a network that shares its tensors, and whose calls a `Pass` can watch.

    The network itself is not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            if fault := _fault(module):
                name = path or type(model).__name__
                raise ValueError(f"{name} cannot be cut into blocks, because it {fault}")
        self.copy = _copied(model)
        modules = dict(self.copy.named_modules())
        self.owners = {path for path, m in modules.items() if m.state_dict()}
        """The paths of modules with parameters or statistics."""
        self.drawing: set[str] = set()
        """The paths of modules that draw random numbers."""
        for path, module in modules.items():
            if path:
                module.forward = partial(self._forward, path, module.forward)

    def _forward(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch: Pass | None = getattr(_here, "watch", None)
        if watch is None or watch.network is not self:
            if path in self.drawing and torch._C._current_graph_task_id() >= 0:
                raise ValueError(
                    f"{path} draws random numbers a second time, in a backward pass "
                    "(torch.utils.checkpoint), which would be others than before: leave that out, "
                    "and choose a method that recomputes (correction.recompute)"
                )
            return forward(*args, **kwargs)
        call = watch.call_inside if _here.inside else watch.call
        return call(path, forward, args, kwargs)


def _fault(module: nn.Module) -> str:
    """Why blocks cannot have calls of a module as they are; "" if they can."""
    tensors = [*module._parameters.values(), *module._buffers.values()]
    faults = {
        "is compiled by torch.jit: give the Python module that this was made of": isinstance(
            module, torch.jit.ScriptModule
        ),
        "is compiled by torch.compile: give the module itself (its _orig_mod), and set "
        "train.compile": type(module).__name__ == "OptimizedModule",
        "spreads a module over devices, as blocks and replicas do: give its .module": isinstance(
            module, nn.DataParallel | nn.parallel.DistributedDataParallel
        ),
        "has no parameters before its first pass (a lazy module): pass a batch through the network "
        "first": any(x is not None and is_lazy(x) for x in tensors),
        "has a torch.Generator of its own, whose state no checkpoint has: leave it out, and random "
        "numbers are the same for any number of blocks": any(
            isinstance(x, torch.Generator) for x in vars(module).values()
        ),
        "has a backward hook, which would not see what other blocks compute: give its tensors a "
        "hook in a forward (Tensor.register_hook)": bool(
            module._backward_hooks or module._backward_pre_hooks
        ),
        "recomputes its passes by itself (gradient_checkpointing), with other random numbers: call "
        "gradient_checkpointing_disable(), and choose a method that recomputes "
        "(correction.recompute)": getattr(module, "gradient_checkpointing", False) is True,
    }
    return next((fault for fault, holds in faults.items() if holds), "")


def _copied(model: nn.Module) -> nn.Module:
    """A copy that shares the tensors; ValueError with the attribute that cannot be copied."""
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    try:
        return deepcopy(model, dict(tensors))
    except Exception as error:  # whatever a user's object does with it
        for path, module in model.named_modules():
            others = {n: x for n, x in vars(module).items() if x is not module._modules}
            for name, value in others.items():
                try:
                    deepcopy(value, dict(tensors))
                except Exception:
                    raise ValueError(
                        f"{name!r} of {path or type(model).__name__} cannot be copied for each "
                        f"block ({one_line(error)[:120]}): make it where it is used, or, if it is "
                        "a weight of torch.nn.utils, take torch.nn.utils.parametrizations"
                    ) from None
        raise


@contextmanager
def watched(watch: Pass, inside: bool = False) -> Iterator[None]:
    """Within it that pass sees every call of its network on this thread.

    `inside`: by its `call_inside`.
    """
    before = getattr(_here, "watch", None), getattr(_here, "inside", False)
    _here.watch, _here.inside = watch, inside
    try:
        yield
    finally:
        _here.watch, _here.inside = before


class Pass(TorchFunctionMode):
    """Numbers calls and operations, so that tensors have the same keys in every pass.

    An operation counts if one of its arguments depends on parameters or on samples that are no
    integers. What depends on nothing else (masks, positions) every block makes again by itself.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.frames = [Frame(())]
        self._dependent: dict[int, Tensor] = {}
        """What depends on parameters or samples, by identity."""

    def depends(self, x: Tensor) -> None:
        """Note that a tensor depends on parameters or samples."""
        self._dependent[id(x)] = x

    def is_dependent(self, x: Any) -> bool:
        return isinstance(x, Absent | nn.Parameter) or id(x) in self._dependent

    def call(
        self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module; its own code and what it calls are watched, too."""
        frame = Frame(self.frames[-1].call(path))
        self.frames.append(frame)
        try:
            out = forward(*args, **kwargs)
        finally:
            self.frames.pop()
        return self.ended(frame, out)

    def call_inside(
        self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module inside one that is not watched."""
        return forward(*args, **kwargs)

    def ended(self, frame: Frame, out: Any) -> Any:
        """What a call has given, or what takes its place."""
        return self.produced(out, frame.id, -1) if frame.own else out

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        frame = self.frames[-1]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = self.operate(func, args, kwargs, tensors)
        if not any(map(self.is_dependent, tensors)):
            return out
        number = frame.operations
        frame.operations += 1
        if out is None and writes(func):  # x[:, 0] = 0
            self.produced(args[0], frame.id, number)
            return out
        return self.produced(out, frame.id, number)

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """What an operation gives."""
        return func(*args, **kwargs)

    def produced(self, out: Any, call: CallId, operation: int) -> Any:
        """What takes the place of a value with tensors that have come to be."""
        leaves, structure = tree_flatten(out)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for number, i in enumerate(tensors):
            leaves[i] = self.tensor(leaves[i], Key(call, operation, number))
        return tree_unflatten(leaves, structure)

    def tensor(self, x: Tensor, key: Key) -> Tensor:
        """What takes the place of a tensor that has come to be."""
        self.depends(x)
        return x


def in_function(root: CodeType) -> bool:
    """Whether the forward of a torch.autograd.Function is running, called by a frame of `root`.

    What it computes has no graph: `Function.apply` gives one to what is returned. A reentrant
    torch.utils.checkpoint is such a forward, too.
    """
    return not torch.is_grad_enabled() and _is_running(_forwards(Function), root)


def in_reentrant_checkpoint(root: CodeType) -> bool:
    """Whether code is running that a backward pass will run again, called by a frame of `root`."""
    return not torch.is_grad_enabled() and _is_running({id(_CHECKPOINT)}, root)


def _forwards(function: type[Function]) -> set[int]:
    """What tells the code of the forward of such a function, and of all that derive from it."""
    methods = (function.forward, function.setup_context)
    own = {id(x.__code__) for x in methods if hasattr(x, "__code__")}
    return own.union(*map(_forwards, function.__subclasses__()))


def _is_running(codes: set[int], root: CodeType) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not root:
        if id(frame.f_code) in codes:
            return True
        frame = frame.f_back
    return False


def enclosure(root: CodeType) -> str:
    """Why a pass cannot be cut where it is now; "" if nothing like that is known."""
    if in_function(root):
        return (
            "it is called inside a torch.autograd.Function, or torch.utils.checkpoint with "
            "use_reentrant=True: set use_reentrant=False, or cut elsewhere"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "it is called inside a function that torch.func transforms: cut elsewhere"
    return ""


def differentiated(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The tensors for which a function of `GRADIENTS` computes gradients; None: all leaves."""
    place = {torch.autograd.grad: 1, torch.autograd.backward: 5, Tensor.backward: 4}[func]
    return args[place] if len(args) > place else kwargs.get("inputs")


def unwrapped(x: Tensor) -> Tensor:
    """A tensor without what torch.func has put around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
