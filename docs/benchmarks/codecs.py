"""What fewer bits at the cuts cost in accuracy: codecs of activations and of adjoints.

    python docs/benchmarks/codecs.py gpt resnet --data-dir ~/data [--seeds 0 1 2] [--rows "int4"]
    python docs/benchmarks/codecs.py seconds
    python docs/benchmarks/codecs.py --only-collect

    gpt        gpt-8-64 on 6.1 MB of Python's library, 375 steps of 32 texts of 128 bytes, Muon
    longer     the same, 1,500 steps
    resnet     ResNet-14, 10,000 images of CIFAR-10, 4 epochs, mini-batches of 128, SGD
    seconds    CPU time of a message of 1 MB
    trained    trained networks of to_the_end.py, whose activations are rounded at seven cuts

Mini-batches in 8 micro-batches, those of texts by `backprop` in 2, which gives the same but for
rounding. A row is method, blocks, codec up / codec down. Candidates that codec_candidates.py adds
to the package's codecs: int5, int2, `feedback-2`, `feedback-4` (int2, int4 with error feedback),
`nearest-4`, `range-2` (adjoints to the nearest level, a range by moments), and `low-rank:r` (a
basis that follows the data, whose r coefficients travel as int8). "C/2" is a learned bottleneck at
every cut, of half the channels. Trainings that are in codecs.json are not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import log
from pathlib import Path
from statistics import mean, quantiles
from time import process_time
from typing import Any

import measuring
import to_the_end
import torch
from codec_candidates import FEWER, with_bottlenecks
from filled_waits import OPTIMIZERS
from safetensors.torch import load_file
from torch import Tensor, nn

from hybrid import Trainer, data, split
from hybrid.networks import models
from hybrid.networks.blocks import Blocks
from hybrid.networks.units import units as units_of
from hybrid.solvers import DDG, Backprop
from hybrid.solvers.codecs.base import Codec
from hybrid.solvers.registry import CODECS
from hybrid.solvers.wire import codec

RAW = measuring.Raw(__file__)
M = 8
METHODS = {"backprop": Backprop, "ddg": DDG}


@dataclass(frozen=True)
class Row:
    """One training."""

    up: str = "float32"
    down: str = "float32"
    method: str = "backprop"
    blocks: int = 8
    share: int = 0
    """C / share channels cross, by a learned bottleneck at every cut; 0: there is none."""

    def __str__(self) -> str:
        learned = f", C/{self.share}" if self.share else ""
        return f"{self.method}, K={self.blocks}{learned}, {self.up} / {self.down}"


def screen() -> Iterator[Row]:
    """Everything, exactly and on eight blocks; then what is left, of both methods."""
    pairs = (
        *("float32 / float32", "int8 / int8", "int8 / int4", "int8 / stochastic-4"),
        *("int8 / nearest-4", "int8 / int3", "int8 / stochastic-3", "int8 / int2"),
        *("int8 / feedback-2", "int6 / int4", "int6:128 / int4:128", "int5 / int4"),
        *("int4 / int4", "int4 / stochastic-4"),
        *("int6 / int3", "int4 / int3", "int3 / int3", "int2 / int2", "range-2 / int4"),
        *("int4 / range-2", "low-rank:16 / int4"),
    )
    for pair in pairs:
        up, down = pair.split(" / ")
        yield Row(up, down)
    for share, up, down in ((4, "int8", "int8"), (2, "int4", "int4"), (2, "int8", "int8")):
        yield Row(up, down, share=share)
    for method, blocks in (("ddg", 8), ("ddg", 4), ("backprop", 4)):
        for pair in ("float32 / float32", "int8 / int8", "int8 / int4", "int6 / int4", *FEWER):
            up, down = pair.split(" / ")
            yield Row(up, down, method, blocks)


def seconds() -> None:
    """Microseconds to encode and to decode a micro-batch of 16 x 16 x 32 x 32 numbers, 1 MB."""
    x = torch.randn(16, 16, 32, 32, generator=torch.Generator().manual_seed(0))
    x = x.relu().contiguous(memory_format=torch.channels_last)
    works, rows = {}, list[tuple[object, ...]]()
    names = CODECS.places
    for text, adjoint in product(names, (False, True)):
        each = codec(text, adjoint)
        message = each.encode(x, (0,))
        works[f"{text}, {adjoint}, encode"] = partial(each.encode, x, (0,))
        works[f"{text}, {adjoint}, decode"] = partial(each.decode, message, x.dtype, (0,))
    for name, taken in measuring.in_turns(works, 60).items():
        low, middle, high = quantiles([1e6 * each for each in taken], n=4)
        RAW.keep("microseconds", name, value=[round(x) for x in (low, middle, high)])
        rows.append((name, f"{middle:.0f} ({low:.0f}-{high:.0f})"))
    measuring.show("codec, of adjoints, way | microseconds (quartiles)", rows)


def weights(network: nn.Module, folder: Path) -> nn.Module:
    """A network with the weights of a run's newest checkpoint."""
    files = max((folder / "checkpoints").iterdir()).glob("*.safetensors")
    tensors = {name: x for file in files for name, x in load_file(file).items()}
    network.load_state_dict({name: tensors[name] for name in network.state_dict()})
    return network.eval()


