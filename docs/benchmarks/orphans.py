"""Runs with data workers that are killed: how many of their processes are there afterwards.

    python docs/benchmarks/orphans.py --each 20 --out docs/benchmarks/orphans.json

By turns: kill -9 of the process, of mpirun and of a rank, SIGABRT of the process and of a rank.
Each trains on a user's own data set, whose items two processes a rank make, and is struck as soon
as it has reported. Exit status 1 if any process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.__main__ import facts  # noqa: E402
from tests.faults.kinds import lines_of  # noqa: E402
from tests.faults.processes import Job  # noqa: E402
from tests.faults.training import Training  # noqa: E402

Victim = Callable[[Job], int]
KINDS: dict[str, tuple[str, signal.Signals, Victim]] = {
    "kill -9 of the process": ("threads", signal.SIGKILL, lambda job: job.pid),
    "SIGABRT of the process": ("threads", signal.SIGABRT, lambda job: job.pid),
    "kill -9 of mpirun": ("mpirun", signal.SIGKILL, lambda job: job.pid),
    "kill -9 of a rank": ("mpirun", signal.SIGKILL, lambda job: job.ranks()[-1]),
    "SIGABRT of a rank": ("mpirun", signal.SIGABRT, lambda job: job.ranks()[-1]),
}
LIMIT = 10.0
"""Seconds that processes have to end in."""


@dataclass
class Kill:
    """One of them."""

    kind: str
    before: int
    left: int
    seconds: float
    """Until no process was there, or the limit."""


def struck(kind: str, folder: Path) -> Kill | None:
    """None where the training had ended before."""
    launcher, number, victim = KINDS[kind]
    out = folder / "run"
    words = Training("serial", launcher, 2, workers=2).words(out)
    job = Job([*words, "--epochs", "200"], folder / "err", 2, launcher, fresh=True)
    job.await_ranks(60)
    end = monotonic() + 120
    while lines_of(out) < 1 and job.status() is None and monotonic() < end:
        sleep(0.02)
    if job.status() is not None or monotonic() > end:
        job.kill()
        return None
    before, start = len(job.left(0)), monotonic()
    os.kill(victim(job), number)
    job.wait(LIMIT)
    left = job.left(max(0.0, start + LIMIT - monotonic()))
    found = Kill(kind, before, len(left), round(monotonic() - start, 2))
    job.kill()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=20, help="kills of every kind")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    about, done = facts("python docs/benchmarks/orphans.py " + " ".join(sys.argv[1:])), []
    for _ in range(options.each):
        for kind in KINDS:
            with tempfile.TemporaryDirectory(prefix="hybrid-orphans-") as folder:
                found = struck(kind, Path(folder))
            if found is None:
                print(f"{kind}: the training ended too early", flush=True)
                continue
            done.append(found)
            print(f"{kind}: {found.before}, {found.left} left, {found.seconds} s", flush=True)
            if options.out:
                body = {**about, "kills": [asdict(one) for one in done]}
                options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(
        "| killed | kills | processes before | left after 10 s | seconds, max |\n"
        "|---|---|---|---|---|"
    )
    for kind in KINDS:
        mine = [one for one in done if one.kind == kind]
        if mine:
            before = f"{min(x.before for x in mine)} to {max(x.before for x in mine)}"
            left, seconds = sum(x.left for x in mine), max(x.seconds for x in mine)
            print(f"| {kind} | {len(mine)} | {before} | {left} | {seconds} |")
    return int(any(one.left for one in done))


if __name__ == "__main__":
    sys.exit(main())
