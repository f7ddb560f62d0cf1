"""The bench: every way to train the same network on these ranks, interleaved in one run."""

import socket
import sys
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from hybrid.bench import report
from hybrid.bench.loops import PlainLoop, host_cores
from hybrid.bench.measure import Contender, Runs, Speed, still_batches, throughput, timed
from hybrid.bench.recipes import BASE, MethodContender, Recipe, accumulating, recipes
from hybrid.links import AgreedError
from hybrid.links.base import Start
from hybrid.links.communicator import Communicator
from hybrid.links.grid import Grid, factorizations, share_size
from hybrid.method import schedule as schedules
from hybrid.method.problem import Problem, check_size
from hybrid.networks.partition import split
from hybrid.networks.units import Chain, units
from hybrid.ranks import launch
from hybrid.registries import LINKS, SAMPLERS
from hybrid.rounds.batch_sampler import BatchSampler
from hybrid.rounds.report import DivergedError
from hybrid.rounds.windows import Windows
from hybrid.settings import methods
from hybrid.settings.config import Config
from hybrid.settings.resolve import check_command, refuse_rounds
from hybrid.solvers import Batch, registry
from hybrid.solvers.blocks.block import Block
from hybrid.solvers.kernels.choice import choose
from hybrid.training import build
from hybrid.training.evaluation import measure_one_block

NO_OTHERS: Mapping[str, Callable[[Chain], Contender]] = {}


