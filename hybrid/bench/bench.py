"""The bench: all methods on the same network and ranks, interleaved in one run."""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from hybrid.bench import table
from hybrid.bench.contenders import Contender, MethodContender, PlainLoop
from hybrid.bench.measure import still_batches, throughput
from hybrid.bench.recipes import BASE, Recipe, accumulating, recipes
from hybrid.links import AgreedError
from hybrid.links.base import Start
from hybrid.links.communicator import Communicator
from hybrid.links.gpus import links_between
from hybrid.links.grid import Grid, share_size
from hybrid.method.problem import Problem, check_size
from hybrid.networks.partition.split import split
from hybrid.networks.units import Chain, units
from hybrid.ranks import launch
from hybrid.ranks.progress import Bar
from hybrid.ranks.starting import link_class
from hybrid.registries import SAMPLERS
from hybrid.settings import methods
from hybrid.settings.config import Config
from hybrid.settings.resolve import check_command, refuse_rounds
from hybrid.solvers import registry
from hybrid.solvers.kernels.launcher import choose
from hybrid.solvers.local_work.work import check_local_method
from hybrid.training import build


class Bench:
    """One bench on all ranks of a communicator."""

    def __init__(
        self,
        comm: Communicator,
        settings: Config,
        micro_batches: Sequence[int],
        only: Sequence[str],
        out: Path,
    ) -> None:
        _refuse(settings)
        if comm.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            # hours of measuring must not end at a folder without permission to write
            tempfile.TemporaryFile(dir=out).close()
        self.out = out
        self.comm, self.settings = comm, settings
        self.micro_batches, self.only = list(micro_batches), list(only)
        solver = methods.solver(settings)
        usable = registry.SOLVERS.usable(self.say)
        solvers = [solver if kind is type(solver) else kind() for kind in usable.values()]
        memory_gb = settings.rounds.memory_gb
        size = settings.train.batch_size
        accumulated = [1, *(m for m in micro_batches if 1 < m <= size)]
        self.bases = {(accumulating(m) if m > 1 else BASE).name: m for m in accumulated}
        """The rows on one rank; the fastest is the base case."""
        correction = methods.correction(settings)
        fills = {solver.name: methods.named(settings, "fill")}
        check_local_method(solver, fills[solver.name])
        rows = recipes(micro_batches, correction, solvers, memory_gb, fills)
        self.left_out: dict[str, str] = {}
        """Rows that cannot run, and why."""
        self.recipes = self._on_grids(rows)
        self.threads = settings.train.threads or 1
        launch.keep_memory()
        torch.set_num_threads(self.threads)
        self.device = launch.device(settings.train.device)
        choose(settings.train.kernels, self.device.type == "cuda")
        self.train, self.test = build.load_own(settings.data)
        check_size(settings.train.batch_size, self.train)

    def _on_grids(self, rows: Sequence[Recipe]) -> dict[str, tuple[Recipe, Grid]]:
        """Put all rows on the grid of the settings, and the undivided network on all ranks."""
        split, ranks = self.settings.split, self.comm.size
        sync = methods.named(self.settings, "sync")
        grid = Grid(split.blocks, split.replicas) if split.replicas > 1 else Grid(ranks)
        rows_on_grid = [(row, grid) for row in rows if grid.blocks > 1]
        by_name: dict[str, tuple[Recipe, Grid]] = {}
        for row, grid in [*rows_on_grid, (rows[0], Grid(1, ranks))]:
            share = share_size(self.settings.train.batch_size, 0, grid.replicas)
            name = row.name if grid.replicas == 1 else f"{row.name}, {grid}, {sync.name}"
            if row.micro_batches <= share:
                by_name[name] = row if grid.replicas == 1 else replace(row, sync=sync), grid
            else:
                self.left_out[name] = f"a mini-batch has {share} samples"
        return by_name

    def connect(self) -> None:
        """Choose the rows; all ranks call it. AgreedError if `only` matches no row."""
        self.cores = self.comm.bcast(len(os.sched_getaffinity(0)))
        names = [*self.loops(self.model()), *self.recipes]
        words = [word.casefold() for word in self.only]
        chosen = [n for n in names if any(word in n.casefold() for word in words or [""])]
        if not chosen:
            raise AgreedError(
                f"--rows {','.join(self.only)} names no row; there are: {'; '.join(names)}"
            )
        self.chosen = list(dict.fromkeys([*self.bases, *chosen]))

    def model(self) -> Chain:
        return build.build_model(self.settings, self.train)

    def problem(self, model: Chain, count: int, inside: bool) -> Problem:
        settings = self.settings.split
        cuts: Sequence[str] | None = settings.cuts if len(settings.cuts) == count - 1 else None
        if cuts is None and self.comm.rank == 0:
            may = (None if inside else False) if settings.inside is None else settings.inside
            cuts = split(model, count, balance=settings.balance, inside=may).cuts
        blocks = split(model, cuts=self.comm.bcast(cuts))
        return Problem.of(build.build_options(self.settings), blocks, self.train, self.test)

    def contenders(self) -> dict[str, Contender]:
        """Build the chosen rows that can run, the base case first."""
        model = self.model()
        # cached: measured cuts differ from one measurement to the next
        problem = cache(partial(self.problem, model))
        makers = self.loops(model) | {
            name: partial(self._method_row, problem, recipe, grid)
            for name, (recipe, grid) in self.recipes.items()
        }
        rows: dict[str, Contender] = {}
        for name in self.chosen:
            try:
                rows[name] = makers[name]()
            except ValueError as error:
                # the same on every rank, because it follows from K, R and m
                self.left_out[name] = str(error)
        return rows

    def _method_row(
        self, problem: Callable[[int, bool], Problem], recipe: Recipe, grid: Grid
    ) -> Contender:
        """Build the row of a method; ValueError for an impossible grid."""
        K, R = grid
        method = recipe.method(
            problem(K, recipe.solver.cuts_inside), build.build_options(self.settings), R
        )
        begin = Start(grid, self.settings.links, self.device, method.arrangement, self.comm)
        links: Any = links_between(link_class(self.settings.links), begin)
        return MethodContender(method, links(begin))

    def loops(self, model: Chain) -> dict[str, Callable[[], Contender]]:
        """Return factories of the hand-written loops on the first rank."""
        here, precision = self.comm.rank == 0, getattr(torch, self.settings.train.precision)
        loops = {name: (self.threads, m) for name, m in self.bases.items()}
        if self.cores > self.threads:
            loops[f"plain loop, {self.cores} threads"] = self.cores, 1
        return {
            name: partial(
                PlainLoop, model, self.settings.optimizer, *loop, self.device, here, precision
            )
            for name, loop in loops.items()
        }

    def say(self, text: str) -> None:
        if self.comm.rank == 0:
            print(text, flush=True)

    def run(self, turns: int, steps: int) -> str | None:
        """Measure, and write the report on rank 0; return its Markdown there."""
        batches = still_batches(self.train, self.settings.train.batch_size, steps, self.device)
        rows = self.contenders()
        with Bar(0) as bar, launch.numerics(self.settings.train.deterministic):
            speeds = throughput(self.comm, rows, batches, turns, self.say, bar)
        while rows:
            rows.popitem()[1].close()
        facts = self._facts() | {"turns": turns, "steps": steps, "left_out": self.left_out}
        return table.write(self.out, facts, speeds) if self.comm.rank == 0 else None

    def _facts(self) -> dict[str, Any]:
        """Collect the conditions of the measurement; all ranks call it."""
        settings, size = self.settings, self.settings.train.batch_size
        model = self.model()
        return {
            "machine": table.machine(),
            "command": " ".join(["hybrid", *sys.argv[1:]]),
            "ranks": self.comm.size,
            "links": launch.joined_by(),
            "hosts": len(set(self.comm.allgather(socket.gethostname()))),
            "threads": self.threads,
            "model": settings.model.name,
            "data": settings.data.name,
            "batch_size": size,
            "precision": settings.train.precision,
            "cuts": self.problem(model, min(self.comm.size, len(units(model))), True).blocks.cuts,
            "bases": [name for name in self.bases if name not in self.left_out],
            "epoch_images": len(self.train) // size * size,
        }


def _refuse(settings: Config) -> None:
    check_command("bench", settings)
    refuse_rounds(settings, "the bench's rows have rounds and --micro-batches of their own")
    if (name := settings.sampler["name"]) != SAMPLERS.default:
        raise ValueError(
            f"sampler.name is {name!r}, but the bench's rows all choose samples by "
            f"{SAMPLERS.default!r}: leave it out"
        )
