"""What a run says of itself: a line at its start, a summary at its end."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import torch

from solvers.kernels.choice import memory_pools

if TYPE_CHECKING:
    from hybrid.training.run import Run


def title(run: Run) -> str:
    """Model, data, method and blocks on one line."""
    names = run.trainer.names
    cuts = f", cut before {' and '.join(run.blocks.cuts)}" if run.blocks.cuts else ""
    resumed = f"; resumed after step {run.step}" if run.trainer.resume else ""
    return (
        f"{names['model']} on {names['data']}: {names['solver']}, "
        f"{run.links.size} block{'s' if run.links.size > 1 else ''}{cuts}; "
        f"{torch.get_num_threads()} thread(s) a block on {run.block.device}{resumed}"
    )


def summary(run: Run) -> dict[str, Any]:
    """The contents of summary.json; every rank calls it."""
    peak = _peak_memory_bytes(run.block.device)
    blocked = run.writer.blocked_seconds if run.writer else 0.0
    device = run.block.device
    held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    mine = (run.totals, peak, blocked, held + memory_pools(), _graphs(run))
    everyone = run.links.all_gather(mine)
    totals = everyone[0][0]
    seconds = totals["serial_seconds"] + totals["parallel_seconds"]
    return {
        **run.trainer.names,
        "blocks": run.links.size,
        "cuts": run.blocks.cuts,
        "replicas": 1,
        "epochs": run.trainer.train.epochs,
        "seed": run.trainer.train.seed,
        "test_accuracy": run.test_accuracy,
        "train_seconds": seconds,
        "images_per_second": totals["images"] / seconds if seconds else 0.0,
        "serial_seconds": totals["serial_seconds"],
        "parallel_seconds": totals["parallel_seconds"],
        "idle_share": [
            totals["idle_seconds"] / seconds if seconds else 0.0 for totals, *_ in everyone
        ],
        "bytes_sent": [int(totals["bytes_sent"]) for totals, *_ in everyone],
        "peak_memory_bytes": [peak for _, peak, *_ in everyone],
        "gpu_memory_bytes": [held for _, _, _, held, _ in everyone],
        "kernels": run.trainer.kernels,
        "graphs": [graphs for *_, graphs in everyone],
        "residual": run.residual,
        "returns_to_serial": run.rounds.returns,
        "rollbacks": run.rollbacks,
        "checkpoint_seconds": [blocked for _, _, blocked, *_ in everyone],
    }


def _graphs(run: Run) -> str:
    """How many CUDA graphs a rank replays, or why it has none."""
    graphs = run.block.graphs
    if not run.trainer.train.graphs:
        return "off"
    if graphs is None:
        return "none: no GPU"
    return graphs.reason or str(graphs.count)


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
