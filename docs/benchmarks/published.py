"""Predictions of published measurements: torchgpipe's ResNet-101 on 1 to 8 Tesla P40.

    python docs/benchmarks/published.py

The measurements are those of torchgpipe's benchmarks/resnet101-speed (version 0.0.5; batch sizes
and numbers of micro-batches as there; GPipe, recomputation for all micro-batches but the last). The
profile is the card's data sheet at 60 % of its peak of operations and 80 % of its bandwidth, chosen
before the first run and not fitted; the speed-ups hardly depend on them. Blocks are balanced by
predicted time, theirs by hand.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import measuring
import torch
from torch import Tensor, nn

from hybrid.bench.plan.device import Device, Roofline
from hybrid.networks.blocks import Blocks
from hybrid.networks.partition.balance import Machines
from hybrid.networks.partition.split import split
from hybrid.solvers.local_work.budget import Cost

PEAK_FLOPS, PEAK_BYTES, COMPUTES, MOVES = 11.76e12, 346e9, 0.6, 0.8
P40 = Device(
    memory_gb=24,
    roofline=Roofline(
        flops_per_second=COMPUTES * PEAK_FLOPS,
        bytes_per_second=MOVES * PEAK_BYTES,
        seconds_per_operation=5e-6,
    ),
)
PCIE = 10e9
"""Bytes a second of PCIe 3.0 x16 between two cards."""
MEASURED = {
    "baseline": (1, 118, 1, 95.862),
    "pipeline-1": (1, 220, 2, 81.796),
    "pipeline-2": (2, 25_000, 1667, 135.539),
    "pipeline-4": (4, 5632, 256, 265.958),
    "pipeline-8": (8, 5400, 150, 411.662),
}
"""Blocks, batch size, micro-batches, samples a second."""


class Bottleneck(nn.Module):
    """ResNet's residual block of three convolutions (He et al., 1512.03385, Fig. 5)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.branch = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        conv = nn.Conv2d(before, after, 1, stride, bias=False)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(conv, nn.BatchNorm2d(after))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


class Whole(nn.Sequential):
    """One unit."""


def resnet101() -> nn.Sequential:
    """Its residual blocks as units."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    units: list[tuple[str, nn.Module]] = [("stem", Whole(*stem, nn.MaxPool2d(3, 2, 1)))]
    before = 64
    for stage, (width, count) in enumerate([(64, 3), (128, 4), (256, 23), (512, 3)]):
        for i in range(count):
            stride = 2 if i == 0 and stage > 0 else 1
            units.append((f"layer{stage + 1}_{i}", Bottleneck(before, width, stride)))
            before = 4 * width
    head = Whole(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))
    return nn.Sequential(OrderedDict([*units, ("head", head)]))


def flushed_seconds(costs: list[Cost], size: float, m: int, transfers: list[float]) -> float:
    """Of a pass in which all forward passes come first, in m micro-batches of so many samples."""
    K = len(costs)
    ready, forward_ends = [0.0] * m, []
    for k, cost in enumerate(costs):
        now, leaves = 0.0, 0.0
        for i in range(m):
            now = max(now, ready[i]) + size * cost.forward
            now += size * cost.backward if k == K - 1 else 0.0
            leaves = ready[i] = max(now, leaves) + (size * transfers[k] if k < K - 1 else 0.0)
        forward_ends.append(now)
    for k in reversed(range(K - 1)):
        now, leaves = forward_ends[k], 0.0
        for i in range(m):
            leaves = max(ready[i], leaves) + size * transfers[k]
            now = ready[i] = max(now, leaves) + size * costs[k].backward
    return ready[-1]


def main() -> None:
    network, x = resnet101(), torch.randn(2, 3, 224, 224)
    whole = split(network, 1)
    sizes = {name: round(n / m) for name, (_, n, m, _) in MEASURED.items()}
    shapes, value = [], x
    with torch.no_grad():
        for module in network:
            value = module(value)
            shapes.append(value[0].numel() * 4)
    rows = []
    for name, (K, n, m, measured) in MEASURED.items():
        samples = x[:1].expand(sizes[name], -1, -1, -1)
        (each,) = P40.passes(whole.model, whole.units, [samples])
        again = (m - 1) / m if m > 1 else 0.0  # the share of micro-batches that go forward twice
        costs = [Cost(c.forward, c.backward + again * c.forward) for c in each]
        cut = partial(Blocks, whole.model, whole.units)
        starts = Machines([1.0] * K).starts([sum(cost) for cost in costs], cut)
        ends = [*starts[1:], len(costs)]
        blocks = [
            Cost(*(sum(way) for way in zip(*costs[a:b], strict=True)))
            for a, b in zip(starts, ends, strict=True)
        ]
        transfers = [shapes[end - 1] / PCIE for end in ends[:-1]]
        step = P40.step_seconds(list(network.parameters()))
        seconds = flushed_seconds(blocks, n / m, m, transfers) + step / K
        predicted = n / seconds
        rows.append({"row": name, "measured": measured, "predicted": round(predicted, 1)})
    first, lines = rows[0], []
    for row in rows:
        gain, expected = (row[k] / first[k] for k in ("measured", "predicted"))
        error = row["predicted"] / row["measured"] - 1
        cells = f"{row['measured']:.1f}", f"{row['predicted']:.1f}", f"{error:+.0%}"
        lines.append(
            (row["row"], *cells, f"{gain:.2f}", f"{expected:.2f}", f"{expected / gain - 1:+.0%}")
        )
    measuring.show(" | measured | predicted | error | speed-up measured | predicted | error", lines)
    measuring.Raw(__file__).write(rows)


if __name__ == "__main__":
    main()
