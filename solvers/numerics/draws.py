"""Random numbers of a block, as a function of (seed, step, micro-batch, unit) only."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid.solvers.layers.branches import Reversible


class DispatchMode(TorchDispatchMode):
    """The base of dispatch modes; without it torch would spend a second importing its compiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap the mode for the compiler."""
        return False


_READ = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
SEEDING = Lock()
"""Held while torch's own generator of a device is seeded for an operation, or work recorded."""
Key = tuple[int, ...]
"""The step, the micro-batch and whatever else distinguishes a pass."""


class RandomOperations(DispatchMode):
    """Records whether operations draw random numbers, or read a tensor's numbers on the host."""

    drew = False
    read = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew |= not drops_nothing(func, args, kwargs)
        self.read |= not _READ.isdisjoint(func.tags)
        return func(*args, **kwargs)


class Drawing(DispatchMode):
    """Makes random operations draw from a generator of this mode.

    Dispatch modes are thread-local, so blocks on threads do not disturb each other.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self.seeds = seeds
        self.drew = False
        self._generators: dict[torch.device, torch.Generator] = {}
        self._operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("generator") is not None:  # of an inner mode, or the module's own
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or drops_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        self.drew = True
        devices = (a.device for a in args if isinstance(a, Tensor))
        device = next(devices, torch.device(kwargs.get("device") or "cpu"))
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(*args)
        if "generator" not in {argument.name for argument in func._schema.arguments}:
            overload = _with_generator(func)
            if overload is None:
                return self._seeded(func, args, kwargs, device)
            func = overload
        return func(*args, **{**kwargs, "generator": self.generator(device)})

    def _seeded(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        """Seed torch's generator for an operation that takes no other: fused attention on a GPU."""
        default = torch.default_generator
        if device.type == "cuda":
            default = torch.cuda.default_generators[device.index]
        self._operations += 1
        seeds = np.random.SeedSequence((*self.seeds, self._operations))
        with SEEDING:
            before = default.get_state()
            default.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
            try:
                return func(*args, **kwargs)
            finally:
                default.set_state(before)

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Compute dropout on a GPU, (y, mask): torch's kernel accepts no generator."""
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = torch.empty_like(x, dtype=torch.bool)
        mask.bernoulli_(1 - p, generator=self.generator(x.device))
        return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            (seed,) = np.random.SeedSequence(self.seeds).generate_state(1, np.uint64).tolist()
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]


class NumberedDraws(nn.Module):
    """A module that numbers the random parts of its passes itself."""

    draw: Callable[[int], AbstractContextManager[None]] | None = None
    """Makes the context in which the part with a number draws; None: torch's generator."""
    runs: nn.Module | None = None
    """The module whose code it runs, if that is not one of its submodules."""
    draws_numbers: bool = False
    """Whether any part draws random numbers."""


class Draws:
    """Makes the random numbers of a block's parts a function of a key and the part's unit.

    With the same key a unit draws the same numbers (different ones on each replica): on all links,
    in every run, resumed or not, and also when a pass is recomputed or replayed. `units` gives
    each random part the number of its unit in the whole network, or one number for each of its
    calls in a pass.
    """

    def __init__(
        self, seed: int, units: Mapping[nn.Module, tuple[int, ...]], replica: int = 0
    ) -> None:
        self.seed, self.units = seed, units
        self._replica = (replica,) if replica else ()
        self._key: Key = ()
        self._calls: dict[nn.Module, int] = {}
        self._modes: list[Drawing] = []
        self._hooks: list[Any] = []
        self._installed = False

    def draw_for(self, key: Key) -> None:
        """Let the next pass draw for `key`."""
        # two blocks on threads may call the same module
        self._key, self._thread = key, get_ident()
        self._calls.clear()
        if not self._installed:
            self._install()

    def _install(self) -> None:
        self._installed = True
        for part, numbers in self.units.items():
            if isinstance(part, NumberedDraws):
                part.draw = self._draw
                continue
            # the residual branch of a reversible unit also runs alone
            module = part.residual if isinstance(part, Reversible) else part
            self._hooks += [
                module.register_forward_pre_hook(partial(self._begin, numbers)),
                module.register_forward_hook(self._end, always_call=True),
            ]

    @contextmanager
    def _draw(self, number: int) -> Iterator[None]:
        with Drawing((self.seed, *self._key, number, *self._replica)):
            yield

    def _begin(self, numbers: tuple[int, ...], module: nn.Module, args: Any) -> None:
        if get_ident() != self._thread:
            return
        call = self._calls.get(module, 0)
        self._calls[module] = call + 1
        number = numbers[call % len(numbers)]
        self._modes.append(Drawing((self.seed, *self._key, number, *self._replica)))
        self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def _end(self, module: nn.Module, args: Any, out: Any) -> None:
        if get_ident() == self._thread:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove the hooks from the parts."""
        self._installed = False
        while self._hooks:
            self._hooks.pop().remove()
        for part in self.units:
            if isinstance(part, NumberedDraws):
                part.draw = None


def find_random_parts(
    module: nn.Module, parts: Iterable[nn.Module], x: Tensor
) -> tuple[list[nn.Module], Any]:
    """Find the parts of a module that draw random numbers in a pass over x; also return its output.

    Draws of a nested part count for the inner part only.
    """
    random_parts: list[nn.Module] = []
    modes: list[Drawing] = []

    def begin(part: nn.Module, args: Any) -> None:
        modes.append(Drawing((0,)))
        modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(part: nn.Module, args: Any, out: Any) -> None:
        mode = modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        random_parts.extend([part] * mode.drew)

    hooks = []
    for part in parts:
        hooks += [
            part.register_forward_pre_hook(begin),
            part.register_forward_hook(end, always_call=True),
        ]
    try:
        return random_parts, module(x)
    finally:
        for hook in hooks:
            hook.remove()


def drops_nothing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation is attention without dropout, which draws no random numbers."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout = args[i] if i < len(args) else argument.default_value
            return not kwargs.get("dropout_p", dropout)
    return False


def _with_generator(func: Any) -> Any:
    """Return the overload of a factory (rand, randn, ...) that takes a generator, if any."""
    # randint.low corresponds to low_generator, rand.out to generator_out
    parts = [part for part in func._overloadname.split("_") if part != "default"]
    parts.insert(len(parts) - ("out" in parts), "generator")
    overload = getattr(func.overloadpacket, "_".join(parts), None)
    if overload is None and func.namespace != "aten":
        raise ValueError(
            f"{func} draws random numbers that no generator fixes: runs would not be repeatable; "
            "draw with torch.rand, torch.randn or bernoulli_ in its place"
        )
    return overload
