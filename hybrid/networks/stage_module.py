"""A stage of a network's pass as a module: the network's code, without other blocks' work."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from hybrid.networks.passes import (
    INPUT,
    OUTPUT,
    CallId,
    ModuleCall,
    TensorKey,
    WatchedNetwork,
    WatchedPass,
    watched,
)
from hybrid.networks.recording import SAMPLES, StageInterface
from hybrid.networks.remote_tensor import (
    RemoteTensor,
    RemoteTensorError,
    call_on_remote,
    remote_like,
)
from hybrid.solvers.checks.constant_draws import ConstantDraws
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.layers.trees import leaves_of, map_leaves, tensors_of
from hybrid.solvers.numerics.attributes import user_modules
from hybrid.solvers.numerics.draws import NumberedDraws

OPERATIONS = 1 << 32
"""The first number of random operations in code that may be cut, beyond those of calls."""


class _EndReached(BaseException):
    """The pass has come to the end of its stage."""


@dataclass(frozen=True)
class NetworkPass:
    """What is known of a network's pass, whatever stage of it is run."""

    structure: TreeSpec
    """Of the inputs."""
    inputs: tuple[Tensor, ...]
    """One sample of each, on the meta device."""
    opened: frozenset[str]
    """The paths of modules that are cut inside."""
    closed: frozenset[str]
    """Those of them that may be run or skipped as one where no cut of a stage is inside."""
    outputs: Mapping[CallId, tuple[list[Any], TreeSpec]]
    """Outputs of calls that other blocks make, for `SAMPLES` samples: tensors on the meta device,
    and their structure."""
    random: frozenset[Any]
    """The operations that draw random numbers in the code of opened modules."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "NetworkPass":
        return self  # it is immutable

    def ordered(self, named: dict[str, Any]) -> dict[str, Any]:
        """Inputs by name in the order in which they are numbered."""
        names = tree_unflatten(range(len(self.inputs)), self.structure)
        return {name: named[name] for name in names} if isinstance(names, dict) else named


class StageModule(NumberedDraws):
    """Runs a network's forward from one interface to another.

    Before the start a call of a module with parameters is not made: it gives tensors that have a
    shape alone (`RemoteTensor`), and what is computed of these has no numbers either. Masks,
    positions and whatever else depends on integers alone are made again. At the start what has
    crossed it takes the place of remote tensors; from there on the code runs as ever, until it
    calls the module behind the end.

    The modules and tensors of the stage have the names that they have in the network.
    """

    def __init__(
        self,
        network: WatchedNetwork,
        whole: NetworkPass,
        start: StageInterface | None,
        end: StageInterface | None,
        numbers: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.network, self.whole, self.start, self.end = network, whole, start, end
        self.numbers = numbers
        """By path of a module that draws random numbers: the numbers of its calls."""
        self.templates: dict[Any, Any] = {}
        """Results of calls and operations on remote tensors, by the shapes of their arguments; for
        each device and mode."""
        self.noted = frozenset(numbers) | user_modules(network.copy).keys()
        """The paths of modules whose calls in code that is not watched are noted, too."""
        self.draws_numbers = bool(numbers or whole.random)
        self.divided = frozenset[CallId]().union(*(end.inside for end in (start, end) if end))
        """The calls inside which the stage begins or ends, or in which what crosses comes to be."""
        copy = network.copy
        self._modules, self._parameters = copy._modules, copy._parameters
        self._buffers = copy._buffers
        self._non_persistent_buffers_set = copy._non_persistent_buffers_set

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "templates": {}}  # which cannot be copied

    @property
    def runs(self) -> nn.Module:  # type: ignore[override]
        return self.network.copy

    @property
    def training(self) -> bool:
        """The mode of the network's outermost module, which is none of this module's modules."""
        return self.network.copy.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "network" in vars(self):
            self.network.copy.training = mode

    def train(self, mode: bool = True) -> "StageModule":
        """Training or evaluation mode, as the network sets it."""
        self.network.copy.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's outputs, or what crosses the end, for its inputs or what crosses the start.

        What crosses is one tensor or a tuple of several; the inputs that are integers and cross
        come last. Raises RemoteTensorError, a ValueError, where the network's code needs what
        it cannot have.
        """
        inputs = args[0] if len(args) == 1 and not kwargs else args or self.whole.ordered(kwargs)
        run = _StagePass(self, inputs)
        with watched(run), run:
            try:
                if self.start is None:
                    out = self.network.copy(*args, **kwargs)
                else:
                    value = tree_unflatten(run.leaves, self.whole.structure)
                    out = call_network(self.network.copy, value)
            except _EndReached:
                return run.leaving()
        if self.end is not None:
            raise RemoteTensorError(f"{self.end.names[0]} is not called: {_LAYERDROP}")
        return map_leaves(lambda x: _plain(run.local(x)), out)