class Projected:
    """x -> m + B B^T (x - m) with the principal components B of the first x of each cut."""

    def __init__(self, share: float) -> None:
        self.share, self.bases = share, dict[int, tuple[Tensor, Tensor]]()

    def __call__(self, cut: int, x: Tensor) -> Tensor:
        rows = x.movedim(1, -1) if x.dim() > 3 else x
        if cut not in self.bases:
            X = rows.flatten(0, -2)
            *_, V = torch.linalg.svd(X - X.mean(0), full_matrices=False)
            self.bases[cut] = X.mean(0), V[: int(self.share * X.shape[1])]
        center, B = self.bases[cut]
        rows = (rows - center) @ B.T @ B + center
        return rows.movedim(-1, 1) if x.dim() > 3 else rows


@torch.no_grad()
def trained(options: Any) -> None:
    """Held-out bits a byte and test accuracy where activations are rounded at seven cuts."""
    runs = options.trained
    text, held_out = data.load_text(to_the_end.corpus(options.runs), to_the_end.LENGTH)
    images, test = data.load("cifar10", options.data_dir)
    cases = {
        "gpt-8-64": (models.gpt(8, 64, 256, to_the_end.LENGTH), text, held_out, "gpt/Muon_flushed"),
        "resnet20": (models.resnet(20), images, test, "resnet20/flushed_Muon"),
    }
    rows = list[tuple[object, ...]]()
    for name, (network, samples, others, folder) in cases.items():
        weights(network, runs / f"{folder}_seed-{options.seeds[0]}")
        units = units_of(network)[1:8]
        first = samples.batch(torch.arange(0, len(samples), len(samples) // 200), 0, 0, False)
        for title in ("float32", "int8", "int6", "int5", "int4", "int3", "int2", 0.75, 0.5, 0.25):
            change: Any = Projected(title) if isinstance(title, float) else codec(title)
            through = change if callable(change) else partial(across, change)
            hooks = [
                [*unit.parts.values()][-1].register_forward_hook(
                    lambda module, inputs, out, k=k, through=through: through(k, out)
                )
                for k, unit in enumerate(units)
            ]
            network(first)  # the principal components
            ids = torch.arange(1_000 if name == "resnet20" else 64)
            out, right = network(others.batch(ids, 0, 0, False)), others.targets(ids)
            for hook in hooks:
                hook.remove()
            loss = float(nn.functional.cross_entropy(out, right)) / log(2)
            reached = (
                loss if name != "resnet20" else 100 * float((out.argmax(1) == right).float().mean())
            )
            RAW.keep("trained", name, str(title), value=reached)
            rows.append((name, title, round(reached, 3)))
    measuring.show("network | activations | bits a byte, accuracy in %", rows)


def across(each: Codec, cut: int, x: Tensor) -> Tensor:
    """What arrives."""
    return each.decode(each.encode(x, (cut,)), x.dtype, (cut,))


TABLES = {"gpt": screen, "longer": screen, "resnet": screen}


def network(table: str, row: Row, seed: int, sample: Tensor) -> Blocks:
    """The network of a table in blocks."""
    torch.manual_seed(seed)
    if table == "resnet":
        blocks = split(models.build("resnet14", 10, 3, 32), row.blocks)
    else:
        blocks = split(models.gpt(8, 64, 256, to_the_end.LENGTH), row.blocks)
    return with_bottlenecks(blocks, row.share, sample) if row.share else blocks


def train(table: str, row: Row, seed: int, options: Any) -> dict[str, float]:
    """What a training reaches, and the bytes of a sample over all cuts, both ways."""
    is_text = table != "resnet"
    if is_text:
        text = to_the_end.Row(1, Backprop(), to_the_end.of_text("muon", 0.02), windows=1)
        windows = to_the_end.WINDOWS // (1 if table == "longer" else 4)
        text = replace(text, windows=windows)
        samples, test = to_the_end.samples(text, options.data_dir, options.runs)
        optimizer, schedule, epochs, size = text.optimizer, {"warmup_epochs": 0.1}, 1, 32
    else:
        samples, test = data.load("cifar10", options.data_dir, 10_000)
        test = test.take(5_000)
        optimizer, epochs, size = OPTIMIZERS["SGD"], 4, 128
        schedule = {"name": "linear", "warmup_epochs": 0.4}
    sample = samples.batch(torch.arange(64), seed, 0)
    blocks = network(table, row, seed, sample)
    parts = 2 if is_text and row.method == "backprop" else M
    solver = METHODS[row.method](micro_batches=parts, messages=row.up, adjoints=row.down)
    begun = process_time()
    settings = {"epochs": epochs, "batch_size": size, "report_every": 16, "verify": "never"}
    summary = Trainer(
        *(blocks, solver),
        train={"threads": 1, "seed": seed, **settings},
        links={"kind": "virtual"},
        optimizer=optimizer,
        schedule=schedule,
        quiet=True,
    ).fit(samples, test)
    shapes = blocks.cut_shapes(sample[:1])
    ways = codec(row.up), codec(row.down, adjoint=True)
    return {
        "bits_per_byte" if is_text else "accuracy": (
            summary["test_bits_per_byte"] if is_text else 100 * summary["test_accuracy"]
        ),
        "sample_bytes": sum(each.sample_bytes(shape) for each in ways for shape in shapes),
        "seconds": process_time() - begun,
    }


def main() -> None:
    flags = {**measuring.GRID, "seeds": [0], "tables": {**TABLES, "seconds": 0, "trained": 0}}
    folders = {"runs": Path("runs/codecs"), "trained": Path("runs/to-the-end")}
    options = measuring.options(__doc__, **folders, **flags)
    torch.set_num_threads(1)
    for table in () if options.only_collect else options.tables:
        if table not in TABLES:
            seconds() if table == "seconds" else trained(options)
            continue
        for seed in options.seeds:
            rows = ((str(row), row) for row in TABLES[table]())
            for name, row in measuring.chosen(rows, options):
                if not RAW.get(table, name, str(seed)):
                    value = train(table, row, seed, options)
                    RAW.keep(table, name, str(seed), value=value)
                    print(table, name, value, flush=True)
    for table in TABLES:
        rows = RAW.get(table).items()
        of_floats = max((s["sample_bytes"] for _, seeds in rows for s in seeds.values()), default=1)
        measuring.show(
            f"{table} | fewer bytes | result | CPU seconds",
            ((name, *summed(seeds, of_floats)) for name, seeds in rows),
        )


def summed(seeds: dict[str, dict[str, float]], of_floats: float) -> tuple[str, str, str]:
    """Times fewer bytes than float32, what is reached and CPU seconds, over the seeds."""
    each = [*seeds.values()]
    reached = [s.get("bits_per_byte", s.get("accuracy", 0.0)) for s in each]
    digits = ".3f" if "bits_per_byte" in each[0] else ".1f"
    seconds = mean(s["seconds"] for s in each)
    fewer = of_floats / each[0]["sample_bytes"]
    return f"{fewer:.1f}", measuring.spread(reached, digits), f"{seconds:.0f}"


if __name__ == "__main__":
    main()
