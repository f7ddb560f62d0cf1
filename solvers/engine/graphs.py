"""A block's passes recorded as graphs of a GPU: one launch each, instead of one per operation.

torch.cuda.make_graphed_callables has one pass of a module under way; here a delayed method has
several, each at its own version of the weights.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hybrid.solvers.block import Block
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.engine.policies import BackwardPolicy, KeepGraph, Receive, StashWeights
from hybrid.solvers.metrics import failure
from hybrid.solvers.numerics.attributes import has_user_hooks, user_modules
from hybrid.solvers.numerics.buffers import has_changing_buffers
from hybrid.solvers.numerics.draws import SEEDING

T = TypeVar("T")
WARM_UPS = 3
"""Passes before a recording, in which libraries choose algorithms and allocate workspaces."""
MOST_THREADS = 32
"""Streams that torch has for each GPU: one more thread would share one that is being recorded."""
MOST_FORMS = 8
"""Most forms for which passes are recorded: each recording takes memory."""


class CudaRecorder:
    """Records work of a block as CUDA graphs, all on one stream, and so not at once."""

    def __init__(self, device: torch.device) -> None:
        current: Any = torch.cuda.current_stream(device)
        # graphs of other blocks, which may run at the same time, have other streams' workspaces
        is_own = current != torch.cuda.default_stream(device)
        self._stream = current if is_own else torch.cuda.Stream(device)

    def pool(self) -> Any:
        """Make a pool of memory, which graphs share that read each other's results."""
        return torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T], pool: Any) -> tuple[T, Callable[[], None]]:
        """Record the operations of `work` without running them; return what it does, and a replay.

        A replay writes the same tensors, on the current stream.
        """
        # not by torch.cuda.graph, which waits for the whole GPU: a message may be under way whose
        # receiver waits for this rank
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        gc.collect()  # nothing may be freed meanwhile
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # other threads, which train other blocks, may allocate and wait for streams meanwhile
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                made = work()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return made, graph.replay


RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaRecorder}
"""By type of device, what records its work."""


class RecordedPass:
    """The forward and backward pass of one flight at a time, on memory of its own.

        lam, w <- the flight's input and the newest weights        copied
        x = f_k(lam; w)                                            replayed
        (d x / d lam)^T p, (d x / d w)^T p   for p <- p_{k+1}      replayed, when p_{k+1} is there

    w is the version of the weights that the backward pass needs, so a step may come between.
    """

    form: Sequence[Any]
    """That of its input, and the modes of the block's modules."""

    def __init__(self, block: Block, lam: Tensor, recorder: Any) -> None:
        self.block, self.parameters = block, dict(block.module.named_parameters())
        self.lam = lam.detach().clone().requires_grad_(lam.requires_grad)
        self._trained = [name for name, p in self.parameters.items() if p.requires_grad]
        self.weights = {
            name: nn.Parameter(self.parameters[name].detach().clone()) for name in self._trained
        }
        self._inputs = [self.lam] * lam.requires_grad
        buffers = [*block.module.buffers()]
        before = [buffer.clone() for buffer in buffers]
        pool = recorder.pool()
        with SEEDING:  # no other thread may seed a generator, or record, meanwhile
            self._warm_up()
            try:
                x, self._replay_forward = recorder.record(self._forward, pool)
                self.x = x.detach()
                self.gradients, self._replay_backward = recorder.record(self._backward, pool)
            except (RuntimeError, ValueError) as error:
                raise ValueError(
                    f"train.compile is 'graphs', but the passes of block {block.index} cannot be "
                    f"recorded ({failure(error)[:200]}): leave it out"
                ) from error
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # graphs under way do not use it

    def _warm_up(self) -> None:
        out = self._forward()
        if not isinstance(out, Tensor):
            raise ValueError(
                f"train.compile is 'graphs', and block {self.block.index} returns several tensors: "
                "leave it out"
            )
        self.p_out = torch.zeros_like(out)
        for _ in range(WARM_UPS):
            self._forward()
            self._backward()
        del self._made  # its graph, and with it the streams on which gradients were added up

    def _forward(self) -> Tensor:
        made: Tensor = self.block.forward(self.lam, weights=self.weights)
        self._made = made
        return made

    def _backward(self) -> tuple[Tensor | None, ...]:
        ends = [*self._inputs, *self.weights.values()]
        if not self._made.requires_grad:
            return (None,) * len(ends)
        return torch.autograd.grad(self._made, ends, self.p_out, allow_unused=True)

    def fits(self) -> bool:
        """Whether the parameters to train are those of the recording."""
        return [n for n, p in self.parameters.items() if p.requires_grad] == self._trained

    @torch.no_grad()
    def go_forward(self, lam: Tensor) -> Tensor:
        """f_k(lam; w_k) at the newest weights, in memory that a receiver may keep."""
        self.lam.copy_(lam)
        _for_each(torch._foreach_copy_, [(w, self.parameters[n]) for n, w in self.weights.items()])
        self._replay_forward()
        x: Tensor = self.x.clone()
        return x

    @torch.no_grad()
    def go_backward(self, p_out: Tensor) -> Tensor | None:
        """Add the gradient to the parameters; return that of lam, or None without one."""
        self.p_out.copy_(p_out)
        self._replay_backward()
        count, new, old = len(self._inputs), [], []
        for name, gradient in zip(self._trained, self.gradients[count:], strict=True):
            p = self.parameters[name]
            if gradient is None:
                continue
            if p.grad is None:
                p.grad = torch.empty_like(p)
                new.append((p.grad, gradient))
            else:
                old.append((p.grad, gradient))
        _for_each(torch._foreach_copy_, new)
        _for_each(torch._foreach_add_, old)
        p_in = self.gradients[0] if count else None
        return None if p_in is None else p_in.clone()


