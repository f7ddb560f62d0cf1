"""What a step's sum of gradients over R replicas costs: counted for any R, timed on real ranks.

    python docs/benchmarks/sums.py                       # counts, for R = 4, 8, 64, 256
    mpirun -n 2 python docs/benchmarks/sums.py           # seconds of a message, and of a sum by
                                                         # bucket size, in turns (or torchrun)
    mpirun -n 8 --mca pml_monitoring_enable 1 python docs/benchmarks/sums.py
                                                         # MiB that Open MPI sends of a bucket

Gradients are ResNet-50's for ImageNet, 25.6 million numbers in 161 tensors. "Replicas" is the order
of the replicas, in which every peer gets a message of its own; "engine" the links' own all-reduce.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid.links.base import RankLinks, Start, num_bytes
from hybrid.links.mpi import MpiLinks
from hybrid.ranks import launch
from hybrid.registries import LINKS
from hybrid.solvers.sync import all_reduce, reduction
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.reduction import Reduction

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
TURNS = 7
SMALL = 2**14
"""Bytes of a message whose time is that of sending it: 1 MiB over 64 peers."""
LONG = 2**20
OUT = Path(__file__).with_suffix(".json")


def resnet50() -> nn.Module:
    """Its weights alone: convolutions, BatchNorms and the last layer (He et al., 1512.03385)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, bias=False), nn.BatchNorm2d(64)]
    before = 64
    for width, count in STAGES:
        for i in range(count):
            shapes = [(before, width, 1), (width, width, 3), (width, 4 * width, 1)]
            if i == 0:
                shapes.append((before, 4 * width, 1))
            for a, b, side in shapes:
                layers += [nn.Conv2d(a, b, side, bias=False), nn.BatchNorm2d(b)]
            before = 4 * width
    return nn.Sequential(*layers, nn.Linear(before, 1000))


