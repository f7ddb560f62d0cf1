"""All-reduce: every step uses the gradient of the whole mini-batch, summed over replicas."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from hybrid.solvers.acting import Needs
from hybrid.solvers.peers import Sync, statistics
from hybrid.solvers.state import State
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.reduction import (
    BUCKET_BYTES,
    MessageFormat,
    Reduction,
    feedback_copies,
    pack,
    unpack,
    use_counts,
    used_anywhere,
    views,
)

LEAST_BYTES, BUCKETS = 1 << 18, 16
"""A block's gradients travel in this number of buckets, of at least these bytes each and at most
`BUCKET_BYTES`: the first leave early, and the last wait for few gradients."""

NOT_FLOAT16 = Needs(
    "train.precision is not 'float16', whose overflows would stay in the error feedback",
    lambda run: run.train.precision != "float16",
    "choose bfloat16",
)


@dataclass(frozen=True)
class AllReduce(Strategy):
    r"""Synchronous data parallelism. Before a step, on every replica:

        g <- sum_r g_r,   g_r = (n_r / N) times the mean gradient over the n_r samples of replica r

    in replica order, so one rank that accumulates R micro-batches in that order has the same bits.
    Running statistics become sum_r (n_r / N) of the replicas' at the same time. After every step
    weights, optimizers and statistics are equal on all replicas.

    Gradients travel in buckets, the last layers' first. In the last backward pass before a step a
    bucket is sent as soon as it is complete. It is copied once, into the vector that is sent; then
    the gradients are views of the sum. A parameter that a replica's samples did not use adds 0
    there; a parameter that no replica used has no gradient, and does not step.
    """

    name: ClassVar[str] = "all-reduce"
    exact: ClassVar[bool] = True

    messages: Annotated[MessageFormat, NOT_FLOAT16] = "float32"
    """Number format of gradients between replicas; bfloat16 and int8 use error feedback."""

    def copies(self, replicas: int) -> float:
        return feedback_copies(self.messages, replicas)

    def lossless(self) -> "AllReduce":
        return replace(self, messages="float32")


class AllReduced(Sync):
    """One rank's part in the sums of gradients and statistics."""

    strategy: AllReduce

    def begin(self) -> None:
        strategy = self.strategy
        self._gradients = Reduction(self.peers, strategy.messages, strategy.order)
        # too small to be worth rounding, and their rounding errors would not average out
        self._statistics = Reduction(self.peers, order=strategy.order)
        self._layouts: dict[tuple[int, ...], list[list[nn.Parameter]]] = {}
        """Buckets by the identities of the parameters of a step."""
        self._under_way: list[tuple[list[nn.Parameter], Callable[[], Tensor]]] = []
        """Buckets already sent for the next step."""
        self._summed = False
        """Whether the next step is on gradients that `begin_sum` has summed."""

    @contextmanager
    def last_pass(self, kind: str) -> Iterator[None]:
        buckets = self._buckets(kind)
        missing = [{p for p in bucket if p.requires_grad} for bucket in buckets]
        number = {p: i for i, bucket in enumerate(buckets) for p in bucket}

        def send_complete(p: Tensor) -> None:
            missing[number[p]].discard(p)  # type: ignore[index]
            # in the same order on all replicas
            while (n := len(self._under_way)) < len(buckets) and not missing[n]:
                self._send(kind, buckets[n])

        hooks = [p.register_post_accumulate_grad_hook(send_complete) for p in chain(*missing)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin_sum(self, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
        used = [p.grad is not None for p in parameters]
        counts = use_counts(used, parameters)
        finish = self._statistics.start(pack([*map(_gradient, parameters), counts]))
        for p in parameters:
            p.grad = None

        def land() -> None:
            *sums, total = views(finish(), [*parameters, counts])
            anywhere = used_anywhere(used, total)
            for p, g, is_used in zip(parameters, sums, anywhere, strict=True):
                p.grad = g if is_used else None
            self._summed = True

        return land

    def before_step(self, kind: str, rate: float) -> bool:
        if self._summed:
            self._summed = False
            return True
        for bucket in self._buckets(kind)[len(self._under_way) :]:
            self._send(kind, bucket)
        running = statistics(self.block.module) if kind != "auxiliary" else []
        parameters = [p for bucket, _ in self._under_way for p in bucket]
        used = [p.grad is not None for p in parameters]
        counts = use_counts(used, parameters)
        vector = pack([*(x * self.share for x in running), counts])
        finish = self._statistics.start(vector) if len(vector) else lambda: vector
        sums = list[Tensor]()
        for bucket, end in self._under_way:
            sums += views(end(), [_gradient(p) for p in bucket])
        unpack(finish(), [*running, counts])
        for p, total, is_used in zip(parameters, sums, used_anywhere(used, counts), strict=True):
            p.grad = total if is_used else None
        self._under_way = []
        return True

    def total(self, vector: Tensor) -> Tensor:
        return self._statistics.start(vector)()

    def after_step(self, kind: str) -> None:
        self.compare()

    def _send(self, kind: str, bucket: list[nn.Parameter]) -> None:
        vector = pack([_gradient(p) for p in bucket])
        name = f"{kind} {len(self._under_way)}"
        self._under_way.append((bucket, self._gradients.start(vector, name)))

    def _buckets(self, kind: str) -> list[list[nn.Parameter]]:
        """Divide the parameters of a step into buckets, from the last layer to the first."""
        stepping = self.block.stepping(kind)
        key = tuple(map(id, stepping))
        if key in self._layouts:
            return self._layouts[key]
        place = {p: i for i, p in enumerate(self.block.module.parameters())}
        backwards = sorted(stepping, key=lambda p: place.get(p, len(place)), reverse=True)
        buckets: list[list[nn.Parameter]] = []
        size = min(max(LEAST_BYTES, sum(map(_num_bytes, backwards)) // BUCKETS), BUCKET_BYTES)
        room = 0
        for p in backwards:
            if room <= 0:
                buckets.append([])
                room = size
            buckets[-1].append(p)
            room -= _num_bytes(p)
        self._layouts[key] = buckets
        return buckets

    def state(self) -> State:
        return State(flight=self._gradients.residuals)

    def load_state(self, state: State) -> None:
        self._gradients.residuals = dict(state.flight)


def _num_bytes(p: nn.Parameter) -> int:
    """Count the bytes of a parameter's gradient in a message."""
    return p.numel() * max(p.element_size(), torch.float32.itemsize)


def _gradient(p: nn.Parameter) -> Tensor:
    """Return the gradient, or zeros if no sample of this replica used the parameter."""
    return torch.zeros_like(p) if p.grad is None else p.grad


AllReduce.program = AllReduced
