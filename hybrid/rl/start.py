"""Settings into a run on as many ranks as there are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybrid.links import RankLinks
from hybrid.ranks import launch, starting
from hybrid.ranks.grid import Grid
from hybrid.ranks.stopping import StopRequest, listening
from hybrid.rl.run import Run
from hybrid.rl.settings import RlConfig


def train(config: RlConfig, out: Path | None, resume: bool) -> dict[str, Any]:
    """Run it on MPI's ranks, else on threads; give the summary."""
    comm = launch.communicator()
    blocks = comm.size if comm is not None else config.rl.blocks or 1
    launch.keep_memory()
    torch.set_num_threads(config.rl.threads or launch.threads_per_rank(blocks))
    with listening() as stop:
        return starting.start(
            partial(_rank, config, out, resume, stop), Grid(blocks), config.links, None
        )


def _rank(
    config: RlConfig, out: Path | None, resume: bool, stop: StopRequest, links: RankLinks
) -> dict[str, Any]:
    return Run(config, links, out, resume, stop).train()
