"""What a training is, settled before it starts, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from hybrid.cuts.partition import Blocks
from hybrid.data import Data
from hybrid.data.mixing import Mix, Transform
from hybrid.links import Place, RankLinks
from hybrid.method.given import Given
from hybrid.optimizers import making as optimizers
from hybrid.optimizers import schedule as schedules
from hybrid.optimizers.schedule import Rate
from hybrid.ranks import launch
from hybrid.rounds.alone import Alone
from hybrid.rounds.alternating import Alternating
from hybrid.rounds.base import Rounds
from hybrid.rounds.controller import Controller, powers
from hybrid.rounds.trace import Trace
from hybrid.rounds.windows import Windows
from hybrid.samplers.base import Sampler
from hybrid.samplers.batch_sampler import BatchSampler
from hybrid.samplers.registry import SAMPLERS
from hybrid.settings.config import (
    CheckpointSettings,
    LinkSettings,
    OptimizerSettings,
    ScheduleSettings,
    TrainSettings,
)
from hybrid.training.callbacks.base import Callback
from solvers.base import Setup, Solver, SubProblems
from solvers.blocks.average import Average
from solvers.blocks.block import Block
from solvers.blocks.draws import Draws
from solvers.blocks.graphs import StepGraphs
from solvers.blocks.metrics import Metric
from solvers.blocks.objective import Loss, Objective
from solvers.blocks.optimizer_state import optimizer_state
from solvers.exact.exact_pass import ExactPass, PassSettings
from solvers.exact.filling import BubbleFill, stored_batches
from solvers.exact.pipeline import FillStep, Gaps
from solvers.layers.factorization import Factorization
from solvers.layers.projection import leading_projection
from solvers.sync.base import Strategy
from solvers.sync.norms import SharedNorms
from solvers.sync.registry import STRATEGIES

M = TypeVar("M", bound=torch.nn.Module)
ALONE = Place()


@dataclass(frozen=True)
class Method:
    """How blocks are trained: a solver, its correction, and how the two take turns."""

    solver: Solver
    correction: PassSettings
    setup: Setup
    gaps: tuple[Gaps, ...] = ()
    """Local work of each block in a pass; empty: none."""
    fill_step: FillStep = "added"
    observe: bool = False
    """Whether windows are recorded in a pass of their own."""
    statistics: bool = False
    """Whether the network has running statistics."""
    controller: Callable[[], Controller] | None = None
    """Makes what changes the rounds as they go; `setup` then has the largest they may take."""

    def of_replica(self, place: Place) -> Method:
        """With mini-batches of that replica's size."""
        if place.replicas == 1:
            return self
        size = share_size(self.setup.total, place.replica, place.replicas)
        return replace(self, setup=replace(self.setup, batch_size=size))

    def memory(self, index: int) -> int:
        """Bytes of auxiliary variables on block `index`."""
        needed = self.solver.memory(self.setup, index) if self.setup.window else 0
        return needed + (self.solver.memory(self._records(index), index) if self.gaps else 0)

    def check_messages(self, blocks: Blocks) -> None:
        """ValueError for a format or a filter of what crosses a cut that cannot be."""
        passes = self.solver if self.solver.exact else self.correction
        for made, where in ((self.solver, "solver"), (self.correction, "correction")):
            for name in ("messages", "storage"):
                kind = getattr(made, name, "float32")
                for cut in blocks.cuts_changed_by(kind):
                    raise ValueError(
                        f"{where}.{name} is {kind!r}, which would change the integers that "
                        f"cross the cut before {cut}: choose float32, or another cut"
                    )
        factor = max(getattr(self.solver, "filter", 1), getattr(passes, "filter", 1))
        for cut, shape in zip(blocks.cuts, self.setup.shapes, strict=True):
            if factor > 1 and (len(shape) != 3 or shape[1] % factor or shape[2] % factor):
                raise ValueError(
                    f"the filter is {factor}, but activations at the cut before {cut} have "
                    f"shape {shape}: choose a filter that divides their height and width"
                )

    def start(self, block: Block, links: RankLinks, trace: Trace | None = None) -> Rounds:
        """One rank's rounds."""
        solver, setup = self.solver, self.setup
        exact = ExactPass(self.correction, block, links, setup)
        if not solver.alternates:
            every = 0 if solver.exact else setup.correct_every
            trains = solver.start(block, links, setup)
            return Alone(links, exact, trains, every, trace, setup.serial_steps)
        program = solver.start(block, links, setup) if setup.window else None
        fill = None
        if self.gaps:
            filling = solver.start(block, links, self._records(block.index))
            assert isinstance(filling, SubProblems)
            gaps = self.gaps[block.index]
            fill = BubbleFill(filling, gaps, setup.batch_size, self.fill_step)
        return Alternating(
            links,
            exact,
            program,
            fill,
            setup.correct_every,
            observe=self.observe,
            carried=setup.carried,
            statistics=self.statistics,
            trace=trace,
            controller=None if self.controller is None else self.controller(),
            serial_steps=setup.serial_steps,
        )

    def _records(self, index: int) -> Setup:
        """Of the program that fills the gaps of block `index`: a store of the records it needs."""
        size = self.setup.batch_size
        window = stored_batches(self.gaps[index], size)
        return Setup(self.setup.shapes, size, window, fills=True, total=self.setup.total)


