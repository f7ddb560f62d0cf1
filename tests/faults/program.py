"""The `hybrid` command with a fault inside, as HYBRID_FAULT describes it."""

from __future__ import annotations

import json
import os
import resource
import time
from typing import Any


def main() -> None:
    """Arm the fault and run the command."""
    fault = json.loads(os.environ.get("HYBRID_FAULT", "{}"))
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    if fault:
        {"clock": _clock, "late": _late, "poison": _poison, "limit": _limit}[fault["kind"]](
            fault, rank
        )
    from hybrid.__main__ import main

    main()


def _clock(fault: dict[str, Any], rank: int) -> None:
    """Let the wall clock of this rank jump."""
    if fault["rank"] not in (rank, None):
        return
    at, by = time.monotonic() + fault["after"], fault["by"]
    real, real_ns = time.time, time.time_ns

    def jumped() -> float:
        return by if time.monotonic() > at else 0.0

    time.time = lambda: real() + jumped()
    time.time_ns = lambda: real_ns() + int(jumped() * 1e9)


def _late(fault: dict[str, Any], rank: int) -> None:
    if fault["rank"] == rank:
        time.sleep(fault["seconds"])


def _limit(fault: dict[str, Any], rank: int) -> None:
    """No file may grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], fault["bytes"]))


def _poison(fault: dict[str, Any], rank: int) -> None:
    """Once, before the n-th rounds, make weights of one block not a number."""
    from hybrid.rounds.base import Rounds

    run = Rounds.run
    calls = 0

    def poisoned(self: Rounds, *arguments: Any) -> Any:
        nonlocal calls
        if self.exact.block.index == fault["rank"]:
            calls += 1
            if calls == fault["call"]:
                next(iter(self.exact.block.module.parameters())).data.fill_(float("nan"))
        return run(self, *arguments)

    Rounds.run = poisoned  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
