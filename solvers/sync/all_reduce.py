"""All-reduce: every step uses the gradient of the whole mini-batch, summed over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import is_not
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybrid.solvers.acting import Needs
from hybrid.solvers.peers import Sync, statistics
from hybrid.solvers.state import State, entries
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.reduction import (
    BUCKET_BYTES,
    MessageFormat,
    Reduction,
    counted_on_device,
    left_over,
    packed,
    unpack,
    used_anywhere,
    views,
)

LEAST_BYTES, LEAST_BYTES_BY_ENGINE = 1 << 18, 1 << 20
"""Of gradients that travel together in the replicas' order and in the engine's, at least."""
BUCKETS = 16
"""That a block's gradients are divided into, where this makes them neither smaller than those nor
larger than `BUCKET_BYTES`: the first leave early, and the last have few to wait for."""

NOT_FLOAT16 = Needs(
    "train.precision is not 'float16', whose overflows would stay in the error feedback",
    lambda run: run.train.precision != "float16",
    "choose bfloat16",
)


@dataclass(frozen=True)
class AllReduce(Strategy):
    r"""Synchronous data parallelism. Before a step, on every replica:

        g <- sum_r g_r,   g_r = (n_r / N) times the mean gradient over the n_r samples of replica r

    in replica order, so that one rank which accumulates R micro-batches in that order has the same
    bits. Running statistics become sum_r (n_r / N) of the replicas' at the same moment: after every
    step all replicas are equal, weights, optimizers and statistics.

    Gradients travel in buckets, the last layers' first; in the last backward pass before a step a
    bucket leaves as soon as it is complete. It is copied once, into a vector that leaves; then the
    gradients are views of the sum. A parameter that a replica's samples did not use adds
    0 there; one that no replica has used has no gradient, and does not step.
    """

    name: ClassVar[str] = "all-reduce"
    exact: ClassVar[bool] = True

    messages: Annotated[MessageFormat, NOT_FLOAT16] = "float32"
    """Number format of gradients between replicas; bfloat16 and int8 use error feedback."""

    def copies(self, replicas: int) -> float:
        return left_over(self.messages, replicas)

    def lossless(self) -> AllReduce:
        return replace(self, messages="float32")


class AllReduced(Sync):
    """One rank's gradients and statistics, summed."""

    strategy: AllReduce

    def begin(self) -> None:
        self._gradients: dict[str, Reduction] = {}
        """By kind of step and number of bucket: each has errors of its own."""
        # too small to be worth rounding, and their errors would not average out
        self._statistics = Reduction(self.peers, order=self.strategy.order)
        self._aligned = self.strategy.messages == "float32"
        """Whether sums have the bits of one rank's: rounded ones keep their buckets as they are."""
        self._layouts: dict[str, tuple[list[nn.Parameter], list[list[nn.Parameter]]]] = {}
        """By kind of step: what it moves, and that in buckets."""
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._arriving: Callable[[Tensor], None] | None = None
        """Told of every gradient that is complete, in the last pass before a step."""
        self._under_way: list[tuple[list[nn.Parameter], Callable[[], Tensor]]] = []
        self._begun = 0
        """Buckets of the coming step that have left."""

    @contextmanager
    def last_pass(self, kind: str) -> Iterator[None]:
        buckets = self._buckets(kind)
        missing = [set(bucket) for bucket in buckets]
        of = {p: i for i, bucket in enumerate(buckets) for p in bucket}

        def arrived(p: Tensor) -> None:
            if p not in of:
                return
            missing[of[p]].discard(p)  # type: ignore[index]
            # in the same order on all replicas
            while self._begun < len(buckets) and not missing[self._begun]:
                self._send(kind, buckets[self._begun])

        self._arriving = arrived
        try:
            yield
        finally:
            self._arriving = None

    def before_step(self, kind: str, rate: float) -> bool:
        for bucket in self._buckets(kind)[self._begun :]:
            self._send(kind, bucket)
        moved = statistics(self.block.module) if kind != "auxiliary" else []
        waiting = [p for bucket, _ in self._under_way for p in bucket]
        used = [p.grad is not None for p in waiting]
        counts = counted_on_device(used, waiting)
        vector = packed([*(m * self.share for m in moved), counts])
        finish = self._statistics.start(vector) if len(vector) else lambda: vector
        sums = [end() for _, end in self._under_way]
        unpack(finish(), [*moved, counts])
        of = iter(used_anywhere(used, counts))
        for (bucket, _), total in zip(self._under_way, sums, strict=True):
            gradients = [_gradient(p) for p in bucket]
            for p, gradient in zip(bucket, views(total, gradients, self._aligned), strict=True):
                p.grad = gradient if next(of) else None
        self._under_way, self._begun = [], 0
        return True

    def total(self, own: Tensor) -> Tensor:
        return self._statistics.start(own)()

    def after_step(self, kind: str) -> None:
        self.compare()

    def release(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _send(self, kind: str, bucket: list[nn.Parameter]) -> None:
        """Begin the sum of a bucket's gradients."""
        name, self._begun = f"{kind} {self._begun}", self._begun + 1
        if name not in self._gradients:
            self._gradients[name] = self._reduction()
        vector = packed([_gradient(p) for p in bucket], self._aligned)
        self._under_way.append((bucket, self._gradients[name].start(vector)))

    def _reduction(self) -> Reduction:
        return Reduction(self.peers, self.strategy.messages, self.strategy.order)

    def _buckets(self, kind: str) -> list[list[nn.Parameter]]:
        """What a step moves, from the last layer on, in runs of enough bytes."""
        stepping = self.block.stepping(kind)
        known, buckets = self._layouts.get(kind, ([], []))
        if len(known) != len(stepping) or any(map(is_not, known, stepping)):
            buckets = self._laid_out(stepping)
            self._layouts[kind] = stepping, buckets
        return buckets

    def _laid_out(self, stepping: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Buckets of parameters, whose hooks tell of their gradients from now on."""
        place = {p: i for i, p in enumerate(self.block.module.parameters())}
        backwards = sorted(stepping, key=lambda p: place.get(p, len(place)), reverse=True)
        buckets: list[list[nn.Parameter]] = []
        least, room = self._least_bytes(backwards), 0
        for p in backwards:
            if room <= 0:
                buckets.append([])
                room = least
            buckets[-1].append(p)
            room -= _num_bytes(p)
            if p.requires_grad and p not in self._hooks:
                self._hooks[p] = p.register_post_accumulate_grad_hook(self._arrived)
        return buckets

    def _least_bytes(self, parameters: list[nn.Parameter]) -> int:
        """Of a bucket."""
        least = LEAST_BYTES_BY_ENGINE if self._statistics.by_engine else LEAST_BYTES
        if not self._aligned:
            return least
        return min(max(least, sum(map(_num_bytes, parameters)) // BUCKETS), BUCKET_BYTES)

    def _arrived(self, p: Tensor) -> None:
        if self._arriving is not None:
            self._arriving(p)

    def state(self) -> State:
        return State(
            flight={
                f"{name}/{of}": left
                for name, reduction in self._gradients.items()
                for of, left in reduction.state().items()
            }
        )

    def load_state(self, state: State) -> None:
        for name in {key.partition("/")[0] for key in state.flight}:
            self._gradients[name] = self._reduction()
            self._gradients[name].load_state(entries(state.flight, f"{name}/"))


def _num_bytes(p: nn.Parameter) -> int:
    """Of its gradient on its way."""
    return p.numel() * max(p.element_size(), torch.float32.itemsize)


def _gradient(p: nn.Parameter) -> Tensor:
    """Zeros where no sample of this replica has used the parameter."""
    return torch.zeros_like(p) if p.grad is None else p.grad


AllReduce.program = AllReduced
