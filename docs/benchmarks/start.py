"""What a rank needs to start and to train a block: memory, processor time and modules.

    python docs/benchmarks/start.py [--before CHECKOUT] [--ranks 4]

Two networks under mpirun: one of 805 MB, 12 square layers of 4,096, and a ResNet-8. Both train two
steps, the first with and without a run folder, whose checkpoints hold copies. The bits are the
CRC-32 of all weights, and beside them stands that of one process. --before names a checkout of an
earlier version, measured in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parents[2]
WIDTH, LAYERS = 4096, 12
SQUARE = {"model.name": "start:network", "data.name": "start:data", "train.loss": "mse"}
SQUARE |= {"optimizer.lr": 1e-4, "train.batch_size": 4}
DIGITS = {"model.name": "resnet8", "data.limit": 64, "train.batch_size": 32}
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "805 MB": (SQUARE, False),
    "805 MB, with checkpoints": (SQUARE, True),
    "ResNet-8": (DIGITS, True),
}


def network() -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def data() -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    return (x, y), (x, y)


def train(row: str, folder: str) -> None:
    """On a rank: train two steps, and write what it took."""
    from hybrid.ranks import launch
    from hybrid.settings.resolve import load
    from hybrid.training import build

    settings, kept = ROWS[row]
    comm = launch.communicator()
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    always = {"solver.name": "backprop", "train.epochs": 1, "train.threads": 1}
    config = load(None, {**always, **settings, "split.blocks": size, "split.replicas": 1})
    loaded = build.load_rank_data(config)
    out = Path(folder, "run")
    if comm is not None and hasattr(build, "divide"):
        division = comm.bcast(build.divide(config, loaded[0]) if rank == 0 else None)
        trainer = build.build_trainer(config, loaded, out, False, division)
    else:
        trainer = build.build_trainer(config, loaded, out, False)
    if not kept:
        trainer.out = None
    trainer.fit(*loaded)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    units = trainer.blocks.units_of(rank)
    sums = {
        name: zlib.crc32(x.detach().contiguous().numpy().tobytes())
        for unit in units
        for name, x in unit.tensors().items()
    }
    found = {
        "peak_bytes": spent.ru_maxrss * 1024,
        "cpu_seconds": spent.ru_utime + spent.ru_stime,
        "modules": len(sys.modules),
        "crc32": sums,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def measured(row: str, ranks: int, checkout: Path) -> list[dict[str, Any]]:
    """What each rank took."""
    start = [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks), "--bind-to", "none"]
    with TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--row", row, "--folder", folder]
        place = os.environ | {"PYTHONPATH": f"{checkout}:{Path(__file__).parent}"}
        subprocess.run([*(start if ranks > 1 else []), *words], env=place, cwd=folder, check=True)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        train(options.row, options.folder)
        return
    ways = {} if options.before is None else {"before": options.before.resolve()}
    ways["now"] = HERE
    body: dict[str, Any] = {}
    print("| network | version | peak a rank, MB | CPU seconds | modules | bits of one process |")
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        alone = measured(row, 1, HERE)[0]["crc32"]
        for way, checkout in ways.items():
            found = measured(row, options.ranks, checkout)
            same = alone == {k: v for each in found for k, v in each.pop("crc32").items()}
            body[f"{row}, {way}"] = [{**each, "same_bits": same} for each in found]
            peaks, seconds, modules = (
                [each[key] for each in found] for key in ("peak_bytes", "cpu_seconds", "modules")
            )
            print(
                f"| {row} | {way} | {min(peaks) / 1e6:,.0f} to {max(peaks) / 1e6:,.0f} | "
                f"{min(seconds):.1f} to {max(seconds):.1f} | {max(modules):,} | "
                f"{'yes' if same else 'no'} |",
                flush=True,
            )
    Path(__file__).with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
