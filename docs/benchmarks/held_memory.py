"""What each block holds for backward passes, a column a solver, on one network.

    python docs/benchmarks/held_memory.py [--model revnet110] [--blocks 4] [--batch-size 32]

Counts, at every moment, the bytes of tensors that autograd holds for a backward pass (parameters
left out, shared memory once) and of inputs that wait in queues, and gives each block's peak.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import measuring
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybrid import data, split
from hybrid.links import RankLinks, run_threads
from hybrid.method.optimizers import make_optimizer, placed
from hybrid.networks import models
from hybrid.rounds.epoch_windows import EpochSource
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import DDG, FDG, Backprop, Batch, FeaturesReplay, Petra, Setup, Solver, Window
from hybrid.solvers.block import Block
from hybrid.solvers.engine import unstashed


class Kept:
    """Bytes held for backward passes on this thread."""

    def __init__(self, parameters: set[int]) -> None:
        self.parameters = parameters
        self.holders: Counter[int] = Counter()
        self.now = self.peak = self.queues = 0

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.parameters:
            return tensor
        return Holder(self, tensor, storage.data_ptr(), storage.nbytes())

    def unpack(self, packed: Any) -> Tensor:
        return packed.tensor if isinstance(packed, Holder) else packed


class Here(threading.local):
    """What this thread's passes are counted by."""

    kept: Kept | None = None


HERE = Here()


def counting_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
    """Hooks of a program's own, of which the innermost alone are called, that count here, too."""
    kept = HERE.kept
    if kept is None:
        return saved_tensors_hooks(pack, unpack)
    return saved_tensors_hooks(lambda t: (pack(t), kept.pack(t)), lambda both: unpack(both[0]))


class Holder:
    """One saved tensor; the last one of its memory gives it back."""

    def __init__(self, kept: Kept, tensor: Tensor, address: int, size: int) -> None:
        self.kept, self.tensor, self.address, self.size = kept, tensor, address, size
        kept.holders[address] += 1
        if kept.holders[address] == 1:
            kept.now += size
            kept.peak = max(kept.peak, kept.now + kept.queues)

    def __del__(self) -> None:
        self.kept.holders[self.address] -= 1
        if not self.kept.holders[self.address]:
            self.kept.now -= self.size


def peaks(solver: Solver, model: str, blocks_count: int, batch_size: int) -> list[int]:
    """Of every block, in bytes."""
    train, _ = data.load("synthetic")
    source = EpochSource(train, 0, 0, True, torch.device("cpu"))
    count = 2 * blocks_count + 2
    ids = torch.arange(count * batch_size).split(batch_size)
    batches = [Batch(i, 0.01, source) for i in ids]
    torch.manual_seed(0)
    blocks = split(models.build(model, 10, 3, 32), blocks_count, inside=False)
    shapes = blocks.cut_shapes(torch.zeros(1, 3, 32, 32))

    def peak(links: RankLinks) -> int:
        module = placed(blocks.module(links.rank), torch.device("cpu"))
        sgd = make_optimizer(module, OptimizerSettings())
        block = Block(
            module, links.rank, len(blocks), {"exact": sgd, "local": sgd}, torch.device("cpu")
        )
        setup = Setup(tuple(shapes), batch_size, correct_every=0)
        program = solver.start(block, links, setup)
        kept = Kept({p.untyped_storage().data_ptr() for p in block.module.parameters()})
        HERE.kept = kept
        with saved_tensors_hooks(kept.pack, kept.unpack):
            for batch in batches:
                program.train(Window([batch]))
                again = getattr(solver, "recompute", False)
                if again or isinstance(solver, (FeaturesReplay, Petra)):
                    # the graphs of the others hold what they keep
                    flights = [
                        t for f in program._flights.values() for t in (f.lam, *f.stash.values())
                    ]
                    kept.queues = sum(
                        t.numel() * t.element_size() for t in flights if t is not None
                    )
                    kept.peak = max(kept.peak, kept.now + kept.queues)
            program.drain()
        return kept.peak

    with patch.object(unstashed, "saved_tensors_hooks", counting_hooks):
        return run_threads(blocks_count, peak)


def main() -> None:
    options = measuring.options(__doc__, model="revnet110", blocks=4, batch_size=32)
    solvers: dict[str, Solver] = {"1F1B, m=8": Backprop(micro_batches=8), "fdg, m=1": FDG(1)}
    for kind in (DDG, FDG, FeaturesReplay, Petra):
        solvers[f"{kind.name}, m=8"] = kind(micro_batches=8)
    solvers["ddg, m=8, no stash"] = DDG(micro_batches=8, stash=False)
    size = (options.model, options.blocks, options.batch_size)
    bytes_held = {name: peaks(solver, *size) for name, solver in solvers.items()}
    measuring.Raw(__file__).write({**vars(options), "peak_bytes": bytes_held})
    rows = enumerate(zip(*bytes_held.values(), strict=True))
    measuring.show(
        " | ".join(["block", *bytes_held]),
        ((k, *(f"{held / 1e6:.1f} MB" for held in row)) for k, row in rows),
    )


if __name__ == "__main__":
    main()
