"""The settings that `bench` and `plan` compare, one recipe a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybrid.bench.measure import CPU, Contender
from hybrid.cuts.partition import Blocks, default_sample
from hybrid.links import RankLinks
from hybrid.method.setup import Method, factorized_cuts, make_block
from hybrid.ranks.grid import share_size
from hybrid.settings.config import Config
from solvers import Backprop, Batch, Setup, Solver, Window, registry
from solvers.base import Shape
from solvers.exact.exact_pass import PassSettings
from solvers.exact.pipeline import Gaps
from solvers.exact.wire import WireFormat
from solvers.sync.base import Strategy
from solvers.sync.messages import MessageFormat
from solvers.sync.registry import STRATEGIES

_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8}


@dataclass(frozen=True)
class Recipe:
    """A way to train: a solver, and a serial pass beside it unless it trains alone."""

    name: str
    solver: Solver
    correction: PassSettings = field(default_factory=PassSettings)
    sweeps: int = 0
    fill: bool = False
    window: int = 4
    sync: Strategy = field(default_factory=STRATEGIES[STRATEGIES.default])
    """How replicas keep together, where there are any."""

    @property
    def windowed(self) -> bool:
        """Whether a round sweeps over a window that a serial pass has gone over."""
        return self.sweeps > 0 and self.solver.alternates

    @property
    def alone(self) -> bool:
        """Whether a pipeline that is never flushed does all."""
        return not self.solver.alternates and not self.solver.exact

    @property
    def serial(self) -> PassSettings:
        return self.solver if isinstance(self.solver, PassSettings) else self.correction

    @property
    def parts(self) -> int:
        """m, the micro-batches that its name tells."""
        return max(self.serial.micro_batches, getattr(self.solver, "micro_batches", 1) or 1)

    def narrowed(self, messages: WireFormat) -> Recipe | None:
        """The same with messages of fewer bits; None if it has as few, or no choice."""
        carrier = self.correction if self.solver.alternates else self.solver
        before = getattr(carrier, "messages", None)
        if before is None or _BITS[before] <= _BITS[messages]:
            return None
        name = self.name.removesuffix(f", {before} messages")
        changed = replace(carrier, messages=messages)  # type: ignore[type-var]
        own = {"correction": changed} if self.solver.alternates else {"solver": changed}
        return replace(self, name=f"{name}, {messages} messages", **own)  # type: ignore[arg-type]

    def narrowed_between(self, messages: MessageFormat) -> Recipe | None:
        """The same with what goes between replicas in a number format, likewise."""
        before = getattr(self.sync, "messages", None)
        if before is None or _BITS[before] <= _BITS[messages]:
            return None
        name = self.name.removesuffix(f", {before} between replicas")
        sync = replace(self.sync, messages=messages)  # type: ignore[type-var]
        return replace(self, name=f"{name}, {messages} between replicas", sync=sync)

    def kept_by(self, sync: Strategy) -> Recipe:
        """The same, its replicas kept together by another strategy."""
        return replace(self, name=f"{self.name}, {sync.name}", sync=sync)

    def settings(self) -> dict[str, Any]:
        """What gives this recipe to a run: "section.key" -> value."""
        made = {"solver.name": self.solver.name, **_changed("solver", self.solver)}
        if self.sync.name != STRATEGIES.default:
            made["sync.name"] = self.sync.name
        made |= _changed("sync", self.sync)
        if self.solver.alternates:
            made |= _changed("correction", self.correction)
            if self.windowed:
                made |= {"rounds.window": self.window, "rounds.sweeps": self.sweeps}
            if self.fill:
                made["rounds.fill"] = True
                # a run with gaps filled has more than one unless it is told
                made["correction.micro_batches"] = self.correction.micro_batches
        return made

    def flags(self) -> str:
        """The same for the command line."""
        own = {"solver.name": "--solver", "rounds.window": "--window", "rounds.sweeps": "--sweeps"}
        parts = []
        for key, value in self.settings().items():
            text = str(value).lower() if isinstance(value, bool) else value
            parts.append(f"{own[key]} {text}" if key in own else f"--set {key}={text}")
        return " ".join(parts)

    def method(
        self,
        blocks: Blocks,
        shapes: Sequence[Shape],
        batch_size: int,
        gaps: Sequence[Gaps],
        replicas: int = 1,
    ) -> Method:
        """What the rounds of the first replica's ranks are started from."""
        setup = Setup(
            tuple(shapes),
            share_size(batch_size, 0, replicas),
            window=self.window if self.windowed else 0,
            sweeps=max(self.sweeps, 1),
            fills=self.fill,
            correct_every=1 if self.solver.alternates else 0,
            factorized=factorized_cuts(blocks),
            packed=blocks.packed_cuts,
            bundled=blocks.bundled,
            total=batch_size if replicas > 1 else 0,
            replicas=replicas,
        )
        return Method(self.solver, self.correction, setup, tuple(gaps) if self.fill else ())


