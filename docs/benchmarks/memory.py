"""The memory of a Llama of 201 million weights in two blocks: what is told, and what is measured.

    python docs/benchmarks/memory.py [--rows ddg] [--again] [--given-back] [--only-tell]

`hybrid show --memory` tells what each of two ranks needs; a run of ten steps on real ranks, each of
one thread, measures its peak. A step is on 64 tokens. Rows that are in the JSON are not measured
again without --again. With --given-back, large buffers return to the system as they are freed.
Rows of 8-bit moments need torchao or bitsandbytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measuring

HERE = Path(__file__).resolve().parent
SETTINGS = ("--data", "memory:few", "--batch-size", "2", "--set", "train.loss=model")
RUN = ("--epochs", "1", "--lr", "1e-4", "--set", "train.threads=1")
ADAMW = ("--set", "optimizer.name=adamw")
ROWS: dict[str, tuple[str, ...]] = {
    "ddg": ("--solver", "ddg", *ADAMW),
    "ddg, solver.recompute=true": ("--solver", "ddg", "--set", "solver.recompute=true", *ADAMW),
    "ddg, solver.stash=false": ("--solver", "ddg", "--set", "solver.stash=false", *ADAMW),
    "backprop": ("--solver", "backprop", *ADAMW),
    **{
        f"{solver}, {name}": ("--solver", solver, "--set", f"optimizer.name={name}")
        for solver in ("ddg", "backprop")
        for name in ("torchao.optim:AdamW8bit", "bitsandbytes.optim:AdamW8bit")
    },
}
"""The flags of each row."""


def few() -> tuple[Any, Any]:
    """Twenty texts of 32 tokens to train on, and one to test on."""
    import llama

    train, test = llama.texts()
    train.windows, test.windows = train.windows[:20], test.windows[:1]
    return train, test


def hybrid(words: Sequence[str], ranks: int, given_back: bool = False) -> str:
    """What a command prints."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = [str(HERE), str(HERE.parent / "examples"), os.environ.get("PYTHONPATH", "")]
        given = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": scratch}
        given |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
        if given_back:
            given["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
        start = ["mpirun", "--oversubscribe", "-n", str(ranks)] if ranks > 1 else []
        command = [*start, sys.executable, "-m", "hybrid", *words]
        done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


def tell(flags: Sequence[str]) -> list[dict[str, int]]:
    """The bytes of each block by purpose."""
    words = ("show", "llama:network", *SETTINGS, *flags, "--blocks", "2")
    answer = json.loads(hybrid([*words, "--memory", "24GB", "--json"], ranks=1))
    return list(answer["fit"]["blocks"])


def measure(flags: Sequence[str], given_back: bool) -> list[int]:
    """The resident peak of each rank, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("train", "--model", "llama:network", *SETTINGS, *RUN, *flags)
        hybrid([*words, "--out", f"{folder}/run"], 2, given_back)
        return list(json.loads(Path(folder, "run/summary.json").read_text())["peak_memory_bytes"])


def main(options: Namespace) -> None:
    raw, kind = measuring.Raw(__file__), "given_back" if options.given_back else "peaks"
    for name, flags in ROWS.items():
        library = name.partition(", ")[2].partition(".")[0]
        if options.rows not in name or ("8bit" in name and not find_spec(library)):
            continue
        if options.again or not raw.get(name, "told"):
            raw.keep(name, "told", value=tell(flags))
        if not options.only_tell and (options.again or not raw.get(name, kind)):
            raw.keep(name, kind, value=measure(flags, options.given_back))

    def gigabytes(sizes: Sequence[int]) -> str:
        return ", ".join(f"{size / 1e9:.2f}" for size in sizes)

    measuring.show(
        "method | told, GB | measured, ranks 0 and 1 | the same, large buffers given back",
        (
            (
                name,
                gigabytes([sum(block.values()) for block in row.get("told", ())]),
                *(gigabytes(row.get(key, ())) for key in ("peaks", "given_back")),
            )
            for name, row in raw.read().items()
        ),
    )


if __name__ == "__main__":
    flags = {"again": False, "given_back": False, "only_tell": False}
    main(measuring.options(__doc__, rows="", **flags))
