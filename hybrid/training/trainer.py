"""Builds a run and starts it on every rank."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from inspect import Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from hybrid.data import Data, as_data, hold_out
from hybrid.errors import no_exit
from hybrid.links import RankLinks
from hybrid.links.communicator import start_limited
from hybrid.links.grid import Arrangement, Grid
from hybrid.method.make_method import make_method
from hybrid.method.memory import fit_to_memory
from hybrid.method.method import Method
from hybrid.method.objectives import MODEL, Objectives, takes_targets
from hybrid.method.optimizers import placed
from hybrid.method.options import Options
from hybrid.method.problem import Problem, with_bundles
from hybrid.networks.blocks import Blocks
from hybrid.networks.local_init import free_remote, read_weights
from hybrid.networks.units import kept_modes
from hybrid.proof.sample_comparison import SampleComparison
from hybrid.ranks import launch, progress
from hybrid.ranks.progress import Bar
from hybrid.ranks.starting import check_links, link_class, start
from hybrid.ranks.stopping import interrupted, leave_if_asked, listening
from hybrid.report.summary import Summary
from hybrid.rounds.evaluation import Evaluation, measure_network
from hybrid.solvers.block import Block
from hybrid.solvers.kernels.launcher import choose
from hybrid.training.run import Run
from hybrid.training.summary import OWN_DATA

P = ParamSpec("P")
T = TypeVar("T")
Compared = Callable[[RankLinks, SampleComparison], T]
"""What a rank runs on data that have been compared."""


def _takes_options(
    options: Callable[P, Options],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Blocks, P], None]]:
    """Let a constructor take the blocks, and then the arguments of `Options`."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, Blocks, P], None]:
        first = signature(init).parameters
        others = signature(options).parameters.values()
        shown = [first["self"], first["blocks"], *others]
        init.__signature__ = Signature(shown)  # type: ignore[attr-defined]
        return init

    return decorate


