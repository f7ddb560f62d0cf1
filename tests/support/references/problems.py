"""Random small networks and a way to run a program on every block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from hybrid.links import RankLinks, run_threads
from hybrid.networks.blocks import Blocks
from hybrid.networks.partition.split import split
from hybrid.solvers import Batch, Block, Solver, Window
from hybrid.solvers.base import Program, Setup
from hybrid.solvers.exact.exact_pass import ExactPass, PassSettings
from hybrid.solvers.layers.branches import Reversible
from hybrid.solvers.layers.bundle import call_network
from hybrid.solvers.layers.projection import leading_projection
from hybrid.solvers.state import State, Tensors


@dataclass(frozen=True)
class Fixed:
    """A source that holds its samples."""

    x: Tensor
    y: Tensor

    mixes = joint = False

    def images(self, ids: Tensor, step: int = 0) -> Tensor:
        return self.x[ids]

    def labels(self, ids: Tensor, step: int = 0) -> Tensor:
        return self.y[ids]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.bn(self.conv(x)))


@dataclass
class Problem:
    """A random float64 network of `units` residual units, cut into blocks, and its mini-batches."""

    blocks: Blocks
    batches: list[Batch]

    def __post_init__(self) -> None:
        self.shapes = tuple(self.blocks.cut_shapes(self.batches[0].images()))

    def build(self, index: int, lr: float = 0.1, momentum: float = 0.9) -> Block:
        module = self.blocks.module(index).train()
        trainable = [p for p in module.parameters() if p.requires_grad]
        parameters = trainable or [nn.Parameter(torch.zeros(0))]
        sgd = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)
        last = index == len(self.blocks) - 1
        after = None if last else leading_projection(self.blocks.module(index + 1))
        optimizers = {"exact": sgd, "local": sgd}
        return Block(module, index, len(self.blocks), optimizers, cut_after=after)

    def setup(self, sweeps: int = 1, carried: bool = False, window: int | None = None) -> Setup:
        """Of windows of all mini-batches, unless said otherwise."""
        length = len(self.batches) if window is None else window
        return Setup(self.shapes, len(self.batches[0]), length, sweeps, carried)

    def window(self, sweeps: int = 1, first: int = 0, end: int | None = None) -> Window:
        """Of the mini-batches first .. end - 1."""
        return Window(self.batches[first:end], sweeps)

    def single_precision(self) -> Problem:
        """The same in float32."""
        self.blocks.model.float()
        source = self.batches[0].source
        assert isinstance(source, Fixed)
        single = Fixed(source.x.float(), source.y)
        return replace(self, batches=[replace(b, source=single) for b in self.batches])

    def frozen(self) -> Problem:
        """The same with a learning rate of zero."""
        return replace(self, batches=[replace(b, learning_rate=0.0) for b in self.batches])

    @property
    def samples(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def on_every_block(
        self,
        program: Callable[[Block, RankLinks], Any],
        momentum: float = 0.9,
        run: Callable[..., list[Any]] = run_threads,
    ) -> list[Any]:
        """Run `program(block, links)` on all ranks, each a thread."""
        return run(
            len(self.blocks), lambda links: program(self.build(links.rank, 0.1, momentum), links)
        )

    def plain_gradients(self, batch: Batch) -> dict[str, Tensor]:
        """The batch-mean loss's gradients of the whole network, without blocks."""
        model = self.blocks.model
        model.zero_grad()
        nn.functional.cross_entropy(model(batch.images()), batch.labels()).backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found

    def plain_loop(self) -> Tensors:
        """All tensors of the network after training it without blocks."""
        steps = ((b.images(), b.labels(), b.learning_rate) for b in self.batches)
        return copied(trained_by_hand(self.blocks.model, steps, 0.0))

    def tensors(self) -> Tensors:
        """A copy of all tensors of the network."""
        return copied(self.blocks.model.state_dict())


NESTEROV = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)


