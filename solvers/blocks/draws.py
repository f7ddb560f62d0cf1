"""Random numbers of a block: a function of (seed, step, micro-batch, unit) alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from solvers.layers.reversible import Reversible

Key = tuple[int, ...]
"""What a pass draws for: its step, its micro-batch, what else tells passes apart."""


class _Drawing(TorchDispatchMode):
    """Operations that draw take their numbers from a generator of this mode's own.

    Dispatch modes are a thread's own, so that blocks on threads do not meet in it.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seeds = seeds
        self.drew = False
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.drew = True
        given = (a.device for a in args if isinstance(a, Tensor))
        device = next(given, torch.device(kwargs.get("device") or "cpu"))
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(*args)
        names = {argument.name for argument in func._schema.arguments}
        if "generator" in names and kwargs.get("generator") is None:
            kwargs["generator"] = self._generator(device)
        elif "generator" not in names:
            func, kwargs = _with_generator(func, kwargs, self._generator(device))
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Dropout as a GPU has it, (y, mask): its own kernel takes no generator."""
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = torch.empty_like(x, dtype=torch.bool)
        mask.bernoulli_(1 - p, generator=self._generator(x.device))
        return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            (seed,) = np.random.SeedSequence(self.seeds).generate_state(1, np.uint64).tolist()
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]


class Draws:
    """Makes the parts of a block that draw take their numbers from a key and their unit.

    With the same key a unit draws the same numbers: on every kind of links, run after run,
    resumed or not, and again where a pass is recomputed or replayed. `units` tells each such
    part's unit by its number in the whole network.
    """

    def __init__(self, seed: int, units: Mapping[nn.Module, int]) -> None:
        self.seed, self.units = seed, units
        self._key: Key = ()
        self._modes: list[_Drawing] = []
        self._hooks: list[Any] = []

    def draw_for(self, key: Key) -> None:
        """The pass that comes next is `key`'s."""
        self._key = key
        if not self._hooks:
            self._install()

    def _install(self) -> None:
        for part, unit in self.units.items():
            # the residual branch of a reversible unit is run by itself, too
            module = part.residual if isinstance(part, Reversible) else part
            self._hooks += [
                module.register_forward_pre_hook(partial(self._begin, unit)),
                module.register_forward_hook(self._end, always_call=True),
            ]

    def _begin(self, unit: int, module: nn.Module, args: Any) -> None:
        mode = _Drawing((self.seed, *self._key, unit))
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)

    def _end(self, module: nn.Module, args: Any, out: Any) -> None:
        self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Leave the parts as they were."""
        while self._hooks:
            self._hooks.pop().remove()


def drawing(parts: Iterable[nn.Module], x: Tensor) -> list[bool]:
    """Which of the parts, run one after the other from x in training mode, draw random numbers."""
    found = []
    with torch.no_grad():
        for part in parts:
            with _Drawing((0,)) as mode:
                x = part(x)
            found.append(mode.drew)
    return found


def _with_generator(func: Any, kwargs: dict[str, Any], generator: torch.Generator) -> Any:
    """The overload of a factory (rand, randn, randint, ...) that takes a generator."""
    # randint.low has a low_generator beside it, rand.out a generator_out
    parts = [part for part in func._overloadname.split("_") if part != "default"]
    parts.insert(len(parts) - ("out" in parts), "generator")
    overload = getattr(func.overloadpacket, "_".join(parts), None)
    if overload is None:
        raise ValueError(
            f"{func} draws random numbers that no generator fixes: runs would not be repeatable; "
            "draw with torch.rand, torch.randn or bernoulli_ in its place"
        )
    return overload, {**kwargs, "generator": generator}
