"""Which method trains which network: every method on every network of the zoo, for a moment.

    python docs/benchmarks/networks.py          writes docs/networks.md

Two blocks on threads, a few mini-batches: as by default and with waits filled, or in short windows.
"""

from __future__ import annotations

import sys
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from networks import BATCH, EPOCHS, ZOO, Network  # noqa: E402
from rows import TRAIN  # noqa: E402
from zoo_packages import package  # noqa: E402

from hybrid.solvers import registry  # noqa: E402

BLOCKS, WINDOW = 2, 2
WAITS = [(8, 0), (0, 8)]
"""Samples of local work of each block, where mini-batches so small leave time for none."""
PAGE = ROOT / "docs" / "networks.md"
HEAD = f"""---
hide: [toc]  # a wide table
---

# Networks

Any `nn.Module` is cut between the calls of its own forward
(`hybrid.split(model, K, sample=batch)`) and trained by `Trainer.fit`. Each network below was
trained by each method on {{blocks}} blocks for {{steps}} mini-batches of {BATCH} samples. A method
whose ranks can step where they would wait did so in a second training, on {WAITS[0][0]} samples in
every tick; a method with sub-problems in windows of {WINDOW}. "yes": every training ended, and the
loss of the test is finite. A number leads to the one line that says why not.

Made by `python docs/benchmarks/networks.py` with torch {{torch}}, torchvision {{torchvision}} and
timm {{timm}}; the networks are those of the tests (`tests/support/networks.py`), which compare
them with plain loops of torch bit for bit.

"""
DEFECT = "Defect"
"""What is no refusal of one line."""


def main() -> None:
    torch.set_num_threads(1)
    refused: list[str] = []
    lines = [["network", *(f"`{method}`" for method in registry.names())]]
    lines.append(["---"] * len(lines[0]))
    for name, network in ZOO.items():
        lines.append([name, *(cell(network, method, refused) for method in registry.names())])
        print("  ".join(lines[-1]), flush=True)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(
        fill(f"{number}. {line}", 119, subsequent_indent="   ")
        for number, line in enumerate(refused, 1)
    )
    head = HEAD.format(
        blocks=BLOCKS,
        steps=EPOCHS * (TRAIN // BATCH),
        torch=plain(torch.__version__),
        **{name: plain(package(name).__version__) for name in ("torchvision", "timm")},
    )
    PAGE.write_text(f"{head}{table}\n" + (f"\n{notes}\n" if notes else ""))
    sys.exit(any(line.startswith(DEFECT) for line in refused))


def cell(network: Network, method: str, refused: list[str]) -> str:
    """Whether a method trains a network, or the number of its refusal."""
    line = next(filter(None, (fault(network, method, way) for way in ways(method))), "")
    if not line:
        return "yes"
    if line not in refused:
        refused.append(line)
    return str(refused.index(line) + 1)


def fault(network: Network, method: str, way: dict[str, Any]) -> str:
    """The line that says why a method does not train a network; empty if it does."""
    solver = registry.solver_class(method)()
    try:
        summary = network.fit(network.trainer(BLOCKS, solver=solver, **way))
    except Exception as error:
        line, *more = str(error).splitlines() or [""]
        if more or not isinstance(error, ValueError):
            line = f"{DEFECT}: {type(error).__name__}: {line}"
        return line
    if not isfinite(summary["test_loss"]):
        return f"diverged with lr {network.rate}: the loss of the test is {summary['test_loss']}"
    return ""


def ways(method: str) -> list[dict[str, Any]]:
    """Settings of a trainer, for each way in which a method goes."""
    solver = registry.solver_class(method)
    if solver.alternates:
        return [{"window": WINDOW}]
    filled = {"fill": registry.DEFAULT_FILL, "waits": WAITS}
    return [{}, filled] if solver.waits else [{}]


def plain(version: str) -> str:
    return version.partition("+")[0]


if __name__ == "__main__":
    main()