_LAYERDROP = (
    "if modules are left out of some passes at random (layerdrop), switch that off, or cut "
    "elsewhere"
)


class _StagePass(WatchedPass):
    """One pass of a stage."""

    def __init__(self, stage: StageModule, value: Any) -> None:
        super().__init__(stage.network)
        self.stage, self.start, self.end = stage, stage.start, stage.end
        self.leaves = tensors_of(value)
        """The network's inputs."""
        self.rows, self.device = len(self.leaves[0]), self.leaves[0].device
        self.entering: dict[TensorKey, Tensor] = {}
        self.captured: dict[TensorKey, Tensor] = {}
        """What leaves the stage, as far as it has come to be."""
        self.entered: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity of a remote tensor: it, and the tensor that has crossed the start for it."""
        self.begun = self.start is None
        self.templates = stage.templates.setdefault((self.device, stage.training), {})
        self._graph = torch.is_grad_enabled()
        self.noted = stage.noted
        self._draws = Counter[str]()
        """Calls so far of modules that draw, by path; random operations of opened code at ""."""
        if self.start is not None:
            self.entering = self.start.tensors(self.leaves)
            integers = self.leaves[len(self.start.shapes) :]
            self.leaves = [*map(self._resized, stage.whole.inputs)]
            for i, x in zip(self.start.integers, integers, strict=True):
                self.leaves[i] = x
        for i, x in enumerate(self.leaves):
            if x.is_floating_point():
                self.leaves[i] = self.tensor(x, TensorKey((), INPUT, i))

    def leaving(self) -> Any:
        """What crosses the end."""
        assert self.end is not None
        if not self.end.shapes.keys() <= self.captured.keys():
            raise RemoteTensorError(
                f"what crosses before {self.end.names[0]} did not come to be: {_LAYERDROP}"
            )
        tensors = self.end.rows(self.captured, self.rows)
        tensors += [self.leaves[i] for i in self.end.integers]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        around, whole = self.open[-1], self.stage.whole
        call = around.child(path)
        if self.end is not None and call == self.end.call:
            raise _EndReached
        around.calls[path] += 1
        self.begun |= self.start is not None and call == self.start.call
        dependent = path in self.network.stateful or call in whole.outputs
        args, kwargs = map_leaves(self.local, args), map_leaves(self.local, kwargs)
        divided = path not in whole.closed or call in self.stage.divided
        if not dependent or (path in whole.opened and divided):
            out = self.run_call(ModuleCall(call), forward, args, kwargs)
        elif self.begun:
            out = self._unwatched(self.call_aside, path, forward, args, kwargs)
        else:
            template = call, _signature(args, kwargs)
            if template not in self.templates:
                self.templates[template] = self._unwatched(self._skip, call, forward, args, kwargs)
            out = self.templates[template]
        return self.produced(out, call, OUTPUT) if dependent else out

    def _unwatched(self, code: Callable[..., Any], *args: Any) -> Any:
        """What code gives, whose calls and operations are not watched."""
        self.aside = True
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return code(*args)
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
            self.aside = False

    def call_aside(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.network.executed.add(path)
        numbers, draw = self.stage.numbers.get(path, ()), self.stage.draw
        if not numbers or draw is None:
            return forward(*args, **kwargs)
        self._draws[path] += 1
        with draw(numbers[(self._draws[path] - 1) % len(numbers)]):
            return forward(*args, **kwargs)

    def _skip(self, call: CallId, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The outputs of another block's module, computed for their shapes."""
        noted, self.noted = self.noted, frozenset()
        try:
            with _without_numbers(self.network.copy.get_submodule(call[-1][0]), self.device):
                out = forward(*args, **kwargs)
        except Exception:  # it depends on numbers: it gives what it gave in the recorded pass
            if call not in self.stage.whole.outputs:
                raise
            leaves, structure = self.stage.whole.outputs[call]
            out = tree_unflatten([*map(self._resized, leaves)], structure)
        finally:
            self.noted = noted
        return remote_like(out, self.device)

    def _resized(self, x: Any) -> Any:
        """A tensor of a recorded pass with as many rows as this one has, without numbers."""
        if not isinstance(x, Tensor):
            return x
        shape = (self.rows, *x.shape[1:]) if x.shape[:1] == (SAMPLES,) else x.shape
        return RemoteTensor(torch.empty(shape, dtype=x.dtype, device="meta"), self.device)

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        if self.entered and any(id(x) in self.entered for x in tensors):
            tensors = [self.local(x) for x in tensors]
            args, kwargs = map_leaves(self.local, (args, kwargs))
        draw = self.stage.draw if func in self.stage.whole.random else None
        self._draws[""] += draw is not None
        remote = RemoteTensor if self.begun else (RemoteTensor, nn.Parameter)
        if not any(isinstance(x, remote) for x in tensors):
            with nullcontext() if draw is None else draw(OPERATIONS + self._draws[""]):
                return func(*args, **kwargs)
        call = self.open[-1]
        template = call.id, call.operations, func, _signature(args, kwargs)
        if template in self.templates:
            return self.templates[template]
        out = call_on_remote(func, args, kwargs, self.device)
        if out is not None and not any(x is y for x in leaves_of(out) for y in tensors):
            self.templates[template] = out  # it does not write to an argument
        return out

    def tensor(self, x: Tensor, key: TensorKey) -> Tensor:
        super().tensor(x, key)
        if not self.begun and key in self.entering:
            entering = super().tensor(self.entering[key], key)
            with torch._C.DisableTorchFunction():
                same = x.shape == entering.shape
            if not same:
                raise RemoteTensorError(
                    f"a tensor of shape {tuple(entering.shape)} has crossed for one of shape "
                    f"{tuple(x.shape)}: the forward does other things in some passes than in others"
                )
            self.entered[id(x)] = x, entering
            # what the forward of a torch.autograd.Function returns gets another graph
            x = x if self._graph and not torch.is_grad_enabled() else entering
        if self.end is not None and key in self.end.shapes:
            self.captured[key] = self.local(x)
        return x

    def local(self, x: Any) -> Any:
        """A value, or what has crossed in its place."""
        return self.entered.get(id(x), (x, x))[1]


