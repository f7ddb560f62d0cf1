"""What a run reports about itself: a line at its start, a summary at its end."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid.method.method import Method
from hybrid.solvers.kernels.choice import memory_pools
from hybrid.training.options import RunOptions


def describe_run(method: Method, options: RunOptions, resumed_after: int) -> str:
    """Model, data, method and blocks on one line."""
    names, blocks, device = options.names, method.problem.blocks, method.device
    count = len(blocks)
    cuts = f", cut before {' and '.join(blocks.cuts)}" if blocks.cuts else ""
    replicas = ""
    if options.replicas > 1:
        replicas = f"; {options.replicas} replicas, {options.sync.name}"
    resumed = f"; resumed after step {resumed_after}" if options.resume else ""
    once = "" if method.solver.repeatable else "; not reproducible: threads without an order"
    return (
        f"{names['model']} on {names['data']}: {names['solver']}, "
        f"{count} block{'s' if count > 1 else ''}{cuts}{replicas}; "
        f"{torch.get_num_threads()} thread(s) a block on {device}{once}{resumed}"
    )


def explain_ended_run(run: Path | None, epochs: int, stopped: str) -> str:
    """The message for a run that is resumed although it has ended."""
    ended = f"{run} has ended after {epochs} epochs"
    if stopped:
        return f"{ended} ({stopped}), and stays as it is: to train on, let it wait for more epochs"
    return f"{ended}, and stays as it is: to train on, give --epochs {epochs + 1} or more"


def share_of_rank(totals: dict[str, float], device: torch.device, blocked: float) -> dict[str, Any]:
    """What one rank adds to the summary; `blocked`: seconds that it waited for checkpoints."""
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return {
        "totals": totals,
        "peak_memory_bytes": _peak_memory_bytes(device),
        "gpu_memory_bytes": reserved + memory_pools(),
        "checkpoint_seconds": blocked,
    }


def make_summary(
    method: Method,
    options: RunOptions,
    everyone: Sequence[dict[str, Any]],
    results: Mapping[str, Any],
) -> dict[str, Any]:
    """The contents of summary.json, from every rank's share and the results of the run."""
    totals = everyone[0]["totals"]
    seconds = totals["serial_seconds"] + totals["parallel_seconds"]
    return {
        **options.names,
        "test_accuracy": results["tested"].get("accuracy"),
        "test_loss": results["tested"].get("loss"),
        "test_metrics": {k: v for k, v in results["tested"].items() if k != "loss"},
        "blocks": len(method.problem.blocks),
        "cuts": method.problem.blocks.cuts,
        "replicas": options.replicas,
        "sync": options.sync.name if options.replicas > 1 else "",
        "epochs": options.train.epochs,
        "seed": options.train.seed,
        "train_seconds": seconds,
        "images_per_second": totals["images"] / seconds if seconds else 0.0,
        "serial_seconds": totals["serial_seconds"],
        "parallel_seconds": totals["parallel_seconds"],
        "idle_share": [
            # the waits of a report count as idle time and its duration does not, which shows in
            # a short run
            min(1.0, rank["totals"]["idle_seconds"] / seconds) if seconds else 0.0
            for rank in everyone
        ],
        # within the serial phases
        "gap_steps": [int(rank["totals"]["gap_steps"]) for rank in everyone],
        "gap_seconds": [rank["totals"]["gap_seconds"] for rank in everyone],
        "bytes_sent": [int(rank["totals"]["bytes_sent"]) for rank in everyone],
        "delay": _delays(method),
        **{key: [rank[key] for rank in everyone] for key in everyone[0] if key != "totals"},
        **results,
    }


def _delays(method: Method) -> list[float]:
    """For every rank, the steps by which its own gradients are late."""
    solver, count, replicas = method.solver, method.setup.blocks, method.options.replicas
    micro_batches = solver.num_micro_batches(method.options.train.batch_size // replicas)
    own = [solver.delay(index, count) / micro_batches for index in range(count)]
    return own * replicas


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
