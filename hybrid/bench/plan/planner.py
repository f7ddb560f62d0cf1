"""Predictions for a cluster: every recipe on every grid of ranks, on virtual links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil, lcm
from typing import Any

import torch
from torch import nn

from hybrid.bench.contenders import CPU, MethodContender
from hybrid.bench.measure import still_batches
from hybrid.bench.plan.device import Device
from hybrid.bench.plan.memory import Memory
from hybrid.bench.plan.prediction import Prediction
from hybrid.bench.plan.representative import RepresentativeLinks
from hybrid.bench.plan.standin import clocked
from hybrid.bench.plan.subject import Say, Subject
from hybrid.bench.recipes import BASE, Recipe, accumulating, recipes
from hybrid.data import Data
from hybrid.links import Network, run_virtual
from hybrid.links.grid import Grid, Place, grids, share_size
from hybrid.links.virtual import VirtualLinks
from hybrid.method.make_method import check_waits
from hybrid.method.method import Method
from hybrid.method.optimizers import count_copies
from hybrid.method.problem import Problem, check_size
from hybrid.networks.blocks import Blocks
from hybrid.ranks import launch
from hybrid.ranks.progress import Bar
from hybrid.settings import methods
from hybrid.settings.config import Config
from hybrid.solvers import Batch, Solver, registry
from hybrid.training import build

LONGEST = 64
"""At most this many steps of a round of replicas are timed."""


class Planner:
    """Predicts from the measured time of every unit: the rest runs, on virtual links."""

    def __init__(
        self,
        settings: Config,
        model: nn.Module,
        data: Data,
        network: Network,
        say: Say = lambda text: None,
        device: Device | None = None,
        bar: Bar | None = None,
    ) -> None:
        """`device` is that of every rank; None: one like this machine.

        What is at work is shown by the `bar` or, where that is on no screen, said.
        """
        self.bar = bar or Bar(0, quiet=True)
        self.settings, self.network, self._say = settings, network, say
        self.device = device
        self.threads = settings.train.threads or 1
        launch.keep_memory()
        torch.set_num_threads(self.threads)
        check_waits(methods.solver(settings), methods.fill(settings))
        self.size = settings.train.batch_size
        check_size(self.size, data)
        options = build.build_options(settings)
        # units are timed on a CPU, by torch's kernels
        on_cpu = options.train.model_copy(update={"device": "cpu", "kernels": "torch"})
        self._options = replace(options, train=on_cpu)
        self._problems: dict[tuple[object, ...], Problem] = {}
        self.refused: list[str] = []
        """Why recipes were left out."""
        self.subject = Subject(settings, model, data, self._tell, device)
        self._alone: dict[tuple[int, ...], list[Prediction]] = {}
        self.data, self.model = data, self.subject.model
        copies = count_copies(settings.optimizer) + (settings.train.ema > 0)
        copies += settings.delay.mend != "none"
        self._memory = Memory(copies)

    def _tell(self, text: str) -> None:
        """Show what is at work."""
        if self.bar.shown:
            self.bar.update(text=text, now=True)
        else:
            self._say(text)

    def blocks(self, count: int, samples: int = 0, cuts: Sequence[str] = ()) -> Blocks:
        """The model in `count` blocks, balanced by the time of passes over so many samples."""
        return self.subject.blocks(count, samples or ceil(self.size / 4), cuts)

    def grids(self, ranks: int) -> list[Grid]:
        """Every way to write so many ranks as K x R."""
        return grids(ranks, self.subject.most, self.size)

    def predictions(
        self, wanted: Sequence[Grid], micro_batches: Sequence[int], cuts: Sequence[str] = ()
    ) -> Iterator[Prediction]:
        """Every recipe on every grid, over `cuts` or balanced by measured cost.

        ValueError if the settings leave no recipe on any of them.
        """
        for grid in wanted:
            replace(self._options, replicas=grid.replicas).check()
            with suppress(ValueError):  # of a grid that is left out below
                self.bar.total += len(self._rows(grid, micro_batches)[1])
        some = False
        for grid in wanted:
            try:
                for made in self._on(grid, micro_batches, cuts):
                    some, base = True, self.on_one_rank(micro_batches)[0]
                    yield replace(made, speed_up=made.images_per_second / base.images_per_second)
            except ValueError as error:  # it cannot be cut in this way, or timed
                if len(wanted) == 1:
                    raise
                self.refused.append(str(error))
                self._say(f"{grid} is left out: {error}")
        if not some:
            raise ValueError(self.refused[0])

    def on_one_rank(self, micro_batches: Sequence[int]) -> list[Prediction]:
        """The ways to train on one rank, the fastest first: undivided, and accumulating over m."""
        key = tuple(micro_batches)
        if key not in self._alone:
            whole = self.blocks(1)
            parts = [m for m in dict.fromkeys(micro_batches) if 1 < m <= self.size]
            ways = [BASE, *map(accumulating, parts)]
            self.subject.measure(whole, *(ceil(self.size / r.micro_batches) for r in ways))
            alone = sorted(
                (self.predict(whole, r) for r in ways), key=lambda p: -p.images_per_second
            )
            rate = alone[0].images_per_second
            self._alone[key] = [replace(p, speed_up=p.images_per_second / rate) for p in alone]
        return self._alone[key]

    def _on(
        self, grid: Grid, micro_batches: Sequence[int], cuts: Sequence[str]
    ) -> Iterator[Prediction]:
        """All recipes on one grid; those that cannot train, be timed or have no room are told."""
        R, share = grid.replicas, share_size(self.size, 0, grid.replicas)
        fitting, rows = self._rows(grid, micro_batches)
        blocks = self.blocks(grid.blocks, ceil(share / fitting[0]), cuts)
        self.subject.measure(blocks, *(ceil(share / m) for m in (1, *fitting)))
        for recipe in rows:
            self._tell(f"{grid}: {recipe.name}")
            try:
                yield self._fitting(self.predict(blocks, recipe, replicas=R))
            except ValueError as error:
                self.refused.append(str(error))
                self._say(f"{grid}: {recipe.name} is left out: {error}")
            self.bar.update(self.bar.done + 1)

    def _rows(self, grid: Grid, micro_batches: Sequence[int]) -> tuple[list[int], list[Recipe]]:
        """The numbers of micro-batches that fit a grid, and the recipes to try there."""
        K, R = grid
        share = share_size(self.size, 0, R)
        fitting = [m for m in micro_batches if (m if R == 1 else 2 * m) <= share] or [1]
        # so many that no block is more than one step late; whether parts so small pay is predicted
        bound = 1 << (K - 2).bit_length() if K > 2 else 1
        if max(fitting) < bound <= share:
            fitting.append(bound)
        return fitting, self._recipes(grid, fitting)

    def _fitting(self, made: Prediction) -> Prediction:
        """The same; ValueError if it needs more memory than the device has."""
        limit = None if self.device is None else self.device.memory_gb
        if limit is not None and (most := max(made.memory_bytes) / 1e9) > limit:
            raise ValueError(
                f"{made.recipe.name} on {made.grid} needs {most:.3g} GB a rank, and the device has "
                f"{limit:g}: take more blocks, a smaller --batch-size, or recompute"
            )
        return made

    def _recipes(self, grid: Grid, micro_batches: Sequence[int]) -> list[Recipe]:
        """Those of one grid; a single block of several replicas has nothing to pipeline."""
        exact, limit = methods.correction(self.settings), self.settings.rounds.memory_gb
        fills = {self.settings.solver["name"]: methods.fill(self.settings)}
        if grid.replicas == 1:
            return recipes(micro_batches, exact, self.solvers(), limit, fills)
        sync = methods.sync(self.settings)
        solvers = self.solvers() if grid.blocks > 1 else [BASE.solver]
        rows = recipes(micro_batches, exact, solvers, limit, fills)
        rows = rows[: None if grid.blocks > 1 else 1]
        return [replace(recipe, sync=sync) for recipe in rows]

    def method(self, blocks: Blocks, recipe: Recipe, replicas: int = 1) -> Method:
        """The method by which a recipe trains these blocks; ValueError if it cannot."""
        key = (*(unit.name for unit in blocks.units), *blocks.starts)
        if key not in self._problems:
            self._problems[key] = Problem.of(self._options, blocks, self.data)
        return recipe.method(self._problems[key], self._options, replicas)

    def memory(self, blocks: Blocks, recipe: Recipe, replicas: int = 1) -> list[int]:
        """Bytes of each block, of the first replica, whose share is the largest."""
        method = self.method(blocks, recipe, replicas).of_replica(Place(replicas=replicas))
        return self._memory.needed(recipe, method, self.subject.inputs(blocks))

    def solvers(self) -> list[Solver]:
        """The one that is asked for, and those whose steps are known to be worth something."""
        asked = methods.solver(self.settings)
        others = [registry.solver_class(name)() for name in registry.OWN if name != asked.name]
        known = [solver for solver in others if solver.progress(2, self.size) is not None]
        return [asked, *known]

    def predict(
        self,
        blocks: Blocks,
        recipe: Recipe,
        steps: int = 4,
        real: bool = False,
        replicas: int = 1,
    ) -> Prediction:
        """Time `steps` mini-batches (whole windows, whole rounds) after as many to warm up.

        Units only take the time they were measured to need, unless they shall be `real`. A solver
        that trains alone has a pipeline that every report empties: it is timed over as many and
        four times as many, which gives the time of those between two reports.
        """
        method = self.method(blocks, recipe, replicas)
        setup = method.of_replica(Place(replicas=replicas)).setup
        size, share = self.size, setup.batch_size
        if self.device is not None:  # whose steps all take the same time
            steps = min(steps, 2)
        steps = setup.stored_batches or steps
        if replicas > 1:
            steps = lcm(steps, min(getattr(recipe.sync, "steps", 1), LONGEST))
        micro_batches = recipe.solver.num_micro_batches(share, len(blocks))
        warm_up = max(steps, ceil(recipe.solver.delay(0, len(blocks)) / micro_batches))
        timed = method
        if not real:
            counts = micro_batches, recipe.serial.micro_batches or 1
            self.subject.measure(blocks, share, *(ceil(share / m) for m in counts))
            timed = _timed_by(method, self.subject.stand_in(blocks))

        def program(links: Any) -> dict[str, Any]:
            row = MethodContender(timed, links, partial(clocked, links, self.device))
            row.train(still_batches(self.data, size, warm_up, CPU))
            waits = [tuple(pair) for pair in row.rounds.waits]
            return {**self._timed(row, links, steps), "waits": waits}

        # replicas that only let time pass do all the same: one of them is enough
        one = replicas > 1 and not real
        likewise = partial(RepresentativeLinks, replicas=replicas)
        ranks = run_virtual(
            *(len(blocks), program, self.network, self.threads),
            *((1, likewise) if one else (replicas, VirtualLinks)),
        )
        elapsed, images = (max(r[of] for r in ranks) for of in ("seconds", "images"))
        swept = setup.sweeps if setup.stored_batches else 0
        waits = ranks[0]["waits"]
        local = micro_batches * sum(map(sum, waits)) / (len(waits) * share) if waits else swept
        return Prediction(
            len(blocks),
            recipe,
            blocks.cuts,
            images / elapsed,
            float(local),
            [max(0.0, r["waited"]) / elapsed for r in ranks],
            sum(r["sent"] for r in ranks) * (replicas if one else 1) / images,
            self.memory(blocks, recipe, replicas),
            share,
            replicas,
            self.settings.optimizer.name,
            waits,
        )

    def _timed(self, row: MethodContender, links: VirtualLinks, steps: int) -> dict[str, float]:
        """One rank's share of so many steps, between two reports where the solver trains alone."""
        batches = still_batches(self.data, self.size, steps, CPU)
        times = _timed(row, links, batches)
        if row.method.solver.alternates or row.method.solver.exact:
            return times
        every = self.settings.train.report_every * links.size
        more = (every - steps) / (3 * steps)
        longer = _timed(row, links, batches * 4)
        return {k: v + more * (longer[k] - v) for k, v in times.items()}


def _timed_by(method: Method, blocks: Blocks) -> Method:
    """The same with blocks that take as long, draw nothing, and need no compiling."""
    drawing: list[dict[nn.Module, tuple[int, ...]]] = [{} for _ in range(len(blocks))]
    problem = replace(method.problem, blocks=blocks, drawing=drawing)
    train = method.options.train.model_copy(update={"compile": False})
    return replace(method, problem=problem, options=replace(method.options, train=train))


def _timed(row: MethodContender, links: VirtualLinks, batches: list[Batch]) -> dict[str, float]:
    """One rank's share of training on `batches`; all begin together."""
    links.everyone(None)
    names, before = ("seconds", "sent", "waited"), (links.now(), *row.spent())
    row.train(batches)
    after = links.now(), *row.spent()
    spent = {k: b - a for k, a, b in zip(names, before, after, strict=True)}
    return {**spent, "images": sum(map(len, batches))}