class CountingPeers:
    """Peers that give back what they get, and count what links would send for it."""

    def __init__(self, replicas: int) -> None:
        self.replica, self.replicas = 0, replicas
        self.messages = self.calls = self.bytes = 0

    def exchange(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        if expected and self.replicas > RankLinks.fewest_by_engine:
            self.calls += 1
        else:
            self.messages += self.replicas - 1
        self.bytes += sum(map(num_bytes, pieces)) - num_bytes(pieces[0])
        return lambda: list(expected or pieces)

    def sum(self, vector: Tensor) -> Callable[[], Tensor]:
        self.calls += 1
        self.bytes += 2 * num_bytes(vector) * (self.replicas - 1) // self.replicas
        return lambda: vector


def sizes(least: int, most: int) -> None:
    """Let buckets have so many bytes, and long ones be sent in parts of so many."""
    all_reduce.LEAST_BYTES = all_reduce.LEAST_BYTES_BY_ENGINE = all_reduce.BUCKET_BYTES = least
    reduction.BUCKET_BYTES = most


def step(module: nn.Module, peers: Any, order: Literal["auto", "replicas"] = "auto") -> None:
    """What the strategy does for one step on gradients that are all there."""
    parameters = list(module.parameters())
    block = SimpleNamespace(module=module, stepping=lambda kind: parameters)
    AllReduce(order=order).start(block, peers, 1 / peers.replicas).before_step("exact", 0.1)


class Copying(TorchDispatchMode):
    """Counts the bytes that copies write: joining, cloning, converting, writing back."""

    COPIES = ("aten::cat", "aten::copy_", "aten::clone", "aten::_to_copy", "aten::stack")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.name in self.COPIES:
            self.bytes += num_bytes(made)
        return made


def counted(module: nn.Module) -> list[dict[str, int]]:
    """Of a rank and step, before (a message for every peer) and now."""
    rows, own = [], (all_reduce.BUCKET_BYTES, reduction.BUCKET_BYTES)
    for R in (4, 8, 64, 256):
        before, now = CountingPeers(R), CountingPeers(R)
        before_fewest, RankLinks.fewest_by_engine = RankLinks.fewest_by_engine, R
        sizes(2**18, LONG)
        step(module, before, "replicas")
        sizes(*own)
        RankLinks.fewest_by_engine = before_fewest
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        with Copying() as copying:
            step(module, now)
        rows.append(
            {
                "replicas": R,
                "messages before": before.messages,
                "messages": now.messages,
                "calls of the engine": now.calls,
                "MB": round(now.bytes / 1e6),
                "MB copied": round(copying.bytes / 1e6),
            }
        )
    return rows


def timed(links: RankLinks, work: Callable[[], object]) -> float:
    links.everyone(None)
    start = perf_counter()
    work()
    return max(links.everyone(perf_counter() - start))


def measured(links: RankLinks) -> dict[str, Any]:
    """Seconds of one small message, of an empty call of the engine, and of a step by bucket."""
    R, module, peers = links.place.replicas, resnet50(), links.peers
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    pieces, tiny, count = [torch.zeros(SMALL // 4)] * R, torch.zeros(8), 100

    def messages() -> None:
        for end in [peers.exchange(pieces) for _ in range(count)]:
            end()

    def calls() -> None:
        for end in [peers.sum(tiny.clone()) for _ in range(count)]:
            assert end is not None
            end()

    def of_size(order: Literal["replicas", "engine"], kib: int) -> Callable[[], object]:
        """A step's sum, of buckets of that size; in replica order, long ones in parts of 1 MiB."""
        sizes(kib << 10, max(kib << 10, LONG * (order == "replicas")))
        block = SimpleNamespace(module=module, stepping=lambda kind: [*module.parameters()])
        sync = AllReduce(order=order).start(block, peers, 1 / R)  # type: ignore[arg-type]
        return lambda: sync.before_step("exact", 0.1)

    ways: list[tuple[Literal["replicas", "engine"], int]]
    ways = [*product(("replicas", "engine"), (64, 256, 1024, 4096, 16384))]
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(TURNS):
        found["message"].append(timed(links, messages) / count / (R - 1))
        found["call"].append(timed(links, calls) / count)
        for order, kib in ways:
            found[f"{order}, {kib} KiB"].append(timed(links, of_size(order, kib)))
    return {name: median(times) for name, times in found.items()}


def sent(links: MpiLinks, counted: Callable[[], int]) -> dict[str, list[float]]:
    """What every rank sends for the sum of a bucket of 1 MiB, in MiB, by Open MPI's own count."""
    peers, bucket = links.peers, torch.ones(1 << 18)

    def in_place() -> None:
        links._block.Iallreduce(links._mpi.IN_PLACE, [bucket.numpy(), links._mpi.FLOAT]).Wait()

    ways: dict[str, Callable[[], object]] = {
        "replicas": lambda: Reduction(peers).start(bucket)(),
        "engine": lambda: Reduction(peers, order="engine").start(bucket)(),
        "engine, in place": in_place,
    }
    found = {}
    for name, work in ways.items():
        before = counted()
        work()
        mine = counted() - before
        found[name] = [theirs / 2**20 for theirs in links.everyone(mine)]
    return found


def of_ranks(links: RankLinks) -> dict[str, Any]:
    """MiB where MPI counts its bytes, which takes time; else seconds."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.sent_bytes import sent_bytes

    counted = sent_bytes() if isinstance(links, MpiLinks) else None
    return measured(links) if counted is None else sent(links, counted)  # type: ignore[arg-type]


def main() -> None:
    comm = launch.communicator()
    body = json.loads(OUT.read_text()) if OUT.exists() else {}
    if comm is None:
        rows = body["counts"] = counted(resnet50())
        names = list(rows[0])
        print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
        for row in rows:
            print("| " + " | ".join(f"{row[name]:,}" for name in names) + " |")
    else:
        torch.set_num_threads(1)
        kind = launch.joined_by()
        found = LINKS[kind].start(of_ranks, Start.of(comm, comm.size))
        in_bytes = "engine, in place" in found
        name = f"{comm.size} ranks" + (", MiB sent of 1 MiB" if in_bytes else f" of {kind}")
        body[name] = found
        if comm.rank:
            sys.exit()
        for name, value in found.items():
            print(f"{name}: {value if in_bytes else f'{value * 1e6:.0f} us'}")
    OUT.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