@contextmanager
def _without_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it a module's tensors are remote; afterwards its state is what it was."""
    tables = [t for m in module.modules() for t in (vars(m), m._parameters, m._buffers)]
    before = [dict(table) for table in tables]
    for table in tables:
        tensors = {name: x for name, x in table.items() if isinstance(x, Tensor)}
        table.update(remote_like(tensors, device))
    try:
        with torch.no_grad(), ConstantDraws():
            yield
    finally:
        for table, state in zip(tables, before, strict=True):
            table.clear()
            table.update(state)


def _plain(x: Any) -> Any:
    """A tensor, a number or a text of an output; None for anything else, such as a cache."""
    if isinstance(x, RemoteTensor):
        raise RemoteTensorError("an output depends on tensors of another block alone")
    return x if isinstance(x, Tensor | bool | int | float | str) else None


def _signature(*values: Any) -> tuple[Any, ...]:
    """The shapes, types and plain values that the result of a skipped call depends on."""
    signature: list[Any] = []
    with torch._C.DisableTorchFunction():
        for x in leaves_of(*values):
            if isinstance(x, Tensor):
                signature += x.shape, x.dtype
            elif isinstance(x, slice):
                signature.append(str(x))
            elif isinstance(x, bool | int | float | str | torch.dtype | torch.device | type(None)):
                signature.append(x)
    return tuple(signature)
