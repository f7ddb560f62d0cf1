"""CUDA graphs of a block's local steps, captured once for each shape and then replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor, nn

from hybrid.solvers.blocks.buffers import captured_buffers

Values = tuple[Tensor | None, ...]
Compute = Callable[..., Values]
WARM_UP = 3
"""Steps before a capture, which choose convolution algorithms and create lazy buffers."""


class Capture(Protocol):
    """A way to record computations."""

    def warm_up(self, compute: Callable[[], Values]) -> Values:
        """Compute once, in preparation of a recording."""

    def record(self, compute: Callable[[], Values]) -> tuple[Callable[[], None], Values]:
        """A function that computes again in the same memory, and the tensors of its results."""


_CAPTURING = Lock()
"""CUDA allows one capture at a time in a process, and blocks may share one."""


class CudaCapture:
    """CUDA graphs: a computation must neither wait for the GPU nor depend on values there."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, compute: Callable[[], Values]) -> Values:
        # on another stream: what autograd creates on the current one would not be captured
        aside = self._aside()
        with _CAPTURING:
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                results = compute()
            aside.synchronize()
        return results

    def record(self, compute: Callable[[], Values]) -> tuple[Callable[[], None], Values]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with _CAPTURING:
            try:
                with torch.cuda.graph(
                    graph, stream=self._aside(), capture_error_mode="thread_local"
                ):
                    results = compute()
            except BaseException:
                # a capture that fails leaves its own stream behind, and its memory pool
                torch.cuda.set_stream(current)
                self._failed.append(graph)
                raise

        def replay() -> None:
            with _CAPTURING:
                graph.replay()

        return replay, results

    def _aside(self) -> torch.cuda.Stream:
        # of high priority: those come from a pool of their own, so it is no block's stream
        self._stream = self._stream or torch.cuda.Stream(priority=-1)
        return self._stream


class StepGraphs:
    """Runs computations that leave gradients in a block's parameters, as graphs where it can.

    A computation's tensors may change from call to call, their shapes may not: each new set of
    shapes is computed `WARM_UP` times, captured, and from then on copied into the graph's memory
    and replayed. Results are copies; the gradients are the graph's own, valid until its next
    replay. If a capture fails, or a computation moves buffers of `module` that are no statistics,
    `reason` says why, and all is computed as without graphs.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        capture: Capture | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self._parameters, self._capture = parameters, capture or CudaCapture()
        self._module = module or nn.Identity()
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Callable[[Sequence[Tensor | None]], Values]] = {}
        self.reason = ""
        """Why there are no graphs; empty if there are."""

    def __call__(self, kind: Hashable, compute: Compute, *tensors: Tensor | None) -> Values:
        """compute(*tensors); calls of the same kind and shapes must compute the same."""
        if self.reason:
            return compute(*tensors)
        key = (kind, *(t if t is None else (t.dtype, t.shape, t.stride()) for t in tensors))
        if key not in self._graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= WARM_UP:
                with captured_buffers(self._module) as moved:
                    found = self._capture.warm_up(lambda: compute(*tensors))
                if moved:
                    self.reason = f"not captured: a replay would not move {', '.join(moved)}"
                return found
            try:
                self._graphs[key] = self._captured(compute, tensors)
            except (RuntimeError, ValueError) as error:  # the latter of a loss that failed
                self.reason = f"not captured: {' '.join(str(error).split())[:200]}"
                for parameter in self._parameters:
                    parameter.grad = None
                return compute(*tensors)
        return self._graphs[key](tensors)

    @property
    def count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def _captured(
        self, compute: Compute, tensors: Sequence[Tensor | None]
    ) -> Callable[[Sequence[Tensor | None]], Values]:
        """A function that replays the graph of `compute` on other tensors."""
        own = [None if t is None else t.detach().clone() for t in tensors]
        for parameter in self._parameters:
            parameter.grad = None
        again, results = self._capture.record(lambda: compute(*own))
        gradients = [parameter.grad for parameter in self._parameters]

        def replay(tensors: Sequence[Tensor | None]) -> Values:
            for mine, given in zip(own, tensors, strict=True):
                if mine is not None and given is not None:
                    mine.copy_(given)
            again()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            return tuple(None if r is None else r.detach().clone() for r in results)

        return replay
