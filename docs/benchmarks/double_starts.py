"""Two runs started at once on one folder: exactly one goes on, with the bits of an undisturbed run.

    python docs/benchmarks/double_starts.py --each 10 --out docs/benchmarks/double_starts.json

By turns: both resume; one resumes, one starts anew; both resume, one with another learning rate;
both with --auto-resume, as job scripts do; the same in containers of their own, whose processes the
other cannot see.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
os.environ["PYTHONPATH"] = str(ROOT)

from hybrid.folder import checkpoint  # noqa: E402

COMMON = (
    *("--data", "digits", "--batch-size", "32", "--set", "train.threads=1"),
    *("--set", "schedule.name=constant", "--set", "schedule.warmup_epochs=0"),
    *("--set", "train.evaluate_every=1", "--set", "checkpoint.keep_last=0"),
)
EPOCHS = "8"
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "resume, resume": (("--resume",), ("--resume",)),
    "resume, new": (("--resume",), ()),
    "resume, resume --lr 0.3": (("--resume",), ("--resume", "--lr", "0.3")),
    "auto-resume, auto-resume": (("--auto-resume",), ("--auto-resume",)),
    "resume, resume, containers": (("--resume",), ("--resume",)),
}
HIDDEN = ("unshare", "--pid", "--fork", "--mount-proc", "--uts")


def train(out: Path, epochs: str, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "hybrid",
        "train",
        *COMMON,
        "--epochs",
        epochs,
        *words,
        "--out",
        str(out),
    ]


def digests(run: Path) -> dict[str, str]:
    newest = checkpoint.complete(run / "checkpoints")[-1]
    return {n: e["sha256"] for n, e in checkpoint.read_manifest(newest)["units"].items()}


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def started(kind: str, out: Path, random: Random) -> list[tuple[int, str]]:
    """Status and last line of both."""
    wrap = HIDDEN if "containers" in kind else ()
    jobs = []
    for words in KINDS[kind]:
        command = [*wrap, *train(out, EPOCHS, *words)]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(command, **piped))
        sleep(random.choice((0.0, 0.0, random.uniform(0, 1.5))))
    said = [(job.communicate(timeout=300), job.returncode) for job in jobs]
    return [(status, _last_word("\n".join(texts).splitlines())) for texts, status in said]


def _last_word(lines: list[str]) -> str:
    told = [x for x in lines if x.startswith("hybrid: error") or "stays as it is" in x]
    return (told or ["went on"])[-1]


def one(kind: str, number: int, first: Path, wanted: Path, folder: Path) -> dict[str, Any]:
    out = folder / f"run-{number}"
    shutil.copytree(first, out)
    ends = started(kind, out, Random(number))
    went_on = sum(status == 0 and "stays as it is" not in said for status, said in ends)
    changed = "--lr" in kind and ends[1][0] == 0  # the one with another rate was first
    same = changed or (digests(out) == digests(wanted) and steps(out) == steps(wanted))
    refused = [said for status, said in ends if status]
    shutil.rmtree(out)
    return {"kind": kind, "went on": went_on, "same bits": same, "refused": refused}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hybrid-twice-") as root:
        first, wanted = Path(root, "first"), Path(root, "undisturbed")
        for out, epochs in ((first, "1"), (wanted, EPOCHS)):
            words = train(out, epochs, "--blocks", "2")
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        for kind in (kind for kind in KINDS if asked.only in kind):
            for number in range(asked.each):
                done.append(one(kind, number, first, wanted, Path(root)))
                print(json.dumps(done[-1]), flush=True)
    for kind in KINDS:
        mine = [row for row in done if row["kind"] == kind]
        ends = Counter((row["went on"], row["same bits"]) for row in mine)
        print(f"{kind}: {dict(ends)}  (went on, same bits): times")
    if asked.out:
        asked.out.write_text(json.dumps(done, indent=1) + "\n")
    return int(any(row["went on"] != 1 or not row["same bits"] for row in done))


if __name__ == "__main__":
    sys.exit(main())
