"""Which method trains which network: every method on every network of the zoo, for a moment.

    python docs/benchmarks/networks.py          writes docs/networks.md

Two blocks on threads, a few mini-batches: as by default and with local work, or in short windows.
"""

from __future__ import annotations

import re
import sys
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *map(str, ROOT.glob("tests/support/*"))]

from networks import BATCH, EPOCHS, ZOO, Network  # noqa: E402
from rows import TRAIN  # noqa: E402
from zoo_packages import package  # noqa: E402

from hybrid.solvers import registry  # noqa: E402

BLOCKS, WINDOW = 2, 2
BUDGETS = [(8, 0), (0, 8)]
"""Samples of local work of each block, where mini-batches so small leave time for none."""
PAGE = ROOT / "docs" / "networks.md"
HEAD = f"""# Networks

Each method trained each network below on {{blocks}} blocks, for {{steps}} mini-batches of {BATCH}
samples: methods with sub-problems in windows of {WINDOW}, and methods that can fill idle time a
second time, with {BUDGETS[0][0]} local samples in every tick. All but the exceptions ended with a
finite test loss.

Made by `python docs/benchmarks/networks.py` with torch {{torch}}, torchvision {{torchvision}} and
timm {{timm}}. The tests compare the same networks with plain loops of torch, bit for bit.

- **Networks:** {{networks}}
- **Methods:** {{methods}}

"""
DEFECT = "Defect"
"""What is no refusal of one line."""


def main() -> None:
    torch.set_num_threads(1)
    exceptions: list[tuple[str, str, str]] = []
    for name, network in ZOO.items():
        for method in registry.names():
            faults = (fault(network, method, way) for way in ways(method))
            if line := next(filter(None, faults), ""):
                exceptions.append((name, f"`{method}`", line))
                print("  ".join(exceptions[-1]), flush=True)
    PAGE.write_text(written(exceptions))
    sys.exit(any(line.startswith(DEFECT) for _, _, line in exceptions))


def written(exceptions: list[tuple[str, str, str]]) -> str:
    """The page: what was tried, and each network, method and reason that did not train."""
    head = HEAD.format(
        blocks=BLOCKS,
        steps=EPOCHS * (TRAIN // BATCH),
        torch=plain(torch.__version__),
        networks=", ".join(ZOO),
        methods=", ".join(f"`{method}`" for method in registry.names()),
        **{name: plain(package(name).__version__) for name in ("torchvision", "timm")},
    )
    lines = [("Network", "Method", "Why not"), ("---", "---", "---"), *exceptions]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = "\n".join(
        fill(line, 120, subsequent_indent="  " * (line[:1] == "-"), break_on_hyphens=False)
        for line in re.sub(r"(?<!\n)\n(?![\n-])", " ", head).split("\n")
    )
    return f"{text}{table}\n" if exceptions else text


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
    filled = {"fill": "augmented-lagrangian", "local_budget": BUDGETS}
    return [{}, filled] if solver.takes_local_work else [{}]


def plain(version: str) -> str:
    return version.partition("+")[0]


if __name__ == "__main__":
    main()
