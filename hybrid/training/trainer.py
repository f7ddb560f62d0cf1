"""Builds a run and drives its rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hybrid.cuts.partition import SAMPLES, Blocks
from hybrid.data import Dataset
from hybrid.links import AgreedError, Network, RankLinks, run_threads, run_virtual
from hybrid.links.base import Program
from hybrid.ranks import launch
from hybrid.ranks.stopping import leave_if_asked, listening
from hybrid.settings.config import (
    CheckpointSettings,
    LinkSettings,
    OptimiserSettings,
    ScheduleSettings,
    TrainSettings,
)
from hybrid.training.run import Run
from solvers import AugmentedLagrangian, Backprop, Penalty, Solver
from solvers.kernels import choose
from solvers.passes.pipeline import FillStep, Gaps, fit


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
    correct_every: int | None = None
    """Rounds from one serial phase to the next; None: 0 for solvers that train alone, else 1."""
    fill: bool = False
    fill_step: FillStep = "added"
    gaps: list[Gaps] = field(default_factory=list)
    """Local work of each block in one pass; empty: what fits by the blocks' costs."""
    memory_gb: float = 4.0
    train: TrainSettings = field(default_factory=TrainSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    links: LinkSettings = field(default_factory=LinkSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    out: Path | None = None
    """Run folder; None keeps nothing."""
    resume: bool = False
    quiet: bool = False
    names: dict[str, str] = field(default_factory=dict)
    """What the summary calls model and data."""
    describe: Callable[[list[str]], str] = field(default=lambda cuts: f"# cuts = {cuts}\n")
    """Text of config.toml, given the cuts."""

    kernels: str = field(init=False, default="torch")
    """Who computes between the passes, settled by `fit`."""

    def __post_init__(self) -> None:
        if isinstance(self.solver, Backprop):
            self.correction = self.solver
        if self.correct_every is None:
            self.correct_every = 0 if self.solver.standalone else 1
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
            run = Run(self, links, train, test, shapes, device, request)
            leave_if_asked(links, request)
            return run.fit()

        with listening() as request:
            return self._start(comm, program, None if problem else device, problem)

    def _start(
        self,
        comm: Any,
        program: Program[dict[str, Any]],
        device: torch.device | None,
        problem: ValueError | None,
    ) -> dict[str, Any]:
        """Run the program on MPI ranks, virtual ranks or threads."""
        size = len(self.blocks)
        if comm is None:
            if problem is not None:
                raise AgreedError(str(problem))
            threads = torch.get_num_threads()
            if self.links.kind == "virtual":
                rate = self.links.gigabits_per_second * 1e9 / 8
                network = Network(rate, self.links.latency_microseconds * 1e-6)
                return run_virtual(size, program, network, threads)[0]
            return run_threads(size, program, threads)[0]
        from hybrid.links import probe
        from hybrid.links.mpi import run_mpi

        found = launch.ranks()
        local_rank = found.local_rank if found else 0
        direct = probe.agreed(self.links.gpu_aware, device, comm, local_rank)
        return run_mpi(comm, program, device, direct.direct)[0]

    def threads(self, blocks: int) -> int:
        """Intra-operation threads of one rank; virtual ranks are alone on the machine."""
        if self.links.kind == "virtual":
            return self.train.threads or 1
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
        if comm is not None and self.links.kind == "virtual":
            raise ValueError(
                f"links.kind is 'virtual', which runs in 1 process, but there are {comm.size} MPI "
                "ranks: start it without mpirun"
            )
        if self.solver.standalone:
            self._check_alone()
        if self.correct_every != 1 and not self.sweeps and not self.solver.exact:
            raise ValueError(
                f"rounds.correct_every is {self.correct_every} and rounds.sweeps is 0, so some "
                "rounds would train nothing: set correct_every to 1, or sweeps to at least 1"
            )
        sample = torch.zeros(SAMPLES, *train.shape).to(memory_format=torch.channels_last)
        shapes = self.blocks.cut_shapes(sample)
        self._check_fill(sample)
        factor = max(getattr(self.solver, "filter", 1), self.correction.filter)
        for cut, shape in zip(self.blocks.cuts, shapes, strict=True):
            if factor > 1 and (len(shape) != 3 or shape[1] % factor or shape[2] % factor):
                raise ValueError(
                    f"the filter is {factor}, but activations at the cut before {cut} have "
                    f"shape {shape}: choose a filter that divides their height and width"
                )
        device = launch.device(self.train.device)
        self.kernels = choose(self.train.kernels, device.type == "cuda")
        if self.train.graphs and self.train.precision == "float16":
            raise ValueError(
                "train.graphs is true and train.precision is 'float16', whose loss scale waits for "
                "the GPU at every step: choose bfloat16, or train.graphs=false"
            )
        return shapes, device

    def _check_alone(self) -> None:
        name = self.solver.name
        if self.correct_every == 1:
            raise ValueError(
                f"rounds.correct_every is 1, so all rounds would be serial and {name!r} would "
                "train nothing: set it to 0 (never serial) or to at least 2"
            )
        if self.sweeps != 1:
            raise ValueError(
                f"rounds.sweeps is {self.sweeps}, but {name!r} trains on every mini-batch once: "
                "leave it out"
            )
        if self.train.compile and name == "petra":
            raise ValueError(
                "train.compile is true, but 'petra' goes through its blocks unit by unit: leave it "
                "out"
            )

    def _check_fill(self, sample: torch.Tensor) -> None:
        """Settle what each block does in its gaps."""
        if not self.fill:
            return
        if self.train.precision == "float16":
            raise ValueError(
                "rounds.fill adds gradients of several passes, and train.precision is 'float16', "
                "whose scale may change between them: choose bfloat16, or give a --window"
            )
        if self.correct_every != 1:
            raise ValueError(
                f"rounds.fill works in the gaps of every round's serial phase, but "
                f"rounds.correct_every is {self.correct_every}: set it to 1, or rounds.fill=false"
            )
        if not isinstance(self.solver, Penalty):
            raise ValueError(
                f"rounds.fill needs sub-problems, which {self.solver.name!r} has none of: choose "
                "solver augmented-lagrangian or penalty, or rounds.fill=false"
            )
        if not self.gaps:
            batch, m = self.train.batch_size, self.correction.micro_batches
            # counted anew: the cuts alone, which a resumed run has, must give the same gaps
            counted = replace(self.blocks, costs=[])
            self.gaps = fit(counted.block_costs(sample), batch, m)
        if len(self.gaps) != len(self.blocks):
            raise ValueError(
                f"rounds.gaps has {len(self.gaps)} pairs for {len(self.blocks)} blocks: give "
                "one [middle, turn] a block, or leave it empty"
            )
        if self.gaps[-1].middle:
            raise ValueError(
                f"rounds.gaps gives the last block {self.gaps[-1].middle} samples in the middle of "
                "a pass, where it has no gap: give it [0, turn]"
            )