@dataclass(kw_only=True)
class Options:
    """What a training needs beside its blocks and its method."""

    sampler: Given[Sampler] = Given(Sampler, SAMPLERS.__getitem__, SAMPLERS.default)  # type: ignore[type-abstract]
    """Who chooses the samples of a mini-batch; as a class or by name: with its defaults."""
    replicas: int = 1
    """R, chains of the blocks; each trains on a share of every mini-batch."""
    side_by_side: Literal["auto", "chain", "peers"] = "auto"
    """MPI ranks that follow each other: a chain, peers, or those that send each other more."""
    sync: Given[Strategy] = Given(Strategy, STRATEGIES.__getitem__, STRATEGIES.default)
    """How replicas keep their weights together; as a class or by name: with its defaults."""
    train: TrainSettings = field(default_factory=TrainSettings)
    optimizer: OptimizerSettings | optimizers.Factory = field(default_factory=OptimizerSettings)
    """Settings, or what makes one from a block's parameter groups: see `optimizers.Factory`."""
    schedule: ScheduleSettings | Rate = field(default_factory=ScheduleSettings)
    """Settings, or the learning rate as a function of the step."""
    links: LinkSettings = field(default_factory=LinkSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    out: Path | None = None
    """Run folder; None keeps nothing."""
    resume: bool = False
    callbacks: Sequence[Callback] = ()
    """What is told of the run while it trains; those that the first rank has are called."""
    quiet: bool = False
    names: dict[str, str] = field(default_factory=dict)
    """What the summary calls model and data."""
    loss: Loss | None = None
    """(output, targets) -> mean loss or a loss of each sample; None: cross-entropy of classes."""
    metrics: Mapping[str, Metric] | None = None
    """By name what is measured, see `Metric`; None: accuracy of classes."""
    batch_transform: Transform | None = None
    """(inputs, targets, generator) -> both, of every training mini-batch: mixup, CutMix."""
    describe: Callable[[list[str]], str] | None = None
    """Text of config.toml, given the cuts; None: as the settings are."""

    def check(self) -> None:
        """ValueError for what cannot be, or would change nothing, whatever the method."""
        schedules.check(self.schedule)
        optimizers.check(self.optimizer)
        if not isinstance(self.callbacks, Sequence):
            raise ValueError(f"callbacks is a {type(self.callbacks).__name__}: give a list of them")
        strange = next((c for c in self.callbacks if not isinstance(c, Callback)), None)
        if strange is not None:
            raise ValueError(
                f"callbacks has {strange!r}, which is no object of a class that derives from "
                "hybrid.Callback: derive from it"
            )
        every = self.train.evaluate_every
        if every * (1 - -self.train.early_stop // every) >= self.train.epochs:
            why = f"train.epochs is {self.train.epochs} and train.evaluate_every {every}"
            self.train.refuse("train", why, "early_stop")
        if not self.checkpoint.keep_last:
            why = "checkpoint.keep_last is 0, which keeps all"
            self.checkpoint.refuse("checkpoint", why, "best")

    def options(self) -> dict[str, Any]:
        """These fields by name."""
        return {setting.name: getattr(self, setting.name) for setting in fields(Options)}


@dataclass(kw_only=True)
class RunSetup(Options):
    """A whole training: what every rank's `Run` is made from."""

    blocks: Blocks
    method: Method
    whole: bool
    """Whether a window is the whole training set."""
    window: int
    """Mini-batches a round."""
    steps_per_epoch: int
    memory_gb: float
    device: torch.device
    kernels: str
    objective: Objective
    """Of a training mini-batch."""
    tested: Objective
    """Of the test data."""
    mix: Mix | None
    test_batch_size: int
    drawing: list[dict[torch.nn.Module, tuple[int, ...]]]
    """Of each block: modules that draw random numbers, and their units' numbers."""

    @property
    def carried_as(self) -> list[object]:
        """What the shapes of carried variables depend on, but for the cuts; empty without any."""
        setup = self.method.setup
        # not this replica's own samples: shares differ by one
        whole = [self.replicas, setup.window * setup.total]
        samples = whole if self.replicas > 1 else [setup.samples]
        return [*samples, *self.method.solver.layout()] if setup.carried else []

    def check_memory(self) -> None:
        """ValueError if the auxiliary variables of a block need more memory than allowed."""
        length = self.method.setup.window
        for rank in range(len(self.blocks)):
            needed = self.method.memory(rank)
            if needed <= self.memory_gb * 1e9:
                continue
            fits = int(length * self.memory_gb * 1e9 / needed)
            what = f"a window of {length} mini-batches" if length else "the work in gaps"
            shorter = f"take a window of {fits}, or " if fits else ""
            if fits and self.method.controller is not None:
                shorter = f"set rounds.window_limit={powers(fits)[-1]}, or "
            raise ValueError(
                f"{what} needs {needed / 1e9:.3g} GB of "
                f"auxiliary variables on rank {rank}, the budget is {self.memory_gb:g} GB: "
                f"{shorter}set solver.storage=bfloat16, solver.filter=2 or a larger "
                "rounds.memory_gb"
            )

    def on(self, place: Place) -> RunSetup:
        """As the rank at a place has it: a replica has its share, and weights of its own."""
        if place.replicas == 1:
            return self
        blocks, drawing = self.blocks, self.drawing
        if place.replica and launch.communicator() is None:  # threads have one model
            blocks, drawing = deepcopy((blocks, drawing))
        method = self.method.of_replica(place)
        return replace(self, blocks=blocks, drawing=drawing, method=method)

    @property
    def spacing(self) -> int | str:
        """Mini-batches a window, or `auto`: where in an epoch rounds begin."""
        return self.window if self.method.controller is None else "auto"

    def windows(
        self,
        data: Data,
        schedule: Rate,
        chosen: BatchSampler,
        controller: Controller | None = None,
        place: Place = ALONE,
    ) -> Windows:
        """The mini-batches of the epochs."""
        return Windows(
            data,
            chosen,
            self.window,
            self.whole,
            self.method.setup.sweeps,
            self.train.seed,
            schedule,
            self.device,
            self.method.setup.carried,
            self.mix,
            controller,
            place.replica,
            place.replicas,
        )

    def block(self, links: RankLinks) -> Block:
        """This rank's block; ValueError if its run folder could not keep all of it."""
        place = links.place
        made = make_block(
            self.blocks,
            place.block,
            self.optimizer,
            self.device,
            self.train,
            self.drawing[place.block],
            place.replica,
        )
        made.objective = self.objective
        if place.replicas > 1:
            setup = self.method.setup
            if self.train.sync_batchnorm:
                made.norms = SharedNorms(made.module, links.peers)
            made.sync = self.sync.start(made, links.peers, setup.batch_size / setup.total)
        if self.out is not None:
            exact = made.optimizers["exact"]
            for group in exact.param_groups:
                optimizer_state(exact, group["params"][0])
        return made


def check_size(size: int, data: Data) -> None:
    """ValueError for a mini-batch of more samples than there are."""
    if size > len(data):
        raise ValueError(
            f"the batch size is {size} but there are {len(data)} training samples: choose a batch "
            f"size of at most {len(data)}"
        )


def share_size(size: int, replica: int, replicas: int) -> int:
    """Samples that a replica has of a mini-batch of `size`."""
    return (size + replicas - 1 - replica) // replicas


def make_block(
    blocks: Blocks,
    rank: int,
    optimizer: OptimizerSettings | optimizers.Factory,
    device: torch.device,
    train: TrainSettings | None = None,
    drawing: dict[torch.nn.Module, tuple[int, ...]] | None = None,
    replica: int = 0,
) -> Block:
    """Block `rank` in training mode on its device, with the optimizer of its exact steps."""
    train = train or TrainSettings()
    module = placed(blocks.module(rank), device)
    exact = optimizers.make(module, optimizer)
    steps = {"exact": exact, "local": exact}
    if train.ema:
        weights = [p for group in exact.param_groups for p in group["params"]]
        steps["ema"] = Average(weights, train.ema)
    if train.compile:
        module.compile(dynamic=False)
    graphs = None
    if train.graphs and device.type == "cuda":
        graphs = StepGraphs(list(module.parameters()), module=module)
    return Block(
        module.train(),
        rank,
        len(blocks),
        steps,
        device,
        getattr(torch, train.precision),
        cut_after=None if rank == len(blocks) - 1 else leading_projection(blocks.module(rank + 1)),
        graphs=graphs,
        draws=Draws(train.seed, drawing, replica) if drawing else None,
    )


def placed(module: M, device: torch.device) -> M:
    """A module on a device, its convolutions of images channels_last."""
    module.to(device)
    for parameter in module.parameters():
        if parameter.dim() == 4:
            # not contiguous(): of one channel that keeps strides that say nothing
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return module


def factorized_cuts(blocks: Blocks) -> frozenset[int]:
    """The cuts whose block behind begins with a factorization."""
    cuts = range(1, len(blocks))
    return frozenset(
        k for k in cuts if isinstance(leading_projection(blocks.module(k)), Factorization)
    )