def trained_by_hand(
    model: nn.Module,
    steps: Iterable[tuple[Any, Tensor, float]],
    decay: float | None = 5e-4,
    loss: Callable[..., Tensor] = nn.functional.cross_entropy,
    optimizer: Callable[..., torch.optim.Optimizer] = NESTEROV,
    after_step: Callable[[], object] = lambda: None,
) -> Tensors:
    """Plain PyTorch over (inputs, targets, learning rate); vectors do not decay."""
    matrices = [p for p in model.train().parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if decay is not None:  # else that of the optimizer holds
        groups[0]["weight_decay"] = decay
    made = optimizer(groups)
    for inputs, targets, rate in steps:
        for group in made.param_groups:
            group["lr"] = rate
        loss(call_network(model, inputs), targets).backward()
        made.step()
        made.zero_grad()
        after_step()
    return model.state_dict()


def make_problem(
    seed: int,
    units: int,
    cuts: list[int],
    batch: int,
    batches: int = 1,
    width: int = 3,
    reversible: bool = False,
) -> Problem:
    torch.manual_seed(seed)
    width = 2 * width if reversible else width
    stem = nn.Conv2d(1, width, 3, padding=1)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))
    if reversible:
        body: list[nn.Module] = [Reversible(Residual(width // 2)) for _ in range(units)]
    else:
        body = [Residual(width) for _ in range(units)]
    model = nn.Sequential(stem, *body, *head).double()
    x = torch.randn(batch * batches, 1, 6, 6, dtype=torch.float64)
    y = torch.randint(0, 4, (batch * batches,))
    ids = torch.arange(batch * batches).split(batch)
    source = Fixed(x, y)
    blocks = split(model, cuts=[str(c) for c in cuts])
    return Problem(blocks, [Batch(i, 0.1, source) for i in ids])


def without_batch_norm(problem: Problem) -> Problem:
    for module in problem.blocks.model.modules():
        if hasattr(module, "bn"):
            module.bn = nn.Identity()
    return problem


def exact_pass(block: Block, links: RankLinks, **settings: Any) -> ExactPass:
    return ExactPass(PassSettings(**settings), block, links, Setup())


def recorded(
    problem: Problem,
    solver: Solver,
    block: Block,
    links: RankLinks,
    sweeps: int = 1,
    carried: bool = False,
) -> Any:
    """A rank's program, its auxiliary variables started by an exact pass."""
    program = solver.start(block, links, problem.setup(sweeps, carried))
    exact_pass(block, links).observe(problem.window(), program)
    return program


def started(problem: Problem, solver: Solver, block: Block, links: RankLinks) -> Any:
    """A rank's program whose auxiliary variables, started by a forward pass, are carried."""
    program = solver.start(block, links, problem.setup(carried=True))
    exact_pass(block, links).propagate(problem.window(), program)
    return program


BELOW, ABOVE = ("target", "kappa_out"), ("lam", "kappa_in")
"""What the two sides of a cut keep of it."""


def buffers(block: Block, program: Any, samples: int) -> Tensors:
    """A copy of what a program keeps of its cuts."""
    names = (() if block.first else ABOVE) + (() if block.last else BELOW)
    return {name: program.store.raw(name, slice(0, samples)).clone() for name in names}


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def handed_over(links: RankLinks, old: Program) -> State:
    """What a program of the same block is given of `old`'s state after a resume."""
    state = old.state()
    cuts = links.all_gather(copied(state.cut))
    after = cuts[links.rank + 1] if links.rank + 1 < links.size else {}
    return State({}, cuts[links.rank], copied(state.block), copied(state.flight), after)


def assert_weights_moved(problem: Problem, before: Tensors) -> None:
    """Every weight, and no statistics."""
    after = problem.tensors()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    statistics = {name for name in before if "running" in name or "tracked" in name}
    weights = {name for name, _ in problem.blocks.model.named_parameters() if "weight" in name}
    assert statistics
    assert not moved & statistics
    assert weights <= moved


def gradients(block: Block) -> dict[str, Tensor]:
    """The gradients at hand under their global names."""
    return {
        block.module.global_name(name): p.grad.clone()
        for name, p in block.module.named_parameters()
        if p.grad is not None
    }


@st.composite
def problems(draw: st.DrawFn, batches: int = 1, min_blocks: int = 2) -> Problem:
    """Random depth, cuts and batch size."""
    units = draw(st.integers(2, 5))
    cuts = st.lists(st.integers(1, units), min_size=min_blocks - 1, max_size=4, unique=True)
    return make_problem(
        seed=draw(st.integers(0, 10_000)),
        units=units,
        cuts=sorted(draw(cuts)),
        batch=draw(st.integers(2, 7)),
        batches=batches,
    )
