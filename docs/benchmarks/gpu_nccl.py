"""Whether two ranks have the same bits over NCCL, over host memory, and as threads of one process.

    python docs/benchmarks/gpu_nccl.py [--device cuda]

One epoch of each method of which messages differ, then the SHA-256 of the exported weights. Exit
status 1 if any differs. With `--device cpu` the ranks have no GPUs, and gloo carries all.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ROWS = {
    "backprop": ("--solver", "backprop", "--set", "solver.micro_batches=4"),
    "ddg": ("--solver", "ddg", "--set", "solver.micro_batches=4"),
    "two replicas": ("--solver", "backprop", "--replicas", "2"),
    "clipped": ("--solver", "backprop", "--set", "solver.clip_norm=0.1"),
}


def weights(folder: Path, name: str, words: tuple[str, ...], launcher: tuple[str, ...]) -> str:
    """The SHA-256 of what a training ends with."""
    run, file = folder / name, folder / f"{name}.safetensors"
    hybrid = [sys.executable, *launcher, "-m", "hybrid"]
    train = ["train", "--model", "resnet8", "--epochs", "1", *words, "--out", str(run)]
    subprocess.run([*hybrid, *train], check=True)
    export = [sys.executable, "-m", "hybrid", "export", str(run), str(file)]
    subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    carriers = ("nccl", "host") if device == "cuda" else ("host",)
    different = []
    with tempfile.TemporaryDirectory() as root:
        for row, words in ROWS.items():
            common = (*words, "--set", f"train.device={device}", "--set", "train.threads=1")
            alone = common if "--replicas" in words else (*common, "--blocks", "2")
            folder = Path(root, row)
            folder.mkdir()
            digests = {"threads": weights(folder, "threads", alone, ())}
            for carrier in carriers:
                carried = (*common, "--set", f"links.device={carrier}")
                digests[carrier] = weights(folder, carrier, carried, TORCHRUN)
            print(row, {name: digest[:12] for name, digest in digests.items()}, flush=True)
            different += [row] * (len(set(digests.values())) > 1)
    if different:
        sys.exit(f"gpu_nccl: the bits differ: {', '.join(different)}")


main()
