"""The run's passes over a few samples. A proof compares their gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.networks.units import BlockModule, kept_state
from hybrid.proof.undivided import (
    PassResult,
    Sketches,
    attributes_of,
    sketch,
    unlike,
    without_gradients,
)
from hybrid.solvers.block import Block
from hybrid.solvers.checks.constant_draws import ConstantDraws
from hybrid.solvers.checks.traces import graph_leaves, untraced
from hybrid.solvers.delayed.base import Delayed
from hybrid.solvers.exact.exact_pass import ExactPass, PassSettings
from hybrid.solvers.registry import STRATEGIES
from hybrid.solvers.sync.ties import AllTies
from hybrid.solvers.windows import Batch, PhaseStats, Window


@dataclass
class RankPass:
    """What one rank has of a pass."""

    loss: tuple[float, float] | None = None
    """On a last block: the loss over a replica's share, and its weight."""
    passed: PassResult = field(default_factory=PassResult)
    foreign: str = ""
    """A weight of another block that the loss reads."""


class ExactPasses:
    """The exact pass, as a run makes it."""

    def __init__(self, method: Method) -> None:
        self.method = method
        share = max(1, method.options.train.batch_size // method.options.replicas)
        self.parts = self.settings(method).num_micro_batches(share, method.setup.blocks)

    @staticmethod
    def settings(method: Method) -> Any:
        """What decides the number of micro-batches."""
        return method.solver if isinstance(method.solver, PassSettings) else method.correction

    @staticmethod
    def applies(method: Method) -> bool:
        """Whether the run makes such passes, or no others that could be compared."""
        return method.solver.exact or method.setup.corrects or not LatePasses.applies(method)

    def over(self, method: Method, share: Batch) -> Method:
        """The method for mini-batches of the size of this one; `share` is a replica's part."""
        replicas = method.setup.replicas
        total = share.size if share.total else len(share) * replicas * (replicas > 1)
        return replace(method, setup=replace(method.setup, batch_size=len(share), total=total))

    def run(self, method: Method, block: Block, links: RankLinks, window: Window) -> PhaseStats:
        return ExactPass(self.settings(method), block, links, method.setup).train(window)


class LatePasses(ExactPasses):
    """The passes of a method with late gradients, over one mini-batch: its weights are equal."""

    @staticmethod
    def settings(method: Method) -> Any:
        return method.solver

    @staticmethod
    def applies(method: Method) -> bool:
        solver = method.solver
        return isinstance(solver, Delayed) and solver.sums_mini_batches and solver.repeatable

    def over(self, method: Method, share: Batch) -> Method:
        options = copy(method.options)
        solver: Any = options.solver
        options.solver = replace(solver, micro_batches=self.parts)
        return super().over(replace(method, options=options), share)

    def run(self, method: Method, block: Block, links: RankLinks, window: Window) -> PhaseStats:
        program = method.solver.start(block, links, method.setup)
        stats = program.train(window)
        stats.add(program.drain())
        return stats


def lossless_method(method: Method, formats: bool = False) -> Method:
    """Return the method without clipping, rounding, averages and compilation.

    With `formats` it rounds, except to float16: training leaves out steps until a loss scale fits.
    """
    options = copy(method.options)
    formatted = formats and options.train.precision != "float16"
    precision = options.train.precision if formatted else "float32"
    changed = {"precision": precision, "compile": False, "ema": 0.0}
    options.train = options.train.model_copy(update=changed)
    options.correction = options.correction.lossless(formats)
    if isinstance(options.solver, Delayed | PassSettings):
        options.solver = options.solver.lossless(formats)
    if not options.sync.exact:  # each replica's steps are on its own mean: one is compared
        options.sync = STRATEGIES[STRATEGIES.default]()
    options.sync = options.sync if formats else options.sync.lossless()
    return replace(method, options=options, setup=replace(method.setup, compiled=False))


def has_rounding(method: Method) -> bool:
    """Whether the run's passes round to 16 or 8 bits."""
    one, other = (lossless_method(method, formats).options for formats in (False, True))
    names = ("correction", "solver", "sync")
    precise = one.train.precision == other.train.precision
    return not precise or any(getattr(one, n) != getattr(other, n) for n in names)


def share_weights(method: Method, links: RankLinks) -> None:
    """Let the first rank's network have the weights of all blocks of its replica.

    A script that does not seed torch builds another network on each rank, whose blocks are trained
    together. What the first rank has already does not travel.
    """
    own = _named_parameters(method, links)
    everyone = links.gather({name: sketch(name, p) for name, p in own.items()})
    wanted: list[list[str]] = []
    if everyone is not None:
        here = dict(method.problem.blocks.model.named_parameters(remove_duplicate=False))
        known: set[str] = set()  # of a weight of several blocks the first one's counts
        for rank, each in enumerate(everyone[: links.size]):
            new = {n: x for n, x in each.items() if rank and n not in known}
            wanted.append([n for n, x in new.items() if not torch.equal(x, sketch(n, here[n]))])
            known |= each.keys()
    wanted = links.broadcast(wanted)
    if links.place.replica:
        return
    for rank, names in enumerate(wanted):
        if names and links.rank in (0, rank):
            links.meet([0, rank])
        for name in names:
            if links.rank == rank:
                links.to_block(0, own[name].detach().clone())
            elif links.rank == 0:
                # not a copy into it: after another training its memory is let go of
                here[name].data = links.from_block(rank)
    links.flush()


def run_pass(
    program: ExactPasses, method: Method, links: RankLinks, share: Batch, R: int, formats: bool
) -> list[RankPass]:
    """Gather each rank's result of the run's pass on the first rank; None elsewhere."""
    method = program.over(lossless_method(method, formats), share)
    block = method.block(links, _GradientRecorder)
    if block.freezing is not None:
        block.freezing.remove()
        block.freezing = None
    if block.sync is not None:
        block.sync.copy_first_replica()
        if R == 1:
            block.sync = None
    assert isinstance(block.module, BlockModule)
    result, name_of = RankPass(), block.module.global_name
    recorder = block.optimizers["exact"]
    assert isinstance(recorder, _GradientRecorder)
    recorder.sketches = result.passed.gradients
    for name, p in _named_parameters(method, links).items():
        recorder.names.setdefault(p, []).append(name)
    loss = block.objective.loss if block.last else None
    with (
        kept_state(block.module),
        without_gradients(block.module),
        untraced(loss, method.problem.objectives.network),
        _foreign_weights_noted(block, method, result),
    ):
        before = attributes_of(block.module, name_of)
        if isinstance(block.ties, AllTies):
            block.ties.wait_for_each_other()
            block.ties.begin()
        with ConstantDraws(keyed=True):
            stats = program.run(method, block, links, Window([share]))
        if block.last:
            result.loss = float(stats.losses[-1]), share.share
        for name, b in block.module.named_buffers():
            result.passed.buffers[name_of(name)] = sketch(name_of(name), b)
        after = attributes_of(block.module, name_of).items()
        result.passed.attributes = {n: x for n, x in after if unlike(x, before.get(n))}
    block.release()
    return (links.gather(result) or [])[: links.size * R]


class _GradientRecorder(torch.optim.Optimizer):
    """Keeps sketches of the gradients in place of a step."""

    def __init__(self, module: nn.Module) -> None:
        self.sketches: Sketches = {}
        self.names: dict[Tensor, list[str]] = {}
        """A parameter's names in the network."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        super().__init__(parameters or [nn.Parameter(torch.zeros(0))], {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                for name in self.names.get(p, ()):
                    self.sketches[name] = sketch(name, p.grad.to_dense())


def _named_parameters(method: Method, links: RankLinks) -> dict[str, nn.Parameter]:
    """This rank's parameters by all their names in the network."""
    units = method.problem.blocks.units_of(links.rank)
    return {name: p for unit in units for name, p in unit.parameters().items()}


@contextmanager
def _foreign_weights_noted(block: Block, method: Method, result: RankPass) -> Iterator[None]:
    """Note a weight of another block that the loss's gradient reaches."""
    own = {p.data_ptr() for p in block.module.parameters()}  # of versions of them, too
    compute_loss = block.compute_loss

    def watching(out: Any, labels: Tensor, weight: Tensor | None = None) -> Any:
        computed = compute_loss(out, labels, weight)
        for leaf in graph_leaves(computed.loss):
            if isinstance(leaf, nn.Parameter) and leaf.data_ptr() not in own and not result.foreign:
                named = method.problem.blocks.model.named_parameters()
                name = next((repr(n) for n, p in named if p is leaf), f"{tuple(leaf.shape)}")
                result.foreign = f"the loss reads the weight {name} of another block or replica"
        return computed

    block.compute_loss = watching  # type: ignore[method-assign]
    try:
        yield
    finally:
        del block.compute_loss
