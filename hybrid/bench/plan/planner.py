"""Predictions for a cluster: every recipe on every grid of ranks, on virtual links."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf, lcm
from typing import Any

import torch
from torch import nn

from hybrid.bench.contenders import CPU, MethodContender
from hybrid.bench.measure import still_batches
from hybrid.bench.plan.device import Device
from hybrid.bench.plan.prediction import Prediction
from hybrid.bench.plan.representative import RepresentativeLinks
from hybrid.bench.plan.standin import clocked
from hybrid.bench.plan.timed_network import Say, TimedNetwork, blocks_key
from hybrid.bench.recipes import BASE, Recipe, accumulating, recipes
from hybrid.data import Data
from hybrid.links import LinkSpeed, run_virtual
from hybrid.links.grid import Grid, GridPlace, grids, share_size
from hybrid.links.virtual import VirtualLinks
from hybrid.method.memory import Memory, process_bytes
from hybrid.method.method import Method
from hybrid.method.problem import Problem, check_size
from hybrid.networks.blocks import Blocks
from hybrid.ranks import launch
from hybrid.settings import methods
from hybrid.settings.config import Config
from hybrid.solvers import Batch, Solver, registry
from hybrid.solvers.local_work.work import check_local_method
from hybrid.training import build

LONGEST = 64
"""At most this many steps of a round of replicas are timed."""


class Planner:
    """Predicts speeds: measured times stand for the units, all else runs on virtual links."""

    def __init__(
        self,
        settings: Config,
        model: nn.Module,
        data: Data,
        network: LinkSpeed,
        say: Say = lambda text: None,
        device: Device | None = None,
        tell: Say = lambda text: None,
    ) -> None:
        """`device` is the device of every rank; None: one like this machine.

        `say` reports rows that are left out and why, `tell` the current work.
        """
        self.settings, self.network, self._say, self._tell = settings, network, say, tell
        self.device = device
        self.threads = settings.train.threads or 1
        launch.keep_memory()
        torch.set_num_threads(self.threads)
        check_local_method(methods.solver(settings), methods.named(settings, "fill"))
        self.size = settings.train.batch_size
        check_size(self.size, data)
        options = build.build_options(settings)
        # units are timed on a CPU, by torch's kernels
        on_cpu = options.train.model_copy(update={"device": "cpu", "kernels": "torch"})
        self._options = replace(options, train=on_cpu)
        self._problems: dict[tuple[object, ...], Problem] = {}
        self.refused: list[str] = []
        """Why recipes were left out."""
        self.timed = TimedNetwork(settings, model, data, tell, device)
        self._alone: dict[tuple[int, ...], list[Prediction]] = {}
        self.data, self.model = data, self.timed.model
        self._memory = Memory()
        self._process = process_bytes(self.model) if device is None else 0

    def blocks(
        self, count: int, samples: int = 0, cuts: Sequence[str] = (), inside: bool = True
    ) -> Blocks:
        """Cut the model into `count` blocks, `inside` units, too, with costs over `samples`."""
        return self.timed.blocks(count, samples or ceil(self.size / 4), cuts, inside=inside)

    def grids(self, ranks: int) -> list[Grid]:
        """List every way to write a number of ranks as K x R."""
        return grids(ranks, self.timed.num_units, self.size)

    def predictions(
        self, wanted: Sequence[Grid], micro_batches: Sequence[int], cuts: Sequence[str] = ()
    ) -> Iterator[Prediction]:
        """Predict every recipe on every grid, with `cuts` or balanced by measured cost.

        ValueError if the settings leave no recipe on any of them.
        """
        for grid in wanted:
            replace(self._options, replicas=grid.replicas).check()
        any_predicted = False
        for grid in wanted:
            try:
                for row in self._on(grid, micro_batches, cuts):
                    any_predicted, base = True, self.on_one_rank(micro_batches)[0]
                    yield replace(row, speed_up=row.images_per_second / base.images_per_second)
            except ValueError as error:  # the network cannot be cut in this way, or timed
                if len(wanted) == 1:
                    raise
                self._leave_out(f"{grid}", error)
        if not any_predicted:
            raise ValueError(self.refused[0])

    def _leave_out(self, name: str, error: ValueError) -> None:
        self.refused.append(str(error))
        self._say(f"{name} is left out: {error}")

    def on_one_rank(self, micro_batches: Sequence[int]) -> list[Prediction]:
        """Predict the rows on one rank, fastest first: undivided, and accumulating over m."""
        key = tuple(micro_batches)
        if key not in self._alone:
            whole = self.blocks(1)
            parts = [m for m in dict.fromkeys(micro_batches) if 1 < m <= self.size]
            ways = [BASE, *map(accumulating, parts)]
            self.timed.measure(whole, *(ceil(self.size / r.micro_batches) for r in ways))
            alone = sorted(
                (self.predict(whole, r) for r in ways), key=lambda p: -p.images_per_second
            )
            rate = alone[0].images_per_second
            self._alone[key] = [replace(p, speed_up=p.images_per_second / rate) for p in alone]
        return self._alone[key]

    def _on(
        self, grid: Grid, micro_batches: Sequence[int], cuts: Sequence[str]
    ) -> Iterator[Prediction]:
        """Predict the recipes on one grid, except those that cannot train, be timed or fit."""
        K, R = grid
        share = share_size(self.size, 0, R)
        parts = [m for m in micro_batches if (m if R == 1 else 2 * m) <= share] or [1]
        # enough that no block is more than one step late; the prediction shows whether it pays
        bound = 1 << (K - 2).bit_length() if K > 2 else 1
        if max(parts) < bound <= share:
            parts.append(bound)
        size = ceil(share / parts[0])
        sizes = [ceil(share / m) for m in (1, *parts)]
        cut = {True: self.blocks(K, size, cuts)}
        self.timed.measure(cut[True], *sizes)
        memory = self.timed.machines(K, R)[1]
        limits = memory or [(self.device and self.device.memory_gb) or inf] * K
        for recipe in self._recipes(grid, parts):
            self._tell(f"{grid}: {recipe.name}")
            try:
                inside = recipe.solver.cuts_inside or K == 1
                if inside not in cut:
                    cut[inside] = self.blocks(K, size, cuts, inside)
                    self.timed.measure(cut[inside], *sizes)
                blocks = cut[inside]
                if memory and not cuts:
                    needed = partial(self.memory, recipe=recipe, replicas=R)
                    blocks = self.timed.blocks(K, size, needed=needed, inside=inside)
                prediction = self.predict(blocks, recipe, replicas=R)
                needs = zip(prediction.memory_bytes, limits, strict=True)
                most, limit = max(needs, key=lambda need: need[0] / need[1])
                if most > limit * 1e9:
                    raise ValueError(
                        f"{recipe.name} on {grid} needs {most / 1e9:.3g} GB a rank, and the device "
                        f"has {limit:g}: take more blocks, a smaller --batch-size, or recompute"
                    )
                yield prediction
            except ValueError as error:
                self._leave_out(f"{grid}: {recipe.name}", error)

    def _recipes(self, grid: Grid, micro_batches: Sequence[int]) -> list[Recipe]:
        """List the recipes of one grid; a single block with several replicas has no pipeline."""
        rows = recipes(
            micro_batches,
            methods.correction(self.settings),
            self.solvers() if grid.blocks > 1 or grid.replicas == 1 else [BASE.solver],
            self.settings.rounds.memory_gb,
            {self.settings.solver["name"]: methods.named(self.settings, "fill")},
        )
        if grid.replicas == 1:
            return rows
        sync = methods.named(self.settings, "sync")
        return [replace(row, sync=sync) for row in rows[: None if grid.blocks > 1 else 1]]

    def method(self, blocks: Blocks, recipe: Recipe, replicas: int = 1) -> Method:
        """Make the method by which a recipe trains these blocks; ValueError if it cannot."""
        key = blocks_key(blocks)
        if key not in self._problems:
            self._problems[key] = Problem.of(self._options, blocks, self.data)
        return recipe.method(self._problems[key], self._options, replicas)

    def memory(self, blocks: Blocks, recipe: Recipe, replicas: int = 1) -> list[int]:
        """Estimate the bytes of each process of the first replica, which has the largest share."""
        method = self.method(blocks, recipe, replicas).of_replica(GridPlace(replicas=replicas))
        needed = self._memory.needed(method, self.timed.inputs(blocks))
        return [self._process + size for size in needed]

    def solvers(self) -> list[Solver]:
        """List the solver of the settings, and others with a known progress per step."""
        first = methods.solver(self.settings)
        others = [registry.solver_class(name)() for name in registry.OWN if name != first.name]
        return [first, *(x for x in others if x.progress(2, self.size) is not None)]

    def predict(
        self, blocks: Blocks, recipe: Recipe, steps: int = 4, real: bool = False, replicas: int = 1
    ) -> Prediction:
        """Time `steps` mini-batches (whole windows, whole rounds) after a warm-up of as many.

        Units are stand-ins that take the measured time, unless `real`. A pipeline that is emptied
        at every report is timed over `steps` and over four times as many, to extrapolate to the
        mini-batches between two reports.
        """
        if blocks.speeds and len(blocks) == 1 and replicas > 1:  # one on each of the machines
            blocks = replace(blocks, speeds=self.timed.machines(1, replicas)[0])
        method = self.method(blocks, recipe, replicas)
        setup = method.of_replica(GridPlace(replicas=replicas)).setup
        share = setup.batch_size
        if self.device is not None:  # all steps take the same time
            steps = min(steps, 2)
        steps = setup.stored_batches or steps
        if replicas > 1:
            steps = lcm(steps, min(getattr(recipe.sync, "steps", 1), LONGEST))
        micro_batches = recipe.solver.num_micro_batches(share, len(blocks))
        warm_up = max(steps, ceil(recipe.solver.delay(0, len(blocks)) / micro_batches))
        timed = method
        if not real:
            counts = micro_batches, recipe.serial.micro_batches or 1
            self.timed.measure(blocks, share, *(ceil(share / m) for m in counts))
            timed = _timed_by(method, self.timed.stand_in(blocks))

        def program(links: Any) -> dict[str, Any]:
            row = MethodContender(timed, links, partial(clocked, links, self.device))
            row.train(still_batches(self.data, self.size, warm_up, CPU))
            budgets = [tuple(pair) for pair in row.rounds.local_budgets]
            return {**self._timed(row, links, steps), "local_budgets": budgets}

        # replicas of stand-ins behave identically: one of them is enough
        one = replicas > 1 and not real
        likewise = partial(RepresentativeLinks, replicas=replicas)
        grid = (1, likewise) if one else (replicas, VirtualLinks)
        ranks = run_virtual(len(blocks), program, self.network, self.threads, *grid)
        elapsed, images = (max(r[of] for r in ranks) for of in ("seconds", "images"))
        budgets = ranks[0]["local_budgets"]
        local = setup.sweeps if setup.stored_batches else 0.0
        if budgets:
            local = micro_batches * sum(map(sum, budgets)) / (len(budgets) * share)
        return Prediction(
            Grid(len(blocks), replicas),
            recipe,
            blocks.cuts,
            images / elapsed,
            local,
            [max(0.0, r["waited"]) / elapsed for r in ranks],
            sum(r["sent"] for r in ranks) * (replicas if one else 1) / images,
            self.memory(blocks, recipe, replicas),
            share,
            self.settings.optimizer.name,
            budgets,
        )

    def _timed(self, row: MethodContender, links: VirtualLinks, steps: int) -> dict[str, float]:
        """Time one rank's `steps`, extrapolated to the interval between reports of a pipeline."""
        batches = still_batches(self.data, self.size, steps, CPU)
        times = _timed(row, links, batches)
        if row.method.solver.alternates or row.method.solver.exact:
            return times
        more = (self.settings.train.report_every * links.size - steps) / (3 * steps)
        longer = _timed(row, links, batches * 4)
        return {k: v + more * (longer[k] - v) for k, v in times.items()}


def _timed_by(method: Method, blocks: Blocks) -> Method:
    """Replace a method's blocks by stand-ins, without random numbers and compilation."""
    drawing: list[dict[nn.Module, tuple[int, ...]]] = [{} for _ in range(len(blocks))]
    problem = replace(method.problem, blocks=blocks, drawing=drawing)
    train = method.options.train.model_copy(update={"compile": False})
    return replace(method, problem=problem, options=replace(method.options, train=train))


def _timed(row: MethodContender, links: VirtualLinks, batches: list[Batch]) -> dict[str, float]:
    """Time one rank's training on `batches`; all ranks begin together."""
    links.all_gather_grid(None)
    before = links.now(), *row.spent()
    row.train(batches)
    after = links.now(), *row.spent()
    seconds, sent, waited = (b - a for a, b in zip(before, after, strict=True))
    images = sum(map(len, batches))
    return {"seconds": seconds, "sent": sent, "waited": waited, "images": images}