class Recorded(BackwardPolicy):
    """Runs another policy's passes as recorded graphs; bits stay the same.

    Passes of each form (of the input, and of what Python looks at: modes, and whether BatchNorm
    updates its statistics) have as many recordings as there are flights under way.
    """

    def __init__(self, policy: BackwardPolicy) -> None:
        super().__init__(policy.block)
        self.policy = policy
        self._recorder = RECORDERS[policy.block.device.type](policy.block.device)
        self._modules = [*policy.block.module.modules()]
        self._free: dict[Sequence[Any], list[RecordedPass]] = defaultdict(list)

    def forward(self, flight: Flight) -> Any:
        lam = flight.lam
        assert lam is not None
        modes = ((m.training, getattr(m, "track_running_stats", None)) for m in self._modules)
        form = lam.shape, lam.stride(), lam.dtype, *modes
        if form not in self._free and len(self._free) == MOST_FORMS:
            return self.policy.forward(flight)
        free = [each for each in self._free[form] if each.fits()]
        flight.recorded = free.pop() if free else RecordedPass(self.block, lam, self._recorder)
        flight.recorded.form, self._free[form] = form, free
        with self.block.span("forward", flight.part.key):
            x = flight.recorded.go_forward(lam)
        flight.weights = flight.recorded.weights
        if self.block.last:
            flight.x = x.requires_grad_()  # the loss is not part of the recording
        flight.out = x
        return flight.out

    def backward(self, flight: Flight, receive: Receive) -> Any:
        recorded, block = flight.recorded, self.block
        if recorded is None:  # of a checkpoint, or of one form too many
            return self.policy.backward(flight, receive)
        assert flight.out is not None
        assert flight.lam is not None
        if block.last:
            assert flight.x is not None
            block.backward(flight.out, key=flight.part.key)
            p_out = flight.x.grad
        else:
            p_out = receive(flight.out.dtype)
            p_out = p_out if p_out is None or block.scaler is None else p_out * block.loss_scale
        if p_out is not None:
            with block.span("backward", flight.part.key):
                flight.lam.grad = recorded.go_backward(p_out)
        self._free[recorded.form].append(recorded)
        return self.input_adjoint(flight)

    def before_step(self) -> None:
        self.policy.before_step()

    def restore(self, flight: Flight) -> None:
        self.policy.restore(flight)


def recorded(policy: BackwardPolicy) -> BackwardPolicy:
    """Return a policy that records the passes of this one, or this one if that cannot be."""
    policy.eager = why_eager(policy)
    return policy if policy.eager else Recorded(policy)


def why_eager(policy: BackwardPolicy) -> str:
    """Say why a policy's passes cannot be recorded; empty if they can.

    A recording repeats operations on a GPU, and nothing that Python does beside them.
    """
    block, module = policy.block, policy.block.module
    keeps = type(policy) is KeepGraph or (type(policy) is StashWeights and not policy.recompute)
    if not keeps:
        return "its backward passes do not run on the graph of the forward pass"
    if any(block.bundles):
        return "several tensors cross its cuts"
    if block.draws is not None:
        return "it draws random numbers"
    if block.norms is not None:
        return "its BatchNorm communicates"
    if user_modules(module) or has_user_hooks(module):
        return "its modules or hooks are not torch's, and may do more than a GPU repeats"
    if has_changing_buffers(module.modules()):
        return "its passes may change buffers"
    return ""


def _for_each(change: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Change each first tensor by its second one, in one launch."""
    if pairs:
        change([one for one, _ in pairs], [other for _, other in pairs])
