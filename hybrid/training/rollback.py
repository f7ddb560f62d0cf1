"""What a run does when it diverges: it goes back to a checkpoint and takes smaller steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybrid.errors import AgreedError
from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.rounds.base import Rounds
from hybrid.rounds.report import DivergedError
from hybrid.solvers.blocks.block import Block
from hybrid.solvers.windows import Batch


def check_weights(block: Block, links: RankLinks, step: int) -> None:
    """Raise DivergedError on all ranks if weights of any are not finite.

    A loss is computed before its step, so the effect of the last step shows here first. Running
    statistics count; other buffers do not, because a causal mask is full of infinities.
    """
    norms = [m for m in block.module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    tensors = [*block.module.parameters(), *(b for norm in norms for b in norm.buffers())]
    finite = not tensors or bool(torch.stack([t.isfinite().all() for t in tensors]).all())
    if links.first_of(None if finite else True):
        raise DivergedError(f"the weights are not finite after step {step}")


def check_inputs(
    error: DivergedError, batches: Sequence[Batch], block: Block, links: RankLinks, samples: int
) -> None:
    """Raise AgreedError on all ranks if the inputs have nan, which smaller steps cannot repair.

    `samples` is N of the training data.
    """
    found: int | None = None
    for batch in batches if block.first else ():
        spoilt = batch.images().isnan().flatten(1).any(1)
        if spoilt.any():
            found = int(batch.ids[spoilt.nonzero()[0].cpu()]) % samples
            break
    found = links.first_of(found)
    if found is not None:
        raise AgreedError(
            f"{error}: the input of sample {found} has nan in it: correct it, or leave it out"
        )


def choose_checkpoint(
    found: Sequence[Path], rollbacks: Sequence[dict[str, Any]], kept_since: bool
) -> Path:
    """The checkpoint to go back to, of those found, which are sorted from the oldest.

    It is the newest one or, if none was written since the last roll-back, the one before that
    roll-back's.
    """
    if not kept_since:
        found = [f for f in found if int(f.name) < rollbacks[-1]["to"]] or found[:1]
    return found[-1]


def step_factors(rollbacks: int, local: bool) -> dict[str, float]:
    """Factors of the step sizes after this number of roll-backs.

    The first one halves local steps, if there are any; each later one halves all steps.
    """
    return {"local": 0.5**rollbacks, "exact": 0.5 ** max(rollbacks - local, 0)}


def write_remedy(
    error: DivergedError,
    method: Method,
    rounds: Rounds,
    peak: float,
    rollbacks: int,
    newest: Path | None,
    out: Path | None,
) -> str:
    """The error with its remedy; `peak` is the learning rate that the schedule starts from."""
    lower = f"lower --lr (now {peak:g})"
    if clipping := _clipping_settings(error.phase, method, rounds):
        lower += f" or set {' or '.join(clipping)}"
    if out is None:
        return f"{error}; {lower}"
    good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint"
    tried = f"{rollbacks} roll-backs did not help; " if rollbacks else ""
    return f"{error}; {tried}{good}; {lower}"


def _clipping_settings(phase: str, method: Method, rounds: Rounds) -> list[str]:
    own = ["solver.clip_norm"] if hasattr(method.solver, "clip_norm") else []
    if phase == "parallel" or method.solver.exact:
        return own
    return ["correction.clip_norm", *(own if rounds.local else [])]
