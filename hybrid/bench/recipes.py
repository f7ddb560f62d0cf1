"""The methods that `bench` and `plan` compare, one recipe for each row."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from shlex import quote
from typing import Any

from hybrid.method.make_method import make_method
from hybrid.method.method import Method
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.settings.config import RoundSettings
from hybrid.settings.sections.rounds import WINDOW
from hybrid.solvers import Backprop, Solver, registry
from hybrid.solvers.acting import Settings
from hybrid.solvers.engine.engine import Scheduled
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.solvers.registry import LOCAL_METHODS, STRATEGIES
from hybrid.solvers.sync.base import Strategy

MEMORY_GB = RoundSettings().memory_gb


@dataclass(frozen=True)
class Recipe:
    """The settings of one row, with which a run trains in the same way."""

    name: str
    solver: Solver
    correction: PassSettings = field(default_factory=PassSettings)
    rounds: RoundSettings = field(default_factory=RoundSettings)
    fill: Settings = field(default_factory=LOCAL_METHODS[LOCAL_METHODS.default])
    """The local method for idle time."""
    sync: Strategy = field(default_factory=STRATEGIES[STRATEGIES.default])
    """How replicas synchronize, if there are any."""

    @property
    def windowed(self) -> bool:
        """Whether a round sweeps over a window after a serial pass over it."""
        return self.solver.alternates and self.rounds.window is not None

    @property
    def serial(self) -> PassSettings:
        """The settings of its exact passes."""
        return self.solver if isinstance(self.solver, PassSettings) else self.correction

    @property
    def micro_batches(self) -> int:
        """The number m of micro-batches in its name."""
        return max(self.serial.micro_batches, getattr(self.solver, "micro_batches", 1) or 1)

    def method(self, problem: Problem, options: Options, replicas: int = 1) -> Method:
        """Make the method of a run with these settings; ValueError if it cannot train."""
        options = replace(
            options,
            solver=self.solver,
            fill=self.fill,
            correction=self.correction,
            sync=self.sync,
            replicas=replicas,
            **dict(self.rounds),
        )
        if replicas == 1:  # settings of replicas apply to rows with replicas only
            options.side_by_side = "auto"
            options.train = options.train.model_copy(update={"sync_batchnorm": False})
        return make_method(problem, options)

    def flags(self) -> str:
        changed = _changed("solver", self.solver)
        if self.sync.name != STRATEGIES.default:
            changed["sync.name"] = self.sync.name
        changed |= _changed("sync", self.sync)
        if self.fill.name != LOCAL_METHODS.default:
            changed["fill.name"] = self.fill.name
        changed |= _changed("fill", self.fill)
        if self.solver.alternates:
            changed |= _changed("correction", self.correction)
            if self.windowed:
                changed |= {f"rounds.{k}": getattr(self.rounds, k) for k in ("window", "sweeps")}
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in changed.items()}
        words = [f"--set {quote(f'{key}={text}')}" for key, text in texts.items()]
        return " ".join([f"--solver {self.solver.name}", *words])


BASE = Recipe("plain loop", Backprop())
"""The base of every comparison: one block, serial."""


def accumulating(micro_batches: int) -> Recipe:
    """Return the plain loop that accumulates gradients over parts of a mini-batch."""
    name = f"{BASE.name}, accumulating over {micro_batches}"
    return Recipe(name, Backprop(micro_batches=micro_batches))


def _changed(section: str, settings: Settings) -> dict[str, Any]:
    assert is_dataclass(settings)
    values = {f.name: (getattr(settings, f.name), f.default) for f in fields(settings)}
    return {f"{section}.{name}": v for name, (v, default) in values.items() if v != default}


def recipes(
    micro_batches: Sequence[int],
    correction: PassSettings | None = None,
    solvers: Sequence[Solver] | None = None,
    memory_gb: float = MEMORY_GB,
    fills: Mapping[str, Settings] | None = None,
) -> list[Recipe]:
    """List the recipes: serial, pipelined, pipelined with half the bytes, then other `solvers`.

    A solver with windows has one row. A solver without windows has a row for each number of
    micro-batches, and again with local work if `fills` has a local method for its name.

    `correction` has the other settings of serial passes (number format of messages, ...), and
    `memory_gb` limits the auxiliary variables of a rank.
    """
    exact = Backprop(**vars(correction or PassSettings()))
    passes = {m: replace(exact, micro_batches=m) for m in (1, *micro_batches)}
    rows = [Recipe(f"{exact.name}, m={m}", each) for m, each in passes.items()]
    if exact.messages == "float32":
        m = micro_batches[0]
        narrow = replace(passes[m], messages="bfloat16")
        rows.append(Recipe(f"{exact.name}, m={m}, bfloat16 messages", narrow))
    for solver in solvers or [registry.solver_class(name)() for name in registry.names()]:
        name = solver.name
        if solver.exact:
            continue
        if not solver.alternates:
            for title, each in _delayed(solver, micro_batches):
                rows.append(Recipe(title, each))
                if isinstance(fill := (fills or {}).get(name), Solver):
                    limit = RoundSettings(memory_gb=memory_gb)
                    rows.append(Recipe(f"{title}, with local work", each, rounds=limit, fill=fill))
            continue
        m = micro_batches[-1]
        window = RoundSettings(window=WINDOW, sweeps=solver.sweeps, memory_gb=memory_gb)
        rows.append(Recipe(f"{name}, m={m}, window {WINDOW}", solver, passes[m], window))
    return rows


def _delayed(solver: Solver, micro_batches: Sequence[int]) -> Iterator[tuple[str, Solver]]:
    """Vary a method without windows by number of micro-batches, with a title for each."""
    name: str = solver.name
    if not hasattr(solver, "micro_batches"):
        yield name, solver
        return
    codecs = solver.wire().text if isinstance(solver, Scheduled) else "float32"
    wire = "" if codecs == "float32" else f", {codecs} messages"
    for m in [solver.micro_batches] if solver.micro_batches else micro_batches:
        yield f"{name}, m={m}{wire}", replace(solver, micro_batches=m)  # type: ignore[type-var]