BASE = Recipe("plain loop", Backprop())
"""The base of every comparison: one block, serial."""


def accumulating(micro_batches: int) -> Recipe:
    """The base, its mini-batches in parts whose gradients add up before a step."""
    name = f"{BASE.name}, accumulating over {micro_batches}"
    return Recipe(name, Backprop(micro_batches=micro_batches))


def _changed(section: str, made: Solver | PassSettings | Strategy) -> dict[str, Any]:
    """The settings that are not the default."""
    assert is_dataclass(made)
    values = {f.name: (getattr(made, f.name), f.default) for f in fields(made)}
    return {f"{section}.{name}": v for name, (v, default) in values.items() if v != default}


def recipes(
    micro_batches: Sequence[int],
    correction: PassSettings | None = None,
    solvers: Sequence[Solver] | None = None,
) -> list[Recipe]:
    """Serial, pipelined, pipelined with half the bytes; of every other one of `solvers` a filled
    pipeline and a windowed one, or it alone, in as many parts.

    `correction` gives the serial passes' other settings (number format of messages, ...).
    """
    exact = Backprop(**vars(correction or PassSettings()))
    passes = {m: replace(exact, micro_batches=m) for m in (1, *micro_batches)}
    made = [Recipe(f"{exact.name}, m={m}", each) for m, each in passes.items()]
    if exact.messages == "float32":
        m = micro_batches[0]
        narrow = replace(passes[m], messages="bfloat16")
        made.append(Recipe(f"{exact.name}, m={m}, bfloat16 messages", narrow))
    for solver in solvers or [registry.solver_class(name)() for name in registry.names()]:
        name = solver.name
        if solver.exact:
            continue
        if not solver.alternates:
            made += [
                Recipe(title, each, exact, sweeps=1)
                for title, each in _alone(solver, micro_batches)
            ]
            continue
        for m in micro_batches if solver.fills else ():
            made.append(Recipe(f"{name}, m={m}, gaps filled", solver, passes[m], fill=True))
        m = micro_batches[-1]
        made.append(Recipe(f"{name}, m={m}, window 4", solver, passes[m], sweeps=solver.sweeps))
    return made


def _alone(solver: Solver, micro_batches: Sequence[int]) -> Iterator[tuple[str, Solver]]:
    """A method that trains alone, with every number of micro-batches if it has a say in it."""
    name: str = solver.name
    if not hasattr(solver, "micro_batches"):
        yield name, solver
        return
    messages = getattr(solver, "messages", "float32")
    wire = "" if messages == "float32" else f", {messages} messages"
    if asked := solver.micro_batches:
        yield f"{name}, m={asked}{wire}", solver
        return
    for m in micro_batches:
        yield f"{name}, m={m}{wire}", replace(solver, micro_batches=m)  # type: ignore[type-var]


class OwnContender(Contender):
    """A recipe on this rank of a grid: rounds over windows of its replica's share.

    Its bytes and waits are counted by its links.
    """

    def __init__(
        self,
        recipe: Recipe,
        blocks: Blocks,
        links: RankLinks,
        gaps: list[Gaps],
        settings: Config,
        device: torch.device = CPU,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        self.recipe, self.links = recipe, links
        model, units = deepcopy((blocks.model, blocks.units))
        self.blocks = replace(blocks, model=model, units=units)
        place, size = links.place, settings.train.batch_size
        self.block = make_block(self.blocks, place.block, settings.optimizer, device)
        if shapes is None:
            shapes = self.blocks.cut_shapes(default_sample(model, None))
        method = recipe.method(self.blocks, shapes, size, gaps, place.replicas).of_replica(place)
        if place.replicas > 1:
            share = method.setup.batch_size / size
            self.block.sync = recipe.sync.start(self.block, links.peers, share)
        self.rounds = method.start(self.block, links)

    def train(self, batches: Sequence[Batch]) -> None:
        length, sweeps = self.recipe.window, max(self.recipe.sweeps, 1)
        place = self.links.place
        mine = [batch.of_replica(place.replica, place.replicas) for batch in batches]
        starts = range(0, len(mine), length)
        windows = [Window(mine[start : start + length], sweeps) for start in starts]
        self.rounds.run([(window, window) for window in windows], 0, 0)

    def end_epoch(self) -> None:
        """Finish what is under way, forget the epoch's records; all ranks call it."""
        self.rounds.drain()
        self.rounds.end_epoch()

    def state_dict(self) -> dict[str, Tensor] | None:
        self.rounds.drain()
        module = self.blocks.module(self.links.rank)
        with self.block.joined():
            mine = {module.global_name(k): v.cpu() for k, v in module.state_dict().items()}
        everyone = self.links.all_gather(mine)
        whole = {k: v for part in everyone for k, v in part.items()}
        return whole if self.links.place.number == 0 else None

    def spent(self) -> tuple[float, float]:
        return self.links.traffic.total_bytes, self.links.traffic.total_waiting