class Trainer:
    """Trains a model cut into blocks by the serial-parallel hybrid.

    Under mpirun every rank makes the same Trainer and owns one block; alone, K threads do. A
    `solver` that is exact trains serially, without a parallel phase. The arguments after the blocks
    are those of `Options`; a change of `options` holds from the next call on.
    """

    __slots__ = ("_arrangement", "blocks", "options", "whole")

    @_takes_options(Options)
    def __init__(self, blocks: Blocks, *arguments: Any, **options: Any) -> None:
        if not isinstance(blocks, Blocks):
            raise ValueError(f"blocks is a {type(blocks).__name__}: split(network, K) first")
        self.blocks = blocks
        """The network, as `split` has cut it."""
        self.options = Options(*arguments, **options)
        self.options.names = {
            "solver": self.options.solver.name,
            "model": type(blocks.model).__name__,
            "data": OWN_DATA,
            **self.options.names,
        }
        self.whole: Callable[[], nn.Module] | None = None
        """Builds the undivided network, where ranks have built only their units."""
        self._arrangement: Arrangement = "chain"
        """How the training laid the grid on the ranks, which decides a rank's block."""

    def fit(
        self, train: Any, test: Any = None, epochs: int | None = None, validation: Any = None
    ) -> Summary:
        """Train; give the summary, the same on every rank.

        All data are DataLoaders, any data sets of (input, target) or dicts, map-style or iterable,
        those of this package, or pairs of tensors. Of a DataLoader the data set, the sampler,
        collate_fn, the workers and, unless it is set, the batch size are taken over. An incomplete
        last mini-batch is left out in training, and never in testing. If the sample= of `split` had
        targets (labels, ...), those of a dict go into the network, whose own loss is trained unless
        there is another.

        `validation` may also be a share of `train` to hold out, such as 0.1, drawn by train.seed.
        train.early_stop, checkpoint.best and a plateau then look at it, and `test` is measured
        once, at the end. Without `validation` they look at `test`, and without either
        train.early_stop follows the mean training loss of an epoch.

        Raises ValueError for settings that cannot work, before training starts, and DivergedError
        (a ValueError) if the loss stops being finite; what code that was given raises becomes a
        ValueError with the line it came from, and so does its sys.exit(). Afterwards the model
        holds the trained weights (with train.ema their average): all of them after threads, under
        mpirun those of this rank's block. The large weights of other blocks are let go of there.

        On USR1, USR2 or TERM it keeps a checkpoint, says so and raises StoppedError on every rank.
        That is a SystemExit of status 75 and no Exception: uncaught it ends the script with that
        status, and a loop of several trainings, too. Signals reach Python's main thread alone.
        After an interrupt (Ctrl-C) it raises a KeyboardInterrupt that says how to go on.
        """
        options = self.options
        if epochs is not None:
            options.train = options.train.model_copy(update={"epochs": epochs})
        launch.keep_memory()

        def prepare(
            ranks: int, train: Data, test: Data | None, validation: Data | None
        ) -> Compared[Summary]:
            self._read_weights()
            options.take_batch_size(train)
            options.check_tests(test is not None or validation is not None)
            limited = self.blocks.recut is not None
            method = self.make_method(train, ranks, test, validation)
            objectives = method.problem.objectives
            sets = {
                name: (data, objective)
                for name, data, objective in (
                    ("validation", validation, objectives.deciding),
                    ("test", test, objectives.test),
                )
                if data is not None
            }
            kernels = choose(options.train.kernels, method.device.type == "cuda")
            self._arrangement = method.arrangement

            def program(links: RankLinks, comparison: SampleComparison) -> Summary:
                alone = launch.communicator() is None
                cuts = links.all_gather_grid(self.blocks.cuts) if limited else []
                with links.agreement():
                    if any(each != cuts[0] for each in cuts):
                        raise ValueError(
                            "ranks cut the network at different units to fit memory=: let split "
                            "have balance='operations'"
                        )
                if not alone:
                    with links.agreement():
                        read_weights(self.blocks, [links.rank])
                evaluation = Evaluation(links, sets, options.train.batch_size)
                run = Run(
                    method, links, train, evaluation, request, kernels, self.whole, comparison
                )
                if not alone:
                    with links.agreement():
                        free_remote(self.blocks, links.rank)
                leave_if_asked(links, request)
                launch.keep_memory()  # without what the proof has freed
                return run.fit()

            return program

        with listening() as request, kept_modes(self.blocks.model):
            request.advice = ""  # a command's request outlives a training
            try:
                return self._start(prepare, self.options.replicas, train, test, validation)
            except KeyboardInterrupt:
                progress.close()
                raise interrupted() from None

    def evaluate(self, data: Any) -> dict[str, float]:
        """Mean loss and metrics of the network as it is over `data`, the same on every rank."""

        def prepare(ranks: int, test: Data) -> Compared[dict[str, float]]:
            self._check_ranks(ranks)
            self._read_weights()
            self.blocks = with_bundles(self.blocks, [test])
            options = replace(self.options, batch_transform=None)
            objective = Objectives.of(options, self.blocks, test, test).test
            precision = getattr(torch, options.train.precision)

            def program(links: RankLinks, comparison: SampleComparison) -> dict[str, float]:
                with links.agreement():
                    read_weights(self.blocks, [links.rank])
                device = launch.device(options.train.device)  # of this thread
                module = placed(self.blocks.module(links.rank), device)
                block = Block(module, links.rank, links.size, {}, device, precision)
                size = test.batch_size or options.train.batch_size
                with Bar(
                    0, text="evaluating", quiet=options.quiet or links.place.number > 0
                ) as bar:
                    return measure_network(block, links, test, objective, size, bar.count)

            return program

        # under mpirun each replica has the weights; in one process one will do
        replicas = 1 if launch.communicator() is None else self.options.replicas
        return self._start(prepare, replicas, data)

    def _start(self, prepare: Callable[..., Compared[T]], replicas: int, *sets: Any) -> T:
        """Run on every rank the program that `prepare` returns for the ranks and the data.

        A set may be None, or a share of the first one. What fails in the preparation on any rank is
        raised on all.
        """
        comm = launch.communicator()
        torch.set_num_threads(self.threads(len(self.blocks) * replicas))
        if comm is not None:
            # measured cuts differ from rank to rank: the first rank's hold
            with start_limited(comm, self.options.links.timeout):
                cuts = comm.bcast(self.blocks.cuts)
            if cuts != self.blocks.cuts and self.blocks.cut_at is not None:
                self.blocks = self.blocks.cut_at(cuts)
        failed: ValueError | None = None
        device: torch.device | None = None
        data: list[Data | None] = []
        try:
            with no_exit():
                labels = self._choose_loss()
                for each in sets:
                    if isinstance(each, float) and len(data) == 2 and data[0] is not None:
                        data[0], each = hold_out(data[0], each, self.options.train.seed)
                    absent = each is None and len(data) > 0
                    data.append(None if absent else as_data(each, labels_are_inputs=labels))
                program = prepare(1 if comm is None else comm.size, *data)
                device = launch.device(self.options.train.device)
        except ValueError as error:
            failed = error

        started = False

        def agreed_program(links: RankLinks) -> T:
            nonlocal started
            with links.agreement():
                if failed is not None:
                    raise failed
            started = True
            comparison = SampleComparison(links, [each for each in data if each is not None])
            return program(links, comparison)

        grid = Grid(len(self.blocks), replicas)
        options = self.options
        try:
            with launch.numerics(options.train.deterministic):
                return start(agreed_program, grid, options.links, device, failed, self._arrangement)
        finally:
            for each in data:
                if each is not None:
                    each.close()
            if started:
                self._gather_weights()

    def _gather_weights(self) -> None:
        """Move the network to the host's memory if threads had its blocks on several GPUs."""
        gpus = {p.device for p in self.blocks.model.parameters() if p.is_cuda}
        if len(gpus) > 1 and launch.communicator() is None:
            with suppress(RuntimeError):  # of a GPU, which has ended the training
                for index in range(len(self.blocks)):
                    self.blocks.module(index).cpu()
                self.blocks.model.cpu()

    def _read_weights(self) -> None:
        """Read all weights that are still in files, where one process has all blocks."""
        if launch.communicator() is None:
            read_weights(self.blocks, range(len(self.blocks)))

    def _choose_loss(self) -> bool:
        """Whether targets are inputs, too; without a loss the network's is then taken."""
        labels, options = takes_targets(self.blocks), self.options
        if labels and options.loss is None and "loss" not in options.train.model_fields_set:
            options.train = options.train.model_copy(update={"loss": MODEL})
        return labels

    def threads(self, blocks: int) -> int:
        """Intra-operation threads of one rank; by default one on simulated links."""
        train = self.options.train
        if link_class(self.options.links).clocked:
            return train.threads or 1
        return train.threads or launch.threads_per_rank(blocks)

    def make_method(
        self, train: Data, ranks: int = 1, test: Data | None = None, validation: Data | None = None
    ) -> Method:
        """What `fit` trains by; ValueError, with the remedy, for settings that cannot work."""
        self._check_ranks(ranks)
        check_links(self.options.links, ranks if ranks > 1 or launch.communicator() else 0)
        wide = [n for n, x in self.blocks.model.state_dict().items() if x.dtype == torch.complex128]
        if wide and self.options.out is not None:
            raise ValueError(
                f"{wide[0]!r} is complex128, which safetensors files of a run folder cannot hold: "
                "leave out= out, or take complex64"
            )
        self.blocks = fit_to_memory(self.blocks, self.options, train)
        problem = Problem.of(self.options, self.blocks, train, test, validation)
        self.blocks = problem.blocks
        method = make_method(problem, self.options)
        if self.options.train.compile or method.device.type == "cuda":
            launch.keep_caches_private()
        return method

    def _check_ranks(self, ranks: int) -> None:
        if ranks > 1 or launch.communicator():
            Grid(len(self.blocks), self.options.replicas).on(ranks)
