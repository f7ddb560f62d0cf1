"""Where the local gradient of a part of a mini-batch points, beside the next exact gradient.

    python docs/benchmarks/fill_directions.py --data-dir ~/data

ResNet-8 in four blocks, 6,000 images of CIFAR-10, lr 0.25 after a first epoch of warm-up, plain
steps (m = 4). In the second epoch, at every second step: the augmented Lagrangian's local gradients
of the mini-batch before, of all 128 samples and of 32 or 96, the first or those of the largest
adjoints, against the exact gradient that they would be added to. Means over steps and seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from hybrid import data, split
from hybrid.data import Dataset
from hybrid.data.sampling import epoch_order
from hybrid.method.blocks import make_block
from hybrid.networks import models
from hybrid.rounds.windows import EpochSource
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import AugmentedLagrangian, Batch, Block
from hybrid.solvers.base import Setup, SubProblems
from hybrid.solvers.blocks.buffers import frozen_statistics
from hybrid.solvers.windows import PhaseStats, Record

BLOCKS, N, ROOMS, PARTS = 4, 128, (32, 96), 4
CPU = torch.device("cpu")
Rows = dict[str, dict[str, list[float]]]
"""Of a block and what it took: values at every measured step."""


def flat(block: Block) -> Tensor:
    """The gradient in the parameters, which is then forgotten."""
    gradients = [p.grad for p in block.module.parameters()]
    found = torch.cat([g.flatten() for g in gradients if g is not None])
    block.module.zero_grad()
    return found


def exact(blocks: list[Block], batch: Batch) -> list[Record]:
    """Leave the exact gradient in the parameters; what each block's cuts saw."""
    x, seen = batch.images(), []
    for block in blocks:
        x = torch.cat([block.module(part) for part in x.split(N // PARTS)])
        x.retain_grad()
        seen.append(x)
    nn.functional.cross_entropy(x, batch.labels()).backward()
    out = [t.detach() for t in seen]
    p = [t.grad * N for t in seen if t.grad is not None]
    rows, last = slice(0, N), len(blocks) - 1
    inside = [Record(rows, out[k - 1], p[k - 1], out[k], p[k]) for k in range(1, last)]
    return [
        Record(rows, out=out[0], p_out=p[0]),
        *inside,
        Record(rows, lam=out[last - 1], p_in=p[last - 1]),
    ]


def local(program: SubProblems, batch: Batch, places: Tensor) -> Tensor:
    with frozen_statistics(program.block.module):
        program.gradient(batch.part(places), places, False, PhaseStats())
    return flat(program.block)


def measure(found: Rows, program: SubProblems, old: Batch, record: Record, g: Tensor) -> None:
    """Add a step's values of one block; g is the exact gradient."""
    p = record.p_out if record.p_out is not None else record.p_in
    assert p is not None
    norms = p.flatten(1).norm(dim=1)
    order = norms.argsort(descending=True, stable=True)
    taken = {f"all {N}": torch.arange(N)}
    for n in ROOMS:
        taken[f"first {n}"], taken[f"largest {n}"] = torch.arange(n), order[:n].sort().values
    for name, places in taken.items():
        part = local(program, old, places) * (len(places) / N)
        values = {
            "cosine": float(part @ g / (part.norm() * g.norm())),
            "norm": float(part.norm() / g.norm()),
            "share": float(norms[places].square().sum() / norms.square().sum()),
        }
        row = found.setdefault(f"block {program.block.index}, {name}", {})
        for key, value in values.items():
            row.setdefault(key, []).append(value)


def train(found: Rows, known: Dataset, seed: int) -> None:
    torch.manual_seed(seed)
    sample = known.batch(torch.arange(4), seed, 0)
    cut = split(models.resnet(depth=8, classes=10), BLOCKS, sample=sample)
    blocks = [make_block(cut, k, OptimizerSettings(lr=0.25), CPU) for k in range(BLOCKS)]
    setup = Setup(tuple(cut.cut_shapes(sample)), N, 1, fills=True)
    programs = [AugmentedLagrangian().start(block, None, setup) for block in blocks]  # type: ignore[arg-type]
    steps, before = len(known) // N, None
    for step in range(2 * steps):
        epoch, i = divmod(step, steps)
        ids = epoch_order(seed, epoch, len(known))[i * N : (i + 1) * N]
        source = EpochSource(known, seed, epoch, True, CPU)
        batch = Batch(ids, 0.25 * min(1.0, (step + 1) / steps), source, step)
        records = exact(blocks, batch)
        for k, (block, program) in enumerate(zip(blocks, programs, strict=True)):
            assert isinstance(program, SubProblems)
            kept = [p.grad for p in block.module.parameters()]
            if epoch and i % 2 and before is not None:
                g = torch.cat([t.flatten() for t in kept if t is not None])
                block.module.zero_grad()
                measure(found, program, before[0], before[1][k], g)
            program.record(records[k])
            for p, gradient in zip(block.module.parameters(), kept, strict=True):
                p.grad = gradient
            block.step("exact", batch.learning_rate)
        before = batch, records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    known, _ = data.load("cifar10", options.data_dir, 6000)
    found: Rows = {}
    for seed in options.seeds:
        train(found, known, seed)
    means = {name: {key: mean(v) for key, v in row.items()} for name, row in found.items()}
    Path(__file__).with_suffix(".json").write_text(json.dumps(means, indent=1) + "\n")
    print("| | cosine | norm over the exact one's | share of squared adjoints |\n|---|---|---|---|")
    for name, row in means.items():
        print(f"| {name} | {row['cosine']:.3f} | {row['norm']:.2f} | {row['share']:.0%} |")


if __name__ == "__main__":
    main()
