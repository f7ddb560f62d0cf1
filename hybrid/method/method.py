"""A method for a problem: the block, rounds and optimizer that every rank starts from it."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.data import Data
from hybrid.links import RankLinks
from hybrid.links.grid import Arrangement, GridPlace, share_size
from hybrid.method.optimizers import find_vectors, make_optimizer, placed
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.method.user_optimizer import UserOptimizer
from hybrid.networks.models import Chain
from hybrid.ranks import launch
from hybrid.rounds.base import Rounds
from hybrid.rounds.batch_sampler import BatchSampler
from hybrid.rounds.epoch_windows import Rate, Windows
from hybrid.rounds.kinds import AlternatingRounds, MiniBatchRounds
from hybrid.rounds.trace import Trace
from hybrid.solvers.base import Setup, Solver
from hybrid.solvers.block import Block
from hybrid.solvers.delayed.base import Delayed, DelayedProgram
from hybrid.solvers.engine.engine import Scheduled
from hybrid.solvers.engine.graphs import MOST_THREADS, RECORDERS
from hybrid.solvers.exact.exact_pass import ExactPass, PassSettings
from hybrid.solvers.layers.projection import leading_projection
from hybrid.solvers.local_work.budget import Cost, LocalBudget, fit_local_work
from hybrid.solvers.local_work.timing import measure_pipeline, time_one_rank
from hybrid.solvers.local_work.work import STORED_BATCHES, start
from hybrid.solvers.norms import SharedNorms
from hybrid.solvers.numerics.attributes import has_user_hooks, user_modules
from hybrid.solvers.numerics.draws import Draws, NumberedDraws
from hybrid.solvers.numerics.freezing import Freezing
from hybrid.solvers.numerics.optimizer_state import Average, parameters_of
from hybrid.solvers.numerics.regularizer import Regularizer
from hybrid.solvers.optimizers.mends import Extrapolation
from hybrid.solvers.optimizers.muon import Muon
from hybrid.solvers.peers import Sharing
from hybrid.solvers.sync.ties import AllTies, Ties, lags
from hybrid.solvers.wire import Wire

FIRST = GridPlace()


@dataclass(frozen=True, kw_only=True)
class Method:
    """The complete method of a run, a bench row or a plan row; made by `make_method`."""

    options: Options
    problem: Problem
    setup: Setup
    user_optimizer: UserOptimizer | None = None
    """The user's optimizer over the whole network; None: each block makes its own."""
    rates: Rate | None = None
    """The schedule of the user's groups, if it is a function of the step alone."""
    frozen: Mapping[str, int] = field(default_factory=dict)
    """By parameter name, the epochs for which it is frozen; 0: all."""
    first_trained: int = 0
    """The first block that needs an adjoint: those before it train nothing, and record nothing."""
    references: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """By rank: its frozen weights that checkpoints leave out, once they have been looked at."""
    local_budgets: tuple[LocalBudget, ...] = ()
    """The local work of each block in a tick, as set by the user; empty: as much as fits."""
    costs: tuple[Cost, ...] = ()
    """Counted operations of each block for one sample, over its speed: what local work fits."""
    shares_products: bool = False
    """Whether replicas divide Muon's matrix products instead of repeating them."""

    @property
    def solver(self) -> Solver:
        """The solver that trains."""
        return self.options.solver

    @property
    def correction(self) -> PassSettings:
        """The settings of the serial passes."""
        passes = self.options.correction
        m = passes.micro_batches or self.solver.num_micro_batches(self.share, self.setup.blocks)
        return replace(passes, micro_batches=m)

    @property
    def steps(self) -> int:
        """Mini-batches per epoch."""
        return self.problem.steps

    @property
    def whole(self) -> bool:
        """Whether a window is the whole training set."""
        return self.options.rounds.window == "all"

    @property
    def device(self) -> torch.device:
        """The device of this rank's block."""
        return launch.device(self.options.train.device)

    @property
    def arrangement(self) -> Arrangement:
        """Which ranks have consecutive numbers, usually on one host.

        Unless the user chose, these are a chain's ranks or peers, whichever send more. In a step a
        chain sends activations and adjoints of its share of the mini-batch over every cut, and
        peers send 2 (R-1)/R of their gradients.
        """
        options, R = self.options, self.options.replicas
        if options.side_by_side != "auto":
            return options.side_by_side
        values = sum(map(prod, self.setup.shapes)) * options.train.batch_size / R
        parameters = self.problem.blocks.model.parameters()
        weights = sum(p.numel() for p in parameters if p.requires_grad)
        every = getattr(options.sync, "steps", 1)
        return "chain" if values >= weights * (R - 1) / R / every else "peers"

    @property
    def carried_layout(self) -> list[object]:
        """The settings, besides the cuts, that shape carried variables; empty without any."""
        setup = self.setup
        # not this replica's samples: shares differ by one
        whole = [setup.replicas, setup.stored_batches * setup.total]
        samples = whole if setup.replicas > 1 else [setup.samples]
        return [*samples, *self.solver.layout()] if setup.carried else []

    @property
    def local_layout(self) -> list[str]:
        """The settings that shape records for local work."""
        fill = self.options.fill
        return [fill.name, *map(str, fill.layout() if isinstance(fill, Solver) else ())]

    @property
    def ties_layout(self) -> list[list[int]]:
        """The lags of tied blocks, on which, besides the cuts, the states of ties depend."""
        return [
            lags([*map(self._steps_late, blocks)]) for blocks in sorted(self.problem.blocks.ties)
        ]

    @property
    def micro_batch(self) -> int:
        """Samples of the first and largest micro-batch of the method's own steps."""
        return self.solver.micro_batch(self.share, self.setup.blocks)

    @property
    def share(self) -> int:
        """The smallest share of a mini-batch, in samples."""
        return max(1, (self.setup.total or self.setup.batch_size) // self.setup.replicas)

    def copied(self) -> "Method":
        """Copy the method with its weights."""
        blocks, drawing = deepcopy((self.problem.blocks, self.problem.drawing))
        return replace(self, problem=replace(self.problem, blocks=blocks, drawing=drawing))

    def of_replica(self, place: GridPlace) -> "Method":
        """Return the method with mini-batches of the size of a replica's share."""
        if place.replicas == 1:
            return self
        size = share_size(self.setup.total, place.replica, place.replicas)
        return replace(self, setup=replace(self.setup, batch_size=size))

    def memory(self, index: int) -> int:
        """Count the bytes of auxiliary variables on block `index`."""
        needed = self.solver.memory(self.setup, index) if self.setup.stored_batches else 0
        fill = self.options.fill
        return needed + (fill.memory(self._local_setup, index) if isinstance(fill, Solver) else 0)

    def block(
        self, links: RankLinks, make: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    ) -> Block:
        """Build this rank's block, in training mode on its device, synchronized with its replicas.

        Only late gradients are mended. `make` replaces the method's optimizer.
        """
        problem, options, place = self.problem, self.options, links.place
        train, blocks, index = options.train, problem.blocks, place.block
        links.set_speed(blocks.speeds[index] if blocks.speeds else 1.0)
        late = self._steps_late(index)
        module = placed(blocks.module(index), self.device)
        named = self._named(index)
        if links.gpus > 1 and (name := blocks.shared_module(index)):
            raise ValueError(
                f"the module {name!r}, which has buffers, is in several blocks, and these are on "
                f"{links.gpus} GPUs: give each a copy, or start them with CUDA_VISIBLE_DEVICES=0"
            )
        freezing = Freezing(named, self.frozen, late > 0)
        exact = self.make_optimizer(index) if make is None else make(module)
        optimizers = {"exact": exact, "local": exact}
        if options.delay.mend == "extrapolate" and late and make is None:
            cap = min(options.delay.cap, late)
            optimizers["local"] = Extrapolation(exact.param_groups, exact, cap)
        if train.ema:
            optimizers["ema"] = Average([*parameters_of([exact])], train.ema)
        if train.compile:
            for part in module.children():
                if isinstance(part, NumberedDraws):
                    raise ValueError(
                        f"train.compile is {train.compile!r}, but the network "
                        f"{type(problem.blocks.model).__name__} runs by its own forward, of which "
                        "blocks watch the calls: leave it out, or give a torch.nn.Sequential whose "
                        "units are not cut (split.inside=false)"
                    )
            if train.compile is True:
                module.compile(dynamic=False)
            elif links.in_one_process and place.count > MOST_THREADS:
                raise ValueError(
                    f"train.compile is 'graphs', and {place.count} threads would share streams of "
                    f"a GPU: take at most {MOST_THREADS}, or start ranks with mpirun"
                )
            elif self.device.type not in RECORDERS:
                raise ValueError(
                    "train.compile is 'graphs', which are recorded on a GPU, and this block is on "
                    f"the {self.device}: leave it out"
                )
        last, drawing = index == len(blocks) - 1, problem.drawing[index]
        objective = problem.objectives.training
        block = Block(
            module.train(),
            index,
            len(blocks),
            optimizers,
            self.device,
            getattr(torch, train.precision),
            cut_after=None if last else leading_projection(blocks.module(index + 1)),
            draws=Draws(train.seed, drawing, place.replica) if drawing else None,
            objective=objective.on(self.device) if last else objective,
            freezing=freezing,
            records=train.compile == "graphs",
            regularizer=options.regularizer and Regularizer(options.regularizer, named),
            formats=problem.formats[max(0, index - 1) : index + 1],
            first_trained=self.first_trained,
        )
        if blocks.ties:
            block.ties = AllTies(self._ties(links, named, optimizers))
        if place.replicas > 1:
            if train.sync_batchnorm:
                if links.peers_share_gpu or (links.clocked and self.device.type == "cuda"):
                    raise ValueError(
                        "train.sync_batchnorm is true, but threads share a GPU, where no backward "
                        "pass can wait for another's: start the ranks with "
                        f"mpirun -n {place.count}, or leave it out"
                    )
                block.norms = SharedNorms(module, links.peers)
            share = self.setup.batch_size / self.setup.total
            block.sync = options.sync.start(block, links.peers, share)
            if isinstance(exact, Muon) and self.shares_products:
                exact.sharing = Sharing(links.peers)
        return block

    def make_optimizer(self, index: int) -> torch.optim.Optimizer:
        """Make the optimizer of a block's exact steps."""
        total, wanted = self.steps * self.options.train.epochs, self.options.optimizer
        blocks, named = self.problem.blocks, self._named(index)
        if self.user_optimizer is not None:
            return make_optimizer(blocks.module(index), self.user_optimizer, named=named)
        assert not isinstance(wanted, torch.optim.Optimizer)
        # by name: another block may have a copy of the weight, known by the model's first name
        model = blocks.model
        names = find_vectors(model, [n for unit in blocks.units for n in unit.parameters()])
        vectors = [p for name, p in named.items() if name in names]
        first = {id(p): name for name, p in model.named_parameters()}
        whole = dict(model.named_parameters(remove_duplicate=False))
        named = {first[id(whole[name])]: p for name, p in named.items()}
        return make_optimizer(blocks.module(index), wanted, vectors, total, named)

    def rule_of(
        self, optimizer: torch.optim.Optimizer, index: int, names: Sequence[str]
    ) -> dict[str, Any]:
        """Return the class and settings by which a block's optimizer steps a parameter.

        `names`: the names of the parameter.
        """
        named = self._named(index)
        p = next(named[name] for name in names if name in named)
        groups = [g for g in optimizer.param_groups if any(p is each for each in g["params"])]
        apart = ("params", "param_names", "lr_index")
        settings = {k: v for group in groups for k, v in group.items() if k not in apart}
        return {"class": type(optimizer), **settings}

    def _named(self, index: int) -> dict[str, nn.Parameter]:
        """Return a block's parameters by their names in the network."""
        units = self.problem.blocks.units_of(index)
        return {n: p for unit in units for n, p in unit.parameters().items()}

    def _ties(
        self,
        links: RankLinks,
        named: Mapping[str, nn.Parameter],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> list[Ties]:
        """Make the ties of this rank's block; `named` has all parameters of the block."""
        all_ties, ties = sorted(self.problem.blocks.ties.items()), []
        for (blocks, weights), steps in zip(all_ties, self.ties_layout, strict=True):
            if links.rank in blocks:
                copies = [next(named[n] for n in names if n in named) for names in weights]
                ties.append(Ties(links, copies, blocks, steps, optimizers))
        return ties

    def _steps_late(self, index: int) -> float:
        """Return the delay of a block's gradients, the same on all replicas."""
        return self.solver.steps_late(index, len(self.problem.blocks), self.share)

    def start(self, block: Block, links: RankLinks, trace: Trace | None = None) -> Rounds:
        """Start one rank's rounds."""
        solver, setup = self.solver, self.setup
        exact = ExactPass(self.correction, block, links, setup)
        program = solver.start(block, links, setup)
        every = 0 if solver.exact else setup.correct_every
        common = links, exact, program, every, trace, setup.serial_steps
        if not solver.alternates:
            rounds = MiniBatchRounds(*common)
            rounds.serial_end = setup.serial_end
            if setup.local_work:
                self.start_local_work(rounds, self.local_budgets or self._fitting(block, links))
            return rounds
        alternating = AlternatingRounds(*common)
        # windows are recorded in a separate pass
        alternating.observe = self.whole and (self.problem.augmented or setup.carried)
        alternating.carried, alternating.statistics = setup.carried, self.problem.normed
        return alternating

    def windows(
        self, data: Data, schedule: Rate, sampler: BatchSampler, place: GridPlace = FIRST
    ) -> Windows:
        """Make the windows of every epoch, with a replica's share of their mini-batches."""
        window, every = self.setup.window, self.options.train.report_every
        return Windows(
            data,
            sampler,
            window if self.options.rounds.window else gcd(window, every),  # for reports alone
            self.whole,
            self.setup.sweeps,
            self.setup.seed,
            schedule,
            self.device,
            self.setup.carried,
            self.problem.objectives.mix,
            place.replica,
            place.replicas,
        )

    def start_local_work(self, rounds: Rounds, budgets: Sequence[LocalBudget]) -> None:
        """Let this rank do its budget of local work in ticks that it would otherwise wait in."""
        fill, program = self.options.fill, rounds.program
        assert isinstance(fill, Solver)
        assert isinstance(program, DelayedProgram)
        rounds.local_budgets = list(budgets)
        program.local_work = start(
            fill, program.block, rounds.links, self._local_setup, budgets[rounds.links.rank]
        )

    @property
    def _local_setup(self) -> Setup:
        """The setup of local work, with a store for its records."""
        return replace(self.setup, stored_batches=STORED_BATCHES, sweeps=1)

    def time_one_rank(self, block: Block, links: RankLinks) -> float:
        """Estimate the seconds of a mini-batch's passes if one rank had all blocks.

        0 if the user chose the number of micro-batches, or if the network is the user's: an extra
        pass could change its state. All ranks call it.
        """
        solver, setup = self.solver, self.setup
        chosen = isinstance(solver, Delayed) and not solver.micro_batches
        if setup.blocks == 1 or not chosen or not self.may_be_timed:
            return 0.0
        return time_one_rank(links, block, self._sample, setup.total or setup.batch_size)

    @property
    def may_be_timed(self) -> bool:
        """Whether extra passes are safe: they run no user code, whose state they could change."""
        model = self.problem.blocks.model
        return isinstance(model, Chain) and not user_modules(model) and not has_user_hooks(model)

    @property
    def _sample(self) -> Tensor:
        """Inputs of a micro-batch, packed, for timing."""
        return self.problem.sample[torch.arange(self.micro_batch) % len(self.problem.sample)]

    def _fitting(self, block: Block, links: RankLinks) -> list[LocalBudget]:
        """Fit local work to counted operations and timed messages.

        Messages of a user's network are not timed and count as 0.
        """
        solver, samples = self.solver, self.micro_batch
        costs, K = self.costs, self.setup.blocks
        delays = [solver.delay(k, K) for k in range(K)]
        fit = partial(fit_local_work, costs, delays, samples, solver.replays)
        if K == 1 or (links.in_one_process and not links.clocked) or not self.may_be_timed:
            return fit()
        wire = solver.wire() if isinstance(solver, Scheduled) else Wire()
        return fit(measure_pipeline(links, block, self._sample, wire))
