"""CUDA graphs of a block's local steps: captured once a shape, replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

Values = tuple[Tensor | None, ...]
Compute = Callable[..., Values]
WARM_UP = 3
"""Steps before a capture: they choose the convolutions' algorithms and make lazy buffers."""


class Capture(Protocol):
    """How a computation is recorded."""

    def warm_up(self, compute: Callable[[], Values]) -> Values:
        """Compute, as preparation."""

    def record(self, compute: Callable[[], Values]) -> tuple[Callable[[], None], Values]:
        """What computes again, from and into the same memory; and where the results will be."""


class CudaCapture:
    """CUDA graphs. A computation must neither wait for the GPU nor depend on values there."""

    def warm_up(self, compute: Callable[[], Values]) -> Values:
        # aside: what autograd makes on the current stream would not be captured
        aside, current = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            results = compute()
        aside.synchronize()
        return results

    def record(self, compute: Callable[[], Values]) -> tuple[Callable[[], None], Values]:
        graph = torch.cuda.CUDAGraph()
        # blocks that share the process may call CUDA meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = compute()
        return graph.replay, results


class StepGraphs:
    """Runs computations that leave gradients in a block's parameters, as graphs where it can.

    A computation's tensors may change from call to call, their shapes may not: each new set of
    shapes is computed `WARM_UP` times, captured, and from then on copied into the graph's memory
    and replayed. Results are copies; the gradients are the graph's own, valid until its next
    replay. If a capture fails, `reason` says why, and all is computed as without graphs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], capture: Capture | None = None) -> None:
        self._parameters, self._capture = parameters, capture or CudaCapture()
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self.reason = ""
        """Why there are no graphs; empty if there are."""

    def __call__(self, kind: Hashable, compute: Compute, *tensors: Tensor | None) -> Values:
        """compute(*tensors); calls of one kind and the same shapes must compute the same."""
        if self.reason:
            return compute(*tensors)
        key = (kind, *(t if t is None else (t.dtype, t.shape, t.stride()) for t in tensors))
        if key not in self._graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= WARM_UP:
                return self._capture.warm_up(lambda: compute(*tensors))
            try:
                self._graphs[key] = _Graph(self._capture, self._parameters, compute, tensors)
            except RuntimeError as error:
                self.reason = f"not captured: {' '.join(str(error).split())[:200]}"
                for parameter in self._parameters:
                    parameter.grad = None
                return compute(*tensors)
        return self._graphs[key].replay(tensors)

    @property
    def count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)


class _Graph:
    def __init__(
        self,
        capture: Capture,
        parameters: Sequence[nn.Parameter],
        compute: Compute,
        tensors: Sequence[Tensor | None],
    ) -> None:
        self._parameters = parameters
        self._given = [None if t is None else t.detach().clone() for t in tensors]
        for parameter in parameters:
            parameter.grad = None
        self._again, self._results = capture.record(lambda: compute(*self._given))
        self._gradients = [parameter.grad for parameter in parameters]

    def replay(self, tensors: Sequence[Tensor | None]) -> Values:
        for mine, given in zip(self._given, tensors, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        self._again()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return tuple(None if r is None else r.detach().clone() for r in self._results)
