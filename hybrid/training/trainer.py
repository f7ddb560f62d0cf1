"""Builds a run and starts it on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import ValidationError

from hybrid.cuts.partition import SAMPLES, Blocks
from hybrid.data import Data, Dataset, as_data
from hybrid.errors import no_exit
from hybrid.links import RankLinks
from hybrid.links.base import Side
from hybrid.method import gaps as filling
from hybrid.method.checks import check_method, check_rounds, check_sampler
from hybrid.method.given import Given, understood
from hybrid.method.objectives import Objectives
from hybrid.method.setup import Method, Options, RunSetup, check_size, factorized_cuts, placed
from hybrid.ranks import caches, launch
from hybrid.ranks.starting import start
from hybrid.ranks.stopping import leave_if_asked, listening
from hybrid.rounds.controller import longest, wanted
from hybrid.samplers.base import Learning
from hybrid.settings.config import RoundSettings, first_fault
from hybrid.settings.rounds import settled, wanted_correction
from hybrid.training import replicas
from hybrid.training.config_export import OWN_DATA, described
from hybrid.training.evaluation import gathered, measure
from hybrid.training.run import Run
from solvers import Solver, registry
from solvers.base import Recording, Setup
from solvers.blocks.block import Block
from solvers.exact.exact_pass import PassSettings
from solvers.exact.pipeline import FillStep
from solvers.kernels import choose
from solvers.layers.depth import survival

T = TypeVar("T")


@dataclass
class Trainer(Options):
    """Trains a model cut into blocks by the serial-parallel hybrid.

    Under mpirun every rank makes the same Trainer and owns one block; alone, K threads do. A
    `solver` that is exact trains serially, without a parallel phase.
    """

    blocks: Blocks
    solver: Given[Solver] = Given(Solver, registry.solver_class, registry.DEFAULT)
    """A method, or its class or name, which stand for it with its defaults."""
    correction: PassSettings | None = None
    """Settings of the serial passes; None: exact, with 4 micro-batches where gaps are filled."""
    window: int | Literal["all", "auto"] | None = None
    window_limit: int = 64
    residual_limit: float = 0.1
    sweeps: int | None = None
    correct_every: int | None = None
    serial_epochs: float = 0.0
    fill: bool | None = None
    fill_step: FillStep = "added"
    gaps: Sequence[tuple[int, int]] = ()
    memory_gb: float = 4.0
    """These ten are the settings of [rounds], with the same defaults."""

    rounds: RoundSettings = field(init=False)
    _side: Side = field(init=False, default="chain")
    """As the blocks have been trained, which decides what rank has which."""

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Blocks):
            raise ValueError(f"blocks is a {type(self.blocks).__name__}: split(network, K) first")
        self.out = None if self.out is None else Path(self.out)  # a str will do
        own = [name for name in RoundSettings.model_fields if name != "gaps"]
        asked = {name: getattr(self, name) for name in own}
        try:
            rounds = RoundSettings(**asked, gaps=[(a, b) for a, b in self.gaps])
        except ValidationError as error:
            raise ValueError(first_fault(error)) from None
        self.rounds = settled(self.solver, rounds)
        if self.correction is not None:
            known = self.correction, PassSettings, "correction"
            self.correction = understood(*known, registry.solver_class)
        else:
            share = self.train.batch_size // max(1, self.replicas)
            wanted = dict(wanted_correction(self.solver, self.rounds, share))
            self.correction = PassSettings(**wanted)
        self.names = {
            "solver": self.solver.name,
            "model": type(self.blocks.model).__name__,
            "data": OWN_DATA,
            **self.names,
        }

    def fit(self, train: Any, test: Any, epochs: int | None = None) -> dict[str, Any]:
        """Train; give the summary, the same on every rank.

        `train` and `test` are data sets of this package, any map-style data set of (input, target)
        or dicts, or a pair of tensors.

        Raises ValueError for settings that cannot work, before training starts, and DivergedError
        (a ValueError) if the loss stops being finite; what code that was given raises becomes a
        ValueError with the line it came from, and so does its sys.exit(). Afterwards the model
        holds the trained weights (with train.ema their average): all of them after threads, under
        mpirun those of this rank's block.

        On USR1, USR2 or TERM it keeps a checkpoint, says so and raises StoppedError on every rank.
        That is a SystemExit of status 75 and no Exception: uncaught it ends the script with that
        status, and a loop of several trainings, too. Signals reach Python's main thread alone.
        """
        if epochs is not None:
            self.train = self.train.model_copy(update={"epochs": epochs})
        launch.keep_memory()
        comm = launch.communicator()
        torch.set_num_threads(self.threads(len(self.blocks) * self.replicas))
        if comm is not None:
            # measured cuts differ from rank to rank: the first rank's hold
            self.blocks = replace(self.blocks, starts=comm.bcast(self.blocks.starts))
        setup: RunSetup | ValueError
        data: list[Data] = []
        try:
            with no_exit():
                data += as_data(train), as_data(test)
                setup = self.setup(data[0], 1 if comm is None else comm.size, data[1])
        except ValueError as error:
            setup = error

        def program(links: RankLinks) -> dict[str, Any]:
            with links.agreement():
                if isinstance(setup, ValueError):
                    raise setup
            run = Run(setup, links, data[0], data[1], request)
            leave_if_asked(links, request)
            return run.fit()

        failed, device = (setup, None) if isinstance(setup, ValueError) else (None, setup.device)
        if not isinstance(setup, ValueError):
            self._side = replicas.arrangement(setup)
        grid = len(self.blocks), self.replicas
        try:
            with listening() as request:
                return start(program, grid, self.links, device, failed, self._side)
        finally:
            for each in data:
                each.close()

    def evaluate(self, data: Any) -> dict[str, float]:
        """Mean loss and metrics of the network as it is over `data`, the same on every rank."""

        def measured(
            block: Block, links: RankLinks, known: Data, objectives: Objectives
        ) -> dict[str, float]:
            return measure(block, links, known, objectives.test, self.train.batch_size)

        return self._through(data, measured)

    def predict(self, data: Any) -> Any:
        """The network's outputs for `data`, (N, ...), on every rank.

        `data` is as in `fit`, or a tensor of inputs alone.
        """

        def predicted(block: Block, links: RankLinks, known: Data, objectives: Objectives) -> Any:
            return gathered(block, links, known, self.train.batch_size)

        inputs = (data, torch.zeros(len(data))) if isinstance(data, torch.Tensor) else data
        return self._through(inputs, predicted, tried=data is inputs)

    def _through(
        self, given: Any, use: Callable[[Block, RankLinks, Data, Objectives], T], tried: bool = True
    ) -> T:
        """Use every rank's block, as it is, on data."""
        comm = launch.communicator()
        torch.set_num_threads(self.threads(len(self.blocks)))
        device = launch.device(self.train.device)
        failed: ValueError | None = None
        try:
            with no_exit():
                data = as_data(given)
                self._check_ranks(1 if comm is None else comm.size)
                self.blocks = self.blocks.fitted(data.sample(2)[0])
                options = replace(self, batch_transform=None)
                objectives = (
                    Objectives.settle(options, self.blocks, data, data)
                    if tried
                    else Objectives.none()
                )
        except ValueError as error:
            failed = error

        def program(links: RankLinks) -> T:
            with links.agreement():
                if failed is not None:
                    raise failed
            module, rank = placed(self.blocks.module(links.rank), device), links.rank
            precision = getattr(torch, self.train.precision)
            return use(
                Block(module, rank, links.size, {}, device, precision), links, data, objectives
            )

        try:
            # under mpirun each replica has the weights; in one process one will do
            count = self.replicas if comm is not None else 1
            grid = len(self.blocks), count
            return start(program, grid, self.links, device, failed, self._side)
        finally:
            if failed is None and data is not given:
                data.close()

    def threads(self, blocks: int) -> int:
        """Intra-operation threads of one rank; virtual ranks are alone on the machine."""
        if self.links.kind == "virtual":
            return self.train.threads or 1
        return self.train.threads or launch.threads_per_rank(blocks)

    def setup(self, train: Data, ranks: int = 1, test: Data | None = None) -> RunSetup:
        """What the run is; ValueError, with the remedy, for settings that cannot work."""
        self._check(train, ranks)
        inputs, _ = train.sample(SAMPLES)
        self.blocks = self.blocks.fitted(inputs)
        objectives = Objectives.settle(self, self.blocks, train, test or train)
        sample = self.blocks.packed(inputs)
        shapes = self.blocks.cut_shapes(sample)
        steps = self.sampler.start(train, self.train.seed).batches(self.train.batch_size)
        rounds, alternates = self.rounds, self.solver.alternates
        whole, every = rounds.window == "all", rounds.correct_every or 0
        length = longest(rounds, steps)
        if isinstance(self.sampler, Learning) and not rounds.window and every < 2:
            length = min(length, self.sampler.lag)  # nobody asked for rounds of that length
        carried = alternates and whole and every != 1
        setup = Setup(
            tuple(shapes),
            self.train.batch_size // self.replicas,
            window=length if alternates and rounds.window else 0,
            sweeps=rounds.sweeps or 1,
            carried=carried,
            fills=bool(rounds.fill),
            own_fill=rounds.fill_step == "own",
            correct_every=every if rounds.window != "auto" else min(every, 1),
            serial_steps=rounds.serial_steps(steps),
            factorized=factorized_cuts(self.blocks),
            output=objectives.output,
            several_outputs=objectives.output is None,
            packed=self.blocks.packed_cuts,
            bundled=self.blocks.bundled,
            compiled=self.train.compile,
            total=self.train.batch_size if self.replicas > 1 else 0,
            replicas=self.replicas,
            seed=self.train.seed,
        )
        drawing = self.blocks.drawing(sample)
        assert self.correction is not None
        method = Method(self.solver, self.correction, setup, statistics=self._normed)
        survivals = map(survival, self.blocks.model.modules())
        check_method(self, method, min(survivals), any(drawing))
        check_rounds(self, method, rounds, steps, length)
        check_sampler(self, method, rounds, length)
        size, parts = setup.batch_size, self.correction.micro_batches
        gaps = filling.settled(rounds, self.blocks, inputs, size, parts) if rounds.fill else []
        filling.check(gaps, rounds, self.solver, setup)
        augmented = train.augmented
        cutout = train.augmentation.cutout if isinstance(train, Dataset) else 0
        keeps = carried and not setup.corrects and issubclass(self.solver.program, Recording)
        if keeps and cutout:
            raise ValueError(
                f"data.cutout is {cutout}, but rounds.correct_every is 0 and "
                "rounds.window all, which trains on plain images: leave it out"
            )
        method = replace(
            method,
            gaps=tuple(gaps),
            fill_step=rounds.fill_step,
            observe=whole and (augmented or carried),
            controller=wanted(rounds, steps, self.solver.sweeps),
        )
        method.check_messages(self.blocks)
        device = launch.device(self.train.device)
        if self.train.compile or device.type == "cuda":
            caches.keep_private()
        return RunSetup(
            blocks=self.blocks,
            method=method,
            whole=whole,
            window=length,
            steps_per_epoch=steps,
            memory_gb=rounds.memory_gb,
            device=device,
            kernels=choose(self.train.kernels, device.type == "cuda"),
            objective=objectives.training,
            tested=objectives.test,
            mix=objectives.mix,
            test_batch_size=500 if isinstance(test, Dataset) else self.train.batch_size,
            drawing=drawing,
            **self.options()
            | {"describe": self.describe or partial(described, self, method, rounds)},
        )

    @property
    def _normed(self) -> bool:
        """Whether the network has running statistics."""
        norms = torch.nn.modules.batchnorm._BatchNorm
        return any(isinstance(m, norms) for m in self.blocks.model.modules())

    def _check_ranks(self, ranks: int) -> None:
        size = len(self.blocks) * self.replicas
        if ranks in (1, size) and not (ranks == 1 and launch.communicator() and size > 1):
            return
        if self.replicas > 1:
            raise ValueError(replicas.wrong_product(len(self.blocks), self.replicas, ranks))
        raise ValueError(
            f"{size} blocks on {ranks} MPI ranks: a rank owns one block, so start "
            f"mpirun -n {size}, or ask for {ranks} blocks"
        )

    def _check(self, train: Data, ranks: int) -> None:
        self._check_ranks(ranks)
        check_size(self.train.batch_size, train)
        if ranks > 1 and self.links.kind == "virtual":
            raise ValueError(
                f"links.kind is 'virtual', which runs in 1 process, but there are {ranks} MPI "
                "ranks: start it without mpirun"
            )
        if self.links.kind != "virtual":
            why = f"links.kind is {self.links.kind!r}"
            self.links.refuse("links", why, "gigabits_per_second", "latency_microseconds")
        self.check()
        if not 1 <= self.replicas <= self.train.batch_size:
            raise ValueError(
                f"split.replicas is {self.replicas}, and a mini-batch has {self.train.batch_size} "
                "samples, of which each needs one: take fewer replicas, or a larger --batch-size"
            )
        if not any(p.requires_grad for p in self.blocks.model.parameters()):
            raise ValueError(
                f"{type(self.blocks.model).__name__} has 0 parameters to train: give it layers "
                "that have some, or let theirs require gradients"
            )
        if self.rounds.window == "all" and self.batch_transform is not None:
            raise ValueError(
                "rounds.window is all, which makes other mini-batches than those that "
                "batch_transform mixed: give a number of mini-batches, or leave it out"
            )
