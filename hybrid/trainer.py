"""Builds a run and drives its rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hybrid import launch
from hybrid.config import CheckpointSettings, OptimiserSettings, ScheduleSettings, TrainSettings
from hybrid.data import Dataset
from hybrid.links import AgreedError, RankLinks, run_threads
from hybrid.partition import Blocks
from hybrid.run import Run
from solvers import AugmentedLagrangian, Backprop, Solver


@dataclass
class Trainer:
    """Trains a model cut into blocks by the serial-parallel hybrid.

    Under mpirun every rank makes the same Trainer and owns one block; alone, K threads do. A
    `solver` that is exact (`Backprop`) trains serially, without a parallel phase.
    """

    blocks: Blocks
    solver: Solver = field(default_factory=AugmentedLagrangian)
    correction: Backprop = field(default_factory=Backprop)
    window: int | Literal["all"] = 4
    sweeps: int = 1
    memory_gb: float = 4.0
    train: TrainSettings = field(default_factory=TrainSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    out: Path | None = None
    """Run folder; None keeps nothing."""
    resume: bool = False
    quiet: bool = False
    names: dict[str, str] = field(default_factory=dict)
    """What the summary calls model and data."""
    describe: Callable[[list[str]], str] = field(default=lambda cuts: f"# cuts = {cuts}\n")
    """Text of config.toml, given the cuts."""

    def __post_init__(self) -> None:
        if isinstance(self.solver, Backprop):
            self.correction = self.solver
        self.names = {
            "solver": self.solver.name,
            "model": type(self.blocks.model).__name__,
            "data": "custom",
            **self.names,
        }

    def fit(self, train: Dataset, test: Dataset, epochs: int | None = None) -> dict[str, Any]:
        """Train; give the summary, the same on every rank.

        Raises ValueError for settings that cannot work, before training starts, and DivergedError
        (a ValueError) if the loss stops being finite. Afterwards the model holds the trained
        weights: all of them after threads, under mpirun those of this rank's block.
        """
        if epochs is not None:
            self.train = self.train.model_copy(update={"epochs": epochs})
        launch.keep_memory()
        comm = launch.communicator()
        size = len(self.blocks)
        torch.set_num_threads(self.threads(size))
        if comm is not None:
            # measured cuts differ from rank to rank: the first rank's hold
            self.blocks = replace(self.blocks, starts=comm.bcast(self.blocks.starts))
        problem: ValueError | None = None
        try:
            shapes, device = self._check(train, test, comm)
        except ValueError as error:
            problem = error

        def program(links: RankLinks) -> dict[str, Any]:
            with links.agreement():
                if problem is not None:
                    raise problem
            return Run(self, links, train, test, shapes, device).fit()

        if comm is None:
            if problem is not None:
                raise AgreedError(str(problem))
            return run_threads(size, program, torch.get_num_threads())[0]
        from hybrid.links.mpi import run_mpi

        return run_mpi(comm, program, None if problem else device)[0]

    def threads(self, blocks: int) -> int:
        """Intra-operation threads of one rank."""
        return self.train.threads or launch.threads_per_rank(blocks)

    def _check(
        self, train: Dataset, test: Dataset, comm: Any
    ) -> tuple[list[tuple[int, ...]], torch.device]:
        size = len(self.blocks)
        if comm is not None and comm.size != size:
            raise ValueError(
                f"{size} blocks on {comm.size} MPI ranks: a rank owns one block, so start "
                f"mpirun -n {size}, or ask for {comm.size} blocks"
            )
        if self.train.batch_size > len(train):
            raise ValueError(
                f"the batch size is {self.train.batch_size} but there are {len(train)} training "
                f"images: choose a batch size of at most {len(train)}"
            )
        if isinstance(self.window, int) and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, or 'all'")
        shapes = self.blocks.cut_shapes(torch.zeros(1, *train.shape))
        factor = getattr(self.solver, "filter", 1)
        for cut, shape in zip(self.blocks.cuts, shapes, strict=True):
            if factor > 1 and (len(shape) != 3 or shape[1] % factor or shape[2] % factor):
                raise ValueError(
                    f"solver.filter is {factor}, but activations at the cut before {cut} have "
                    f"shape {shape}: choose a filter that divides their height and width"
                )
        return shapes, launch.device(self.train.device)
