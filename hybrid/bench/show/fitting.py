"""Whether the blocks of a network fit into machines' memory, and what would make them smaller."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

from hybrid.bench.show.description import Description, table
from hybrid.data import Data
from hybrid.links.grid import GridPlace
from hybrid.method.make_method import make_method
from hybrid.method.memory import Memory, process_bytes
from hybrid.method.problem import Problem
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.networks.partition.balance import balance_starts
from hybrid.report.page import amount
from hybrid.settings import methods
from hybrid.settings.resolve import load
from hybrid.training import build

UNITS = {"GB": 10**9, "GiB": 2**30}
EIGHT_BITS = 0.52
"""The bytes of two moments in 8 bits, with a scale for 256 of them, over those of weights."""
Parts = Sequence[Mapping[str, int]]
"""For each block its bytes by purpose."""


def parse_memory(text: str) -> int:
    """Bytes of a machine's memory, such as 24GB (10^9 bytes each) or 16GiB (2^30)."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(GB|GiB)", text.strip())
    if match is None or not float(match[1]):
        raise ValueError(
            f"--memory is {text!r}, which is no size: write one such as 24GB (10^9 bytes each) or "
            "16GiB (2^30)"
        )
    return round(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class Fit:
    """What each block of a training needs, and what a machine has. `str()` is the text."""

    memory_bytes: int
    blocks: Parts
    fewest_blocks: int | None
    """The smallest number of blocks that fits; None: none does."""
    changes: Mapping[str, int]
    """By setting: the bytes that it takes from the block that needs most."""

    def __str__(self) -> str:
        size, fits = amount(self.memory_bytes), _largest(self.blocks) <= self.memory_bytes
        verdict = f"it {'fits' if fits else 'does not fit'} into {size} a machine"
        if self.fewest_blocks is None:
            fewest = "no number of blocks does"
        else:
            fewest = f"the smallest number of blocks that fits is {self.fewest_blocks}"
        names = [*self.blocks[0], "together"]
        rows = [[*parts.values(), sum(parts.values())] for parts in self.blocks]
        cells = [[f"block {k}", *map(amount, row)] for k, row in enumerate(rows)]
        lines = [f"{verdict}; {fewest}", *table([["", *names], *cells], "<" + ">" * len(names))]
        lines += ["", "what the largest block would save:"] * bool(self.changes)
        return "\n".join([*lines, *(f"  {x}: {amount(n)}" for x, n in self.changes.items())])


@torch.random.fork_rng(devices=[])
def find_fit(
    overrides: Mapping[str, Any], blocks: Blocks, data: Data, shown: Description, memory: int
) -> Fit:
    """Compare what blocks need with a machine's memory.

    `overrides` are the settings of `shown`, "section.key" -> value. ValueError for a method that
    cannot train these blocks.
    """
    estimate, process = Memory(), process_bytes(blocks.model)
    bundled = blocks.with_bundles(data.sample(SAMPLES)[0])
    shares, count = [unit.share for unit in shown.units], len(blocks)
    Values = Mapping[str, Any]

    def cost(block: int, start: int, end: int) -> float:
        return sum(shares[start:end])

    def needed(number: int, changes: Values) -> list[dict[str, int]]:
        starts = bundled.starts if number == count else balance_starts(len(shares), number, cost)
        options = build.build_options(load(None, {**overrides, **changes}))
        problem = Problem.of(options, replace(bundled, starts=starts), data)
        method = make_method(problem, options).of_replica(GridPlace(replicas=options.replicas))
        inputs = [problem.sample, *problem.blocks.cut_tensors(problem.sample)]
        with problem.blocks.mode(training=True):
            return [{**x, "process": process} for x in estimate.parts(method, inputs)]

    def largest(number: int, changes: Values) -> float:
        try:
            return _largest(needed(number, changes))
        except ValueError:  # the method has no such setting, or needs more blocks
            return inf

    asked = needed(count, {})
    several = 2 * (getattr(methods.solver(load(None, overrides)), "micro_batches", 0) or count)
    tries: dict[str, tuple[int, Values]] = {
        f"--blocks {min(count + 1, len(shares))}": (min(count + 1, len(shares)), {}),
        "--set solver.recompute=true": (count, {"solver.recompute": True}),
        "--set solver.stash=false": (count, {"solver.stash": False}),
        "--optimizer sgd": (count, {"optimizer.name": "sgd"}),
        f"--set solver.micro_batches={several}": (count, {"solver.micro_batches": several}),
    }
    saved = {name: _largest(asked) - largest(*change) for name, change in tries.items()}
    eight_bits = max(x["moments"] - EIGHT_BITS * x["gradients"] for x in asked)
    saved["--set optimizer.name=torchao.optim:AdamW8bit"] = eight_bits
    numbers = range(1, len(shares) + 1)
    fewest = next((n for n in numbers if largest(n, {}) <= memory), None)
    return Fit(memory, asked, fewest, {name: round(x) for name, x in saved.items() if x > 0})


def _largest(parts: Parts) -> int:
    return max(sum(each.values()) for each in parts)
