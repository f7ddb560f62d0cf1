"""Which method trains which network: every method on every network of the zoo, for a moment.

    python docs/benchmarks/networks.py          writes docs/networks.md

Two blocks on threads, a few mini-batches; a window of 2 for the methods that need one.
"""

from __future__ import annotations

import sys
from math import isfinite
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from networks import BATCH, EPOCHS, ZOO, Network  # noqa: E402
from rows import TRAIN  # noqa: E402
from zoo_packages import package  # noqa: E402

from solvers import registry  # noqa: E402

BLOCKS, WINDOW = 2, 2
PAGE = ROOT / "docs" / "networks.md"
HEAD = f"""# Networks

Any `nn.Module` is cut along its graph (`hybrid.split(model, K, sample=batch)`) and trained by
`Trainer.fit`. Each network below was trained by each method, as it is by default, on {{blocks}}
blocks for {{steps}} mini-batches of {BATCH} samples, with a window of {WINDOW} where sub-problems
have one. "yes": it ended, and the loss of the test is finite. A number leads to the one line that
says why not.

Made by `python docs/benchmarks/networks.py` with torch {{torch}}, torchvision {{torchvision}} and
timm {{timm}}; the networks are those of the tests (`tests/support/networks.py`), which compare
them with plain loops of torch bit for bit.

"""
DEFECT = "Defect"
"""What is no refusal of one line."""


def main() -> None:
    torch.set_num_threads(1)
    refused: list[str] = []
    lines = [["network", *(f"`{method}`" for method in registry.OWN)]]
    lines.append(["---"] * len(lines[0]))
    for name, network in ZOO.items():
        lines.append([name, *(cell(network, method, refused) for method in registry.OWN)])
        print("  ".join(lines[-1]), flush=True)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"{number}. {line}" for number, line in enumerate(refused, 1))
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
    try:
        summary = network.fit(network.trainer(BLOCKS, **settings(method)))
        if isfinite(summary["test_loss"]):
            return "yes"
        line = f"{DEFECT}: the loss of the test is {summary['test_loss']}"
    except Exception as error:
        line, *more = str(error).splitlines() or [""]
        if more or not isinstance(error, ValueError):
            line = f"{DEFECT}: {type(error).__name__}: {line}"
    if line not in refused:
        refused.append(line)
    return str(refused.index(line) + 1)


def settings(method: str) -> dict[str, Any]:
    """Of a trainer."""
    solver = registry.solver_class(method)()
    return {"solver": solver, **({"window": WINDOW} if solver.alternates else {})}


def plain(version: str) -> str:
    return version.partition("+")[0]


if __name__ == "__main__":
    main()
