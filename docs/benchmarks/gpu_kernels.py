"""The fused kernels against torch's separate ones and torch.compile's, and the memory's bandwidth.

    python docs/benchmarks/gpu_kernels.py [--megabytes 8,128] [--turns 30] [--out FILE]

Every variant does the same work on the same tensors, and they take turns; one that cannot be had
here (fused without CuPy, torch.compile without a compiler) is left out. A share of bandwidth is
what the work has to read and write, over what a plain copy moves in that time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from hybrid.solvers.kernels.launcher import choose, set_launcher
from hybrid.solvers.kernels.operations import couple, step, step_limit
from hybrid.solvers.layers.projection import Box

Work = Callable[[], Any]


def works(values: int, device: str) -> dict[str, tuple[Work, int]]:
    """Of tensors with so many float32 values: each kernel's work, and its bytes."""
    channels, side = 64, 16
    shape = (max(1, values // (channels * side * side)), channels, side, side)

    def tensor(dtype: torch.dtype = torch.float32, times: int = 1) -> Tensor:
        n, c, h, w = shape
        x = torch.randn(n, c, h * times, w * times, device=device, dtype=dtype)
        return x.contiguous(memory_format=torch.channels_last)

    x, lam, kappa, p = (tensor() for _ in range(4))
    x16, lam16, kappa16 = (tensor(torch.bfloat16) for _ in range(3))
    big = tensor(times=2)
    size = x.numel()
    filtered = partial(couple, big, lam, kappa, 0.1, 2, 128)
    return {
        "couple": (partial(couple, x, lam, kappa, 0.1, 1, 128), 16 * size),
        "couple, bfloat16": (partial(couple, x16, lam16, kappa16, 0.1, 1, 128), 8 * size),
        "couple, filter 2": (filtered, (16 + 8 + 16) * size),
        "step": (partial(step, lam, x, kappa, p, 0.1, 0.1, 0.1), 24 * size),
        "step, bfloat16": (partial(step, lam16, x16, kappa16, p, 0.1, 0.1, 0.1), 14 * size),
        "step into a box": (
            partial(step, lam, x, kappa, p, 0.1, 0.1, 0.1, constraint=Box(-1, 1)),
            24 * size,
        ),
        "limit": (partial(step_limit, lam, x, kappa, p, 0.1, 0.5), 24 * size),
    }


def milliseconds(work: Work, device: str) -> float:
    """Of one call's work on the device, without the time it takes to launch it."""
    if device == "cpu":
        from time import perf_counter

        start = perf_counter()
        work()
        return 1e3 * (perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(1 << 28, dtype=torch.uint8, device=device).zero_()  # nothing is left in the cache
    torch.cuda._sleep(2_000_000)  # and the work is in the queue before it starts
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def measure(megabytes: int, turns: int, device: str) -> list[dict[str, Any]]:
    """A row a kernel, for tensors of so many megabytes."""
    values = megabytes * 10**6 // 4
    source = torch.empty(values, device=device)
    target = torch.empty_like(source)
    copies = [milliseconds(lambda: target.copy_(source), device) for _ in range(turns)]
    bandwidth = 8 * values / median(copies[turns // 3 :]) / 1e6
    rows = []
    for name, (work, size) in works(values, device).items():
        torch._dynamo.reset()
        compiled = partial(torch.compile(work.func, dynamic=False), *work.args, **work.keywords)
        variants: dict[str, Work] = {"torch": work, "torch.compile": compiled}
        fused = set_launcher(None)
        if fused is not None:
            variants["fused"] = work
        try:
            compiled()
        except Exception as error:  # of the compiler, the driver or torch
            del variants["torch.compile"]
            print(f"left out: torch.compile of {name}: {' '.join(str(error).split())[:200]}")
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        for turn in range(turns + 3):
            for variant, run in variants.items():
                set_launcher(fused if variant == "fused" else None)
                spent = milliseconds(run, device)
                if turn >= 3:
                    times[variant].append(spent)
        set_launcher(fused)
        rows.append(
            {
                "kernel": name,
                "megabytes": megabytes,
                "bytes": size,
                "copy_gb_per_second": round(bandwidth, 1),
                "milliseconds": {v: summary(t) for v, t in times.items()},
                "share_of_bandwidth": {
                    v: round(size / median(t) / 1e6 / bandwidth, 3) for v, t in times.items()
                },
            }
        )
    return rows


def summary(times: list[float]) -> list[float]:
    """Median and quartiles."""
    low, middle, high = quantiles(times, n=4)
    return [round(middle, 4), round(low, 4), round(high, 4)]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds (quartiles), and the share of a copy's bandwidth."""
    lines = ["| kernel | MB a tensor | torch, ms | torch.compile, ms | fused, ms | fused, share |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            "{} ({}, {})".format(*row["milliseconds"][v]) if v in row["milliseconds"] else ""
            for v in ("torch", "torch.compile", "fused")
        ]
        share = row["share_of_bandwidth"].get("fused", "")
        lines.append(f"| {row['kernel']} | {row['megabytes']} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", default="8,128")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"gpu_kernels: torch {torch.__version__} sees no GPU: take --device cpu")
    who = choose("auto", options.device == "cuda")
    rows = []
    for size in options.megabytes.split(","):
        rows += measure(int(size), options.turns, options.device)
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, kernels by {who}\n\n{table(rows)}")
    if options.out is not None:
        options.out.write_text(json.dumps({"card": card, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