class Bench:
    """One bench on all ranks of a communicator."""

    def __init__(
        self,
        comm: Communicator,
        settings: Config,
        micro_batches: Sequence[int],
        only: Sequence[str],
        out: Path,
        others: Mapping[str, Callable[[Chain], Contender]] = NO_OTHERS,
    ) -> None:
        """`others` makes rows beside this project's own, from the network."""
        _refuse(settings)
        if comm.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            # hours of measuring must not end at a folder without permission to write
            tempfile.TemporaryFile(dir=out).close()
        self.out = out
        self.comm, self.settings, self.others = comm, settings, others
        self.micro_batches, self.only = list(micro_batches), list(only)
        mine = methods.solver(settings)
        usable = registry.SOLVERS.usable(self.say)
        solvers = [mine if kind is type(mine) else kind() for kind in usable.values()]
        memory_gb = settings.rounds.memory_gb
        made = recipes(micro_batches, methods.correction(settings), solvers, memory_gb)
        size = settings.train.batch_size
        accumulated = [1, *(m for m in micro_batches if 1 < m <= size)]
        self.bases = {(accumulating(m) if m > 1 else BASE).name: m for m in accumulated}
        """The ways to train on one rank, of which the fastest is the base case."""
        too_many = [recipe.name for recipe in made if recipe.micro_batches > size]
        self.left_out = dict.fromkeys(too_many, f"a mini-batch has {size} samples")
        """Rows that cannot be, and why."""
        made = [recipe for recipe in made if recipe.micro_batches <= size]
        self.own = {recipe.name: (recipe, Grid(comm.size)) for recipe in made}
        self.own |= self._replicated(made)
        self.threads = settings.train.threads or 1
        launch.keep_memory()
        torch.set_num_threads(self.threads)
        self.device = launch.device(settings.train.device)
        choose(settings.train.kernels, self.device.type == "cuda")
        self.train, self.test = build.load_images(settings.data)
        check_size(settings.train.batch_size, self.train)

    def _replicated(self, made: Sequence[Recipe]) -> dict[str, tuple[Recipe, Grid]]:
        """The rows with replicas, a few for each grid: an exact one, and the best delayed one."""
        wanted, ranks, size = self.settings.split, self.comm.size, self.settings.train.batch_size
        sync, first = methods.sync(self.settings), self.micro_batches[0]
        steps = self.settings.optimizer.name
        every = factorizations(ranks, ranks - 1)
        if wanted.replicas > 1:
            every = [Grid(wanted.blocks, wanted.replicas)]
        found: dict[str, tuple[Recipe, Grid]] = {}
        for grid in every:
            K, share = grid.blocks, share_size(size, 0, grid.replicas)
            fitting = [r for r in made if r.micro_batches <= share]
            m = 1 if K == 1 else first
            rows = [r for r in fitting if r.solver.exact and r.micro_batches == m][:1]
            worth = [
                (-r.solver.num_micro_batches(share), r.solver.progress(K, share, steps), r)
                for r in fitting
                if r.delayed and K > 1 and r.solver.progress(K, share, steps)
            ]
            rows += [r for *_, r in sorted(worth, key=itemgetter(0, 1))[-1:]]
            for r in rows:
                found[f"{r.name}, {grid}, {sync.name}"] = replace(r, sync=sync), grid
        return found

    def connect(self) -> None:
        """Settle the rows; all ranks call it. AgreedError if `only` names no row."""
        self.cores = self.comm.bcast(len(host_cores()))
        there = [*self._loops(self.model(0)), *self.others, *self.own]
        words = [word.casefold() for word in self.only]
        chosen = [n for n in there if any(word in n.casefold() for word in words or [""])]
        if not chosen:
            raise AgreedError(
                f"--rows {','.join(self.only)} names no row; there are: {'; '.join(there)}"
            )
        self.chosen = list(dict.fromkeys([*self.bases, *chosen]))

    def model(self, seed: int) -> Chain:
        """The network with the weights of a seed."""
        chosen = self.settings.train.model_copy(update={"seed": seed})
        return build.build_model(self.settings.model_copy(update={"train": chosen}), self.train)

    def problem(self, model: Chain, count: int) -> Problem:
        """What our own rows of so many blocks train."""
        asked = self.settings.split
        cuts = asked.cuts if len(asked.cuts) == count - 1 else None
        blocks = split(model, count, cuts=cuts, balance=asked.balance)
        blocks.starts, blocks.costs = self.comm.bcast((blocks.starts, blocks.costs))
        return Problem.of(build.build_options(self.settings), blocks, self.train, self.test)

    def contenders(self, seed: int, out: Container[str] = ()) -> dict[str, Contender]:
        """The chosen rows that can be and are not in `out`, the base case first."""
        model = self.model(seed)
        # measured cuts differ from one time to the next
        problem = cache(partial(self.problem, model))
        makers = self._loops(model)
        makers |= {name: partial(make, model) for name, make in self.others.items()}
        makers |= {
            name: partial(self._ours, problem, recipe, grid)
            for name, (recipe, grid) in self.own.items()
        }
        made: dict[str, Contender] = {}
        for name in self.chosen:
            if name in out:
                continue
            try:
                made[name] = makers[name]()
            except ValueError as error:
                # the same on every rank: what cannot be follows from K, R and m
                self.left_out[name] = str(error)
        return made

    def _ours(self, problem: Callable[[int], Problem], recipe: Recipe, grid: Grid) -> Contender:
        """One of our own rows; ValueError for a grid that cannot be."""
        K, R = grid
        method = recipe.method(problem(K), build.build_options(self.settings), R)
        kind = LINKS[launch.joined_by()]
        start = Start(grid, self.settings.links, self.device, method.arrangement, self.comm)
        return MethodContender(method, kind(start))

    def _loops(self, model: Chain) -> dict[str, Callable[[], Contender]]:
        """What makes the hand-written loops, which train on the first rank."""
        here, every = self.comm.rank == 0, f"plain loop, {self.cores} threads"
        loops = {name: (self.threads, m) for name, m in self.bases.items()}
        loops[every] = self.cores, 1
        return {
            name: partial(PlainLoop, model, self.settings.optimizer, *loop, self.device, here)
            for name, loop in loops.items()
        }

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.comm.rank == 0:
            print(text, flush=True)

    def to_accuracy(self, target: float, lengths: Sequence[int], seeds: int) -> list[Runs]:
        """Train every row for each number of epochs until its mean final accuracy reaches `target`.

        The learning rate falls to zero at the end of each run, so a run's accuracy before its end
        is no measure; a row's time to accuracy is that of its shortest run that gets there. All
        rows begin with the weights of a seed. A row that diverges is left out from then on.
        """
        done: list[Runs] = []
        reached: set[str] = set()
        for epochs in sorted(lengths):
            runs: dict[str, Runs] = {}
            for seed in range(self.settings.train.seed, self.settings.train.seed + seeds):
                out = reached | self.left_out.keys()
                rows = self.contenders(seed, out)
                seconds = self._train(rows, epochs, seed)
                for name, row in rows.items():
                    if name not in seconds:
                        runs.pop(name, None)
                        row.close()
                        continue
                    state = row.state_dict()
                    found = 0.0 if state is None else self._tested(seed, state)
                    self.comm.barrier()
                    run = runs.setdefault(name, Runs(name, epochs))
                    run.test_accuracy.append(self.comm.bcast(found))
                    run.seconds.append(seconds[name])
                    row.close()
            for run in runs.values():
                reached |= {run.name} if run.spread()[0] >= target else set()
                told = f"{run.spread()[0]:.2%} in {mean(run.seconds):.1f} s"
                self.say(f"{run.name}, {epochs} epochs: {told}")
            done += runs.values()
        return done

    def _train(self, rows: Mapping[str, Contender], epochs: int, seed: int) -> dict[str, float]:
        """Seconds of each row, epoch by epoch in turn; rows that diverge are left out."""
        settings, size = self.settings, self.settings.train.batch_size
        every = len(self.train) // size
        schedule = schedules.make_schedule(settings.schedule, settings.optimizer.lr, every, epochs)
        chosen = BatchSampler(SAMPLERS[SAMPLERS.default](), self.train, seed, size)
        windows = Windows(self.train, chosen, every, False, 1, seed, schedule, self.device)
        totals = dict.fromkeys(rows, 0.0)
        for epoch in range(epochs):
            trained, _ = next(windows.of_epoch(epoch))
            for name in list(totals):
                try:
                    totals[name] += timed(self.comm, partial(_epoch, rows[name], trained.batches))
                except DivergedError:  # on all ranks
                    where = f"epoch {epoch + 1} of {epochs}, seed {seed}"
                    self.left_out[name] = f"its loss is not finite in {where}: try a lower --lr"
                    self.say(f"{name} is left out: {self.left_out[name]}")
                    del totals[name]
        return totals

    def _tested(self, seed: int, state: dict[str, Tensor]) -> float:
        model = self.model(seed)
        model.load_state_dict(state)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        block = Block(model, 0, 1, {})
        return measure_one_block(block, self.test, block.objective, self.threads)["accuracy"]

    def run(
        self, turns: int, steps: int, target: float | None, lengths: Sequence[int], seeds: int
    ) -> str | None:
        """Measure, and write the report on rank 0; its Markdown there.

        The throughputs are written before the trainings to accuracy begin, which may fail.
        """
        size = self.settings.train.batch_size
        batches = still_batches(self.train, size, steps, self.device)
        rows = self.contenders(self.settings.train.seed)
        speeds = throughput(self.comm, rows, batches, turns, self.say)
        while rows:
            rows.popitem()[1].close()
        facts = self._facts() | {"turns": turns, "steps": steps, "target": None}
        runs: list[Runs] = []
        if target is not None:
            self._write(facts, speeds, runs)
            runs = self.to_accuracy(target, lengths, seeds)
        return self._write(facts | {"target": target}, speeds, runs)

    def _facts(self) -> dict[str, Any]:
        """What the figures depend on; all ranks call it."""
        settings, size = self.settings, self.settings.train.batch_size
        model = self.model(settings.train.seed)
        return {
            "machine": report.machine(),
            "command": " ".join(["hybrid", *sys.argv[1:]]),
            "ranks": self.comm.size,
            "links": launch.joined_by(),
            "hosts": len(set(self.comm.allgather(socket.gethostname()))),
            "threads": self.threads,
            "model": settings.model.name,
            "data": settings.data.name,
            "batch_size": size,
            "precision": settings.train.precision,
            "cuts": self.problem(model, min(self.comm.size, len(units(model)))).blocks.cuts,
            "bases": [name for name in self.bases if name not in self.left_out],
            "epoch_images": len(self.train) // size * size,
        }

    def _write(
        self, facts: dict[str, Any], speeds: Sequence[Speed], runs: Sequence[Runs]
    ) -> str | None:
        if self.comm.rank != 0:
            return None
        title = f"{facts['model']} on {facts['data']}, {facts['ranks']} ranks"
        return report.write(self.out, title, facts | {"left_out": self.left_out}, speeds, runs)


def _refuse(settings: Config) -> None:
    """ValueError for a setting that has no effect on any row."""
    check_command("bench", settings)
    refuse_rounds(settings, "the bench's rows have rounds and --micro-batches of their own")
    if (name := settings.sampler["name"]) != SAMPLERS.default:
        raise ValueError(
            f"sampler.name is {name!r}, but the bench's rows all choose samples by "
            f"{SAMPLERS.default!r}: leave it out"
        )


def _epoch(row: Contender, batches: Sequence[Batch]) -> None:
    row.train(batches)
    row.end_epoch()
