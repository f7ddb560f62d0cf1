"""A block: the run of units that one rank owns, its passes, and the only steps of its weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hybrid.solvers.layers.bundle import Bundle, Crossing, each
from hybrid.solvers.layers.projection import Projection
from hybrid.solvers.metrics import FAULTS, described, failure
from hybrid.solvers.norms import SharedNorms
from hybrid.solvers.numerics import clipping, sliced_steps
from hybrid.solvers.numerics.draws import Draws, Key
from hybrid.solvers.numerics.freezing import Freezing
from hybrid.solvers.numerics.group_rates import set_rate
from hybrid.solvers.numerics.optimizer_state import (
    Average,
    check_dense,
    has_gradients,
    parameters_of,
    restrict_to,
)
from hybrid.solvers.numerics.regularizer import Regularizer
from hybrid.solvers.numerics.uncompiled import paired
from hybrid.solvers.numerics.weights import parameter_places, replaced_parameters
from hybrid.solvers.objective import LossCheck, Objective
from hybrid.solvers.peers import Sync, Tied
from hybrid.solvers.state import State
from hybrid.solvers.windows import Batch, LossAndMetric


@dataclass
class Block:
    """The contiguous run of units that one rank owns, with its optimizers.

    `optimizers["exact"]` steps in exact passes. A solver steps with `optimizers["local"]`, which is
    the same object unless the solver has a momentum of its own. `optimizers["ema"]`, if there is
    one, averages the weights.
    """

    module: nn.Module
    index: int
    count: int
    optimizers: dict[str, torch.optim.Optimizer]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: torch.dtype = torch.float32
    objective: Objective = field(default_factory=Objective)
    cut_after: Projection | None = None
    """The next block's first layer, if it is a projection: the constraint on lam at that cut."""
    rates: dict[str, float] = field(default_factory=lambda: {"exact": 1.0, "local": 1.0})
    """Factors of the learning rate by kind of step."""
    sync: Sync | None = None
    """Keeps the block's replicas together; None: there is one replica."""
    ties: Tied | None = None
    """Keeps the copies of tied weights equal; None: no weight is tied."""
    draws: Draws | None = None
    """Draws the units' random numbers; None: no unit draws any."""
    freezing: Freezing | None = None
    """Freezes parameters for some epochs; None: none is ever frozen."""
    formats: tuple[torch.dtype, ...] = ()
    """Types of the input, then of the output; empty: the parameters' type."""
    norms: SharedNorms | None = None
    """Normalizes over all replicas' samples; None: each replica by its share."""
    regularizer: Regularizer | None = None
    """Adds the gradient of a regularizer; None: there is none."""
    scaler: torch.amp.GradScaler | None = field(init=False, default=None)
    """Keeps float16 gradients in range; None in other formats."""
    records: bool = False
    """Whether passes are recorded as graphs of a GPU, where they can be."""
    check: LossCheck | None = None
    """Checks now and then that the loss is a mean of parts."""
    first_trained: int = 0
    """The first block with parameters to train, which needs no adjoint of its input."""
    watch: Callable[[str, Key], AbstractContextManager[None]] | None = None
    """Makes a context around a pass or step, from its name and key."""
    companions: dict[str, torch.optim.Optimizer] = field(init=False, default_factory=dict)
    """By kind of step: the optimizer of an auxiliary head."""

    def __post_init__(self) -> None:
        self._parameters = [*self.module.parameters()]  # to go through them takes a while
        formats = (p.dtype for p in self._parameters)
        self.formats = self.formats or (next(formats, torch.float32),)
        self._places = parameter_places(self.module)
        if self.precision is torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)
            self.scaler.scale(torch.zeros((), device=self.device))  # creates its scale

    @cached_property
    def first(self) -> bool:
        """Whether this block's input is the image."""
        return self.index == 0

    @cached_property
    def sends_adjoint(self) -> bool:
        """Whether the block before this one needs the adjoint of its output."""
        return self.index > self.first_trained

    @cached_property
    def bundles(self) -> tuple[Bundle | None, Bundle | None]:
        """Of what crosses the cuts before and behind this block; None: one tensor, or no cut."""
        before = None if self.first else getattr(self.module, "before", None)
        return before, None if self.last else getattr(self.module, "after", None)

    @cached_property
    def last(self) -> bool:
        """Whether this block's output goes into the loss."""
        return self.index == self.count - 1

    def forward(
        self,
        lam: Any,
        key: Key = (),
        weights: Mapping[str, Tensor] | None = None,
        parts: slice | None = None,
        apart: bool = False,
    ) -> Any:
        """x_k = f_k(lam_k; w_k), under autocast where the precision asks for it.

        `key` (step, micro-batch, ...) determines what random layers draw; `weights`, by their local
        names, replace the module's parameters. With `parts` the pass goes through these children of
        the module only: a pass may be made in pieces, from the first to the last. Several tensors
        at a cut come in packed or apart, and go out packed or, with `apart`, apart: see `Bundle`.
        """
        if self.draws is not None and not (parts and parts.start):
            self.draws.draw_for(key)
        some: dict[str, Any] = {} if parts is None else {"parts": parts}
        some |= {"apart": True} if apart and self.bundles[1] is not None else {}
        try:
            with self.span("forward", key), self.numbers(), self.replaced(weights):
                out: Any = self.module(lam, **some)
        except FAULTS as error:
            raise ValueError(
                f"the forward pass fails on input {described(lam)}: {failure(error)}"
            ) from error
        ends = self.last and (parts is None or parts.stop == len(self.module._modules))
        return tree_map(wide, out) if ends and self.precision is not torch.float32 else out

    def replaced(self, weights: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        """Replace the parameters by these weights for a while; None: keep them."""
        return nullcontext() if weights is None else replaced_parameters(self._places, weights)

    def span(self, name: str, key: Key = ()) -> AbstractContextManager[None]:
        """Show the body under that name in a trace."""
        return nullcontext() if self.watch is None else self.watch(name, key)

    def numbers(self) -> AbstractContextManager[Any]:
        """Let torch compute in the block's precision for a while."""
        if self.precision is torch.float32:
            return nullcontext()
        # weights are used once in each pass
        return torch.autocast(self.device.type, dtype=self.precision, cache_enabled=False)

    def compute_loss(self, out: Any, labels: Tensor, weight: Tensor | None = None) -> LossAndMetric:
        """Compute loss and metric of the last block's output (or a head's) and its targets.

        `weight` is the `part_weight` of a part of a mini-batch.
        """
        return self.objective(out, labels, weight)

    def part_weight(self, batch: Batch, labels: Tensor) -> Tensor | None:
        """Return the weight of a batch in the loss of its whole mini-batch.

        `labels` are the batch's. None: each sample counts alike, or there is nothing else in the
        mini-batch.
        """
        return self.part_weights(batch, labels, [len(batch)])[0]

    def part_weights(
        self, batch: Batch, labels: Tensor, sizes: Sequence[int]
    ) -> Sequence[Tensor | None]:
        """`part_weight` of the parts of a batch, which have `sizes` samples.

        Replicas add up what their shares weigh, with a small message, if all their steps are one.
        """
        divided = self.sync is not None or batch.whole is not None or len(sizes) > 1
        if self.objective.weighted is None or not divided:
            return [None] * len(sizes)
        if batch.weight is not None:
            return [batch.weight * size for size in sizes]
        labels = labels if batch.whole is None else batch.whole.labels()
        weight = self.objective.weight(labels)
        assert weight is not None
        sums = torch.stack([weight, torch.full_like(weight, len(labels))])
        weight, samples = sums if self.sync is None else self.sync.total(sums)
        return [weight * size / samples for size in sizes]

    def step(
        self,
        kind: str,
        learning_rate: float,
        clip_norm: float = 0.0,
        chain: clipping.NeighborLinks | None = None,
        only: Sequence[Tensor] | None = None,
    ) -> None:
        """Step on the gradients at hand, and clear them.

        `clip_norm` is the largest norm of this block's gradient (by itself that of what others
        have, too) or, with a `chain`, of all its blocks' together; 0: no clipping. Replicas agree
        before and after the step. With `only`, the step and the gradient are of those only.
        """
        rate = learning_rate * self.rates.get(kind, self.rates["local"])
        with self.span("step"):
            self._drop_frozen()
            check_dense(self.gradients(only))
            if self.sync is None or self.sync.before_step(kind, rate):
                if self.ties is not None:
                    self.ties.sum_gradients(kind == "exact")
                if self.regularizer is not None and kind != "auxiliary":
                    self.regularizer.add_gradient(self.loss_scale, only)
                self._drop_frozen()
                if clip_norm:
                    self._clip(self.optimizers[kind], clip_norm, chain, only)
                self.move(kind, rate, only)
            for optimizer in self._stepping(kind, only):
                optimizer.zero_grad(set_to_none=True)
            if self.sync is not None:
                self.sync.after_step(kind)
            if self.average is not None and kind != "auxiliary":
                (self.average if only is None else restrict_to(only, self.average)).step()

    def _drop_frozen(self) -> None:
        if self.freezing is not None:
            self.freezing.drop_gradients()

    def move(self, kind: str, rate: float, only: Sequence[Tensor] | None = None) -> None:
        """Step with the optimizers of this kind, at learning rate `rate` times a group's ratio."""
        optimizers = self._stepping(kind, only)
        scaler = None if kind == "auxiliary" else self.scaler
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                set_rate(group, rate)
            if scaler is None:
                sliced_steps.step(optimizer)
            elif has_gradients(optimizer):
                scaler.step(optimizer)
        if scaler is not None and any(map(has_gradients, optimizers)):
            scaler.update()

    def stepping(self, kind: str) -> list[nn.Parameter]:
        """The parameters that steps of `kind` change."""
        return list(parameters_of(self._stepping(kind)))

    def everything(self) -> list[nn.Parameter]:
        """The parameters that any step changes."""
        kinds = [kind for kind in self.optimizers if kind != "ema"]
        return list(dict.fromkeys(p for kind in kinds for p in self.stepping(kind)))

    def _stepping(
        self, kind: str, only: Sequence[Tensor] | None = None
    ) -> list[torch.optim.Optimizer]:
        optimizers = [o for o in (self.companions.get(kind), self.optimizers[kind]) if o]
        return optimizers if only is None else [restrict_to(only, o) for o in optimizers]

    def release(self) -> None:
        """Remove from the module what was added to it for this run."""
        for added in (self.draws, self.norms, self.freezing):
            if added is not None:
                added.remove()

    @property
    def average(self) -> Average | None:
        """The moving average of the weights; None without one."""
        ema = self.optimizers.get("ema")
        return ema if isinstance(ema, Average) else None

    def joined(self) -> AbstractContextManager[None]:
        """Give all replicas the same weights and statistics for a while."""
        return nullcontext() if self.sync is None else self.sync.joined()

    @contextmanager
    def as_tested(self) -> Iterator[None]:
        """Give the module its tested weights for a while: the mean, or the average."""
        with self.joined():
            self._swap_average()
            try:
                yield
            finally:
                self._swap_average()

    def keep_tested_weights(self) -> None:
        """Give the module its tested weights for good: the training has ended."""
        if self.sync is not None:
            self.sync.join()
        self._swap_average()

    def _swap_average(self) -> None:
        """Exchange the weights and their average, if there is one."""
        if self.average is not None:
            self.average.swap()

    def _clip(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float,
        chain: clipping.NeighborLinks | None,
        only: Sequence[Tensor] | None,
    ) -> None:
        gradients = self.gradients(only)
        if self.scaler is not None and gradients:
            self.scaler.unscale_(optimizer)
        if self.ties is not None and chain is None:
            clipping.clip_each(self.ties.by_blocks(gradients), clip_norm, self.device)
            return
        counted = gradients if self.ties is None else self.ties.without_copies(gradients)
        norms = clipping.gradient_norms(counted, self.device)
        if self.scaler is not None:  # a block whose gradient overflowed makes no step
            norms = torch.where(norms.isfinite().all(), norms, 0.0)
        clipping.clip_gradients(gradients, clip_norm, clipping.total_norm(norms, chain))

    @property
    def loss_scale(self) -> float:
        """The factor of adjoints in `backward`: a power of two in float16, else 1.

        Each block has its own scale. An overflow halves it, and that block makes no step.
        """
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def backward(
        self,
        out: Crossing,
        p_out: Crossing | None = None,
        retain_graph: bool = False,
        key: Key = (),
    ) -> None:
        """Add `loss_scale` times the gradient to the parameters, from p_out = d loss / d out.

        Without p_out, `out` is the loss. Nothing happens where `out` needs no gradient. `key` is
        that of the forward pass.
        """
        outputs = (out,) if isinstance(out, Tensor) else out
        adjoints = p_out if isinstance(p_out, tuple) else (p_out,) * len(outputs)
        scale, ends = self.loss_scale, list[Tensor]()
        for x, p in zip(outputs, adjoints, strict=True):
            if not x.requires_grad:
                continue
            if p is None:
                ends.append(x if scale == 1.0 else x * scale)
            else:
                ends.append(paired(x, p if scale == 1.0 else (p * scale).to(x.dtype)))
        if not ends:
            return
        try:
            with self.span("backward", key):
                torch.autograd.backward(ends, retain_graph=retain_graph)
        except RuntimeError as error:
            raise ValueError(f"the backward pass fails: {failure(error)}") from error

    def last_pass(self, kind: str) -> AbstractContextManager[None]:
        """Announce the last backward pass before a step: gradients are final after it."""
        return nullcontext() if self.sync is None else self.sync.last_pass(kind)

    def input_adjoint(self, lam: Any) -> Any:
        """d loss / d lam as `backward` has left it at lam, in its scale; 0 without dependence."""

        def adjoint(x: Tensor) -> Tensor:
            if x.grad is None:
                return torch.zeros_like(x)
            return x.grad if self.scaler is None else x.grad.float() / self.loss_scale

        return each(adjoint, lam)

    def sample_adjoint(self, lam: Tensor, size: int) -> Tensor | None:
        """The adjoint of one sample's loss, not of the mean over `size`; 0 after an overflow."""
        if not lam.requires_grad:
            return None
        return self.stored_adjoint(self.input_adjoint(lam) * size)

    def stored_adjoint(self, p: Tensor) -> Tensor:
        """Replace what overflowed: it may cost a step, but must not be stored."""
        return p if self.scaler is None else p.nan_to_num(0.0, 0.0, 0.0)

    def state(self) -> State:
        """float16's loss scale and its age; weights and optimizers are saved elsewhere."""
        if self.scaler is None:
            return State()
        state = self.scaler.state_dict()
        numbers = (float(state["scale"]), float(state["_growth_tracker"]))
        return State(block={"loss scale": torch.tensor(numbers, dtype=torch.float64)})

    def load_state(self, state: State) -> None:
        if self.scaler is not None and state.block:
            scale, steps = state.block["loss scale"].tolist()
            saved = {"scale": scale, "_growth_tracker": int(steps)}
            self.scaler.load_state_dict(self.scaler.state_dict() | saved)

    def gradients(self, only: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The gradients at hand, of all parameters or of some, in their order."""
        some = self._parameters if only is None else only
        return [p.grad for p in some if p.grad is not None]


def wide(x: Any) -> Any:
    """A floating-point tensor in float32, anything else as it is."""
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
