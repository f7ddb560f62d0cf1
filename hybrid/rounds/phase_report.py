"""What a phase did, from the shares of all ranks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from math import hypot, isfinite, sqrt
from typing import Any

import torch

from hybrid.errors import AgreedError
from hybrid.solvers.windows import PhaseStats

PHASES = ("serial", "parallel")


class DivergedError(AgreedError):
    """The loss is no longer a number; every rank knows. `phase` is where, empty for the weights."""

    def __init__(self, text: str, phase: str = "") -> None:
        super().__init__(text)
        self.phase = phase

    @classmethod
    def at(cls, steps: int, phase: str, first_step: int, epoch: int) -> "DivergedError":
        """The error for a loss; `steps` counts from the first step of the call."""
        what = "the loss" if phase == "serial" else "a sub-problem's loss"
        return cls(
            f"{what} is not finite at {phase} step {first_step + steps} (epoch {epoch + 1})", phase
        )


@dataclass
class PhaseReport:
    """One phase over some rounds; lists by rank or cut are complete on the first rank alone."""

    phase: str
    samples: int
    loss: float
    accuracy: float | None
    """None without a metric of that name."""
    seconds: float
    """The time of the slowest rank."""
    idle: list[float] = field(default_factory=list)
    """For each rank, the share of time in which it waited; only the first phase's report has it."""
    residual: list[float] = field(default_factory=list)
    """Relative primal residual ||lam_{k+1} - x_k|| / ||x_k|| at each cut."""
    primal: list[float] = field(default_factory=list)
    """||lam - x|| at each cut over the samples of the last sweep; empty without an exchange."""
    dual: list[float] = field(default_factory=list)
    """||rho (lam - old lam)||, rho = 2 beta, likewise."""
    notices: list[str] = field(default_factory=list)
    staleness: list[list[int]] = field(default_factory=list)
    """For each block, how many gradients were 0, 1, ... updates of the weights late."""
    learning_rate: float = 0.0
    """That of the phase's last step."""

    def brief(self) -> "PhaseReport":
        """The report without the lists that grow with the ranks, and without notices."""
        return replace(self, idle=[], residual=[], primal=[], dual=[], notices=[], staleness=[])

    def as_json(self) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        optional = ("idle", "primal", "dual", "notices", "staleness")
        return {k: v for k, v in asdict(self).items() if v or k not in optional}


def share_of_phase(stats: PhaseStats) -> dict[str, Any]:
    """What a rank reports to the others of its part in a phase."""
    losses = stats.per_step_losses()
    bad = next((i for i, loss in enumerate(losses) if not isfinite(loss)), -1)
    return {
        "samples": stats.samples,
        "loss": sum(losses) / len(losses) if losses else 0.0,
        "bad": bad,
        "correct": sum(torch.stack(stats.correct).tolist()) if stats.correct else None,
        "seconds": stats.watch.seconds(),
        "residual": stats.residual(),
        "norms": stats.residual_norms(),
        "notices": stats.notices,
        "staleness": [
            stats.staleness[late] for late in range(max(stats.staleness, default=-1) + 1)
        ],
    }


def merge_shares(phase: str, chains: list[list[dict[str, Any]]]) -> PhaseReport:
    """The report of a phase from the shares of all ranks, one list for each replica."""
    lasts = [ranks[-1] for ranks in chains]
    samples = sum(last["samples"] for last in lasts)
    correct = [last["correct"] for last in lasts if last["correct"] is not None]
    blocks = list(zip(*chains, strict=True))
    late = [
        [sum(n) for n in zip_longest(*(r["staleness"] for r in b), fillvalue=0)] for b in blocks
    ]
    norms = [block for block in blocks[1:] if block[0]["norms"] is not None]
    # root mean squares over the replicas
    residual = [hypot(*(r["residual"] for r in b)) / sqrt(len(b)) for b in blocks[:-1]]
    return PhaseReport(
        phase=phase,
        samples=samples,
        loss=sum(last["loss"] * (last["samples"] / max(1, samples)) for last in lasts),
        accuracy=sum(correct) / max(1, samples) if correct else None,
        seconds=max(rank["seconds"] for ranks in chains for rank in ranks),
        residual=residual if phase == "parallel" else [],
        primal=[hypot(*(rank["norms"][0] for rank in block)) for block in norms],
        dual=[hypot(*(rank["norms"][1] for rank in block)) for block in norms],
        notices=lasts[0]["notices"],
        staleness=late if any(late) else [],
    )


def find_divergence(everyone: Sequence[list[dict[str, Any]]]) -> tuple[int, str] | None:
    """The first step, and its phase, in which a rank's loss is not finite; None without any."""
    bad = [
        (rank[i]["bad"], phase)
        for i, phase in enumerate(PHASES)
        for rank in everyone
        if rank[i]["bad"] >= 0
    ]
    return min(bad, default=None)
