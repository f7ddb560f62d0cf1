"""What pipelines of blocks take, calculated from times of this machine: for filled_map.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from math import ceil
from time import thread_time
from typing import Any

import torch
from torch import Tensor

from hybrid.bench.plan.planner import Planner
from hybrid.links import LinkSpeed
from hybrid.networks.blocks import Blocks
from hybrid.solvers import DDG, Solver
from hybrid.solvers.engine.schedule import Kind, Span, flushed
from hybrid.solvers.local_work.budget import Pipeline
from hybrid.solvers.wire import Wire


class Timed:
    """What passes, messages and steps of a network in K blocks take, in seconds."""

    def __init__(self, planner: Planner, blocks: Blocks, m: int) -> None:
        self.blocks, self.m, self.n = blocks, m, ceil(planner.size / m)
        self.costs = planner.timed.costs(blocks, self.n)
        bundles = [blocks.units[start].bundle for start in blocks.starts[1:]]
        singles = planner.timed.inputs(blocks)[1:]
        self.shapes = [
            [tuple(x.shape[1:])] if bundle is None else bundle.large_shapes
            for bundle, x in zip(bundles, singles, strict=True)
        ]
        """Of the tensors that go over each cut."""
        kind = torch.optim.AdamW if planner.settings.optimizer.name == "adamw" else torch.optim.SGD
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.packing: dict[tuple[Any, ...], float] = {}
        self.steps = []
        for k in range(len(blocks)):
            weights = [p.detach().clone() for p in blocks.module(k).parameters()]
            for w in weights:
                w.grad = torch.ones_like(w)
            self.steps.append(_seconds(kind(weights, lr=1e-6, **more).step))

    def messages(self, form: str, network: LinkSpeed) -> tuple[list[float], ...]:
        """Of a micro-batch over every cut: the time up and down, and what an end packs."""
        wire = Wire(*form.split(" / "))
        up, down, packing = list[float](), list[float](), list[float]()
        for shapes in self.shapes:
            sizes = zip(*map(wire.sample_bytes, shapes), strict=True)
            for way, size in zip((up, down), map(sum, sizes), strict=True):
                way.append(network.seconds(int(self.n * size)))
            key = form, *shapes
            if key not in self.packing:
                crossing = [torch.randn(self.n, *shape) for shape in shapes]
                both_ends = sum(_seconds(partial(_pass_on, wire, x)) for x in crossing)
                self.packing[key] = both_ends / 2
            packing.append(self.packing[key])
        return up, down, packing

    def pipeline(self, solver: Solver, form: str, network: LinkSpeed) -> Pipeline:
        """The delayed pipeline; its steps count with the messages as work beside the passes."""
        K = len(self.costs)
        up, down, cuts = self.messages(form, network)
        beside = [
            step / self.m + sum(cuts[max(0, k - 1) : k + 1]) for k, step in enumerate(self.steps)
        ]
        alone = [(a + b) / 2 + network.latency_seconds for a, b in zip(up, down, strict=True)]
        delays = [solver.delay(k, K) for k in range(K)]
        return Pipeline(self.costs, delays, self.n, alone, [*map(max, up, down)], beside)

    def flushed(self, form: str, network: LinkSpeed) -> float:
        """Seconds of a mini-batch in a flushed pipeline."""
        p = self.pipeline(DDG(micro_batches=self.m), form, network)
        K, (f, b) = len(self.costs), p.passes()
        ways = self.messages(form, network)
        span = Span.of([self.m])
        orders = [
            deque(a for a in flushed(k, K, span) if a.kind is not Kind.STEP) for k in range(K)
        ]
        free = [0.0] * K
        above, below = ([dict[int, float]() for _ in range(K)] for _ in range(2))
        wires = [[0.0, 0.0] for _ in range(K)]
        while any(orders):
            for k, order in enumerate(orders):
                while order:
                    kind, i = order[0].kind, order[0].micro_batch
                    forward = kind is Kind.FORWARD
                    inbox = above[k] if forward else below[k]
                    if i not in inbox and (k > 0 if forward else k < K - 1):
                        break
                    order.popleft()
                    free[k] = max(free[k], inbox.get(i, 0.0)) + (f[k] if forward else b[k])
                    to = k + 1 if forward else k - 1
                    if 0 <= to < K:
                        cut, way = min(k, to), int(not forward)
                        wires[cut][way] = max(wires[cut][way], free[k]) + ways[way][cut]
                        box = above[to] if forward else below[to]
                        box[i] = wires[cut][way] + network.latency_seconds
        return max(free)


def _seconds(work: Callable[[], Any]) -> float:
    """The least of five."""
    times = []
    for _ in range(5):
        start = thread_time()
        work()
        times.append(thread_time() - start)
    return min(times)


def _pass_on(wire: Wire, x: Tensor) -> None:
    """What the two ends of a cut do: each packs one way and unpacks the other."""
    for codec in (wire.up, wire.down):
        message = codec.encode(x, (0,))
        codec.decode(message, x.dtype, (0,))
