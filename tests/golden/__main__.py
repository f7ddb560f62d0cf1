"""Golden runs: the SHA-256 of the exported weights of every way to train, one JSON object.

    python -m tests.golden --out tests/golden/hashes.json      record them
    python -m tests.golden --check tests/golden/hashes.json    compare; exit 1 where any differs

A row is recipe, blocks, links (threads, mpirun, virtual) and whether the run was resumed in
mid-epoch. The bits depend on the machine and on torch: compare before and after a change, in one
place. `--only` takes a part of a row's name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

RECIPES = {
    "backprop": "--solver backprop",
    "backprop, m=4": "--solver backprop --set solver.micro_batches=4 --set solver.clip_norm=1.0",
    "backprop, recompute": "--solver backprop --set solver.recompute=true",
    "backprop, int8": "--solver backprop --set solver.messages=int8",
    "backprop, adamw": "--solver backprop --set optimiser.name=adamw --lr 0.002",
    "backprop, bfloat16": "--solver backprop --precision bfloat16",
    "backprop, float16": "--solver backprop --precision float16",
    "penalty, gaps": "--solver penalty",
    "penalty, window": "--solver penalty --window 4 --sweeps 1",
    "penalty, own sgd": "--solver penalty --window 4 --sweeps 2 --set solver.momentum=0.5",
    "augmented-lagrangian, gaps": "--solver augmented-lagrangian",
    "augmented-lagrangian, own gaps": "--solver augmented-lagrangian --set rounds.fill=true"
    " --set rounds.fill_step=own --set correction.micro_batches=4",
    "augmented-lagrangian, window": "--solver augmented-lagrangian --window 4 --sweeps 1",
    "augmented-lagrangian, sweeps": "--solver augmented-lagrangian --window 4 --sweeps 3"
    " --set solver.clip_norm=0.5 --set solver.return_ratio=9",
    "augmented-lagrangian, filter": "--solver augmented-lagrangian --window 2 --sweeps 2"
    " --set solver.filter=2 --set solver.storage=bfloat16",
    "augmented-lagrangian, all": "--solver augmented-lagrangian --window all --sweeps 2",
    "augmented-lagrangian, float16": "--solver augmented-lagrangian --window 4 --sweeps 2"
    " --precision float16",
    "block-admm": "--solver block-admm --window 4 --sweeps 1",
    "block-admm, kept": "--solver block-admm --window all --sweeps 1 --correct-every 0",
    "block-admm, gauss-seidel": "--solver block-admm --window 4 --sweeps 2"
    " --set solver.order=gauss-seidel --set solver.z_steps=2 --set solver.theta_steps=2"
    " --set solver.balance_ratio=2.0",
    "block-admm, adam": "--solver block-admm --window 4 --sweeps 2 --set solver.optimiser=adam"
    " --set solver.local_lr=0.01",
    "block-admm, constraint": "--solver block-admm --window 4 --sweeps 2"
    " --set solver.constraint=box:-2:2",
    "auxnet": "--solver auxnet --window 4",
    "ddg": "--solver ddg --lr 0.02",
    "ddg, corrected": "--solver ddg --lr 0.02 --correct-every 2 --set solver.clip_norm=1.0",
    "features-replay": "--solver features-replay --lr 0.02",
    "fdg": "--solver fdg --lr 0.02 --set solver.gradient_shrinking=0.9",
    "petra": "--solver petra --lr 0.02 --model revnet20",
    "petra, accumulate": "--solver petra --lr 0.02 --model revnet20 --set solver.accumulate=2",
    "local-updates": "--solver local-updates",
    "local-updates, overlapping": "--solver local-updates --set solver.style=overlapping"
    " --set solver.head=mlp:16",
    "local-updates, chunked": "--solver local-updates --set solver.style=chunked"
    " --set solver.chunks=1",
}
COMMON = (
    "--data digits --epochs 2 --batch-size 32 --set data.limit=256 --set train.threads=1 "
    "--set checkpoint.keep_last=0 --set checkpoint.minutes=1e-9 --set train.report_every=2"
)
BLOCKS = (1, 2, 4)
LINKS = {"threads": "", "mpirun": "", "virtual": "--set links.kind=virtual"}
STEPS_AN_EPOCH = 8


def rows(links: str, blocks: int, only: str) -> dict[str, str]:
    """The rows of one kind of links, and what each recipe asks of the command."""
    named = {f"{recipe} | K={blocks} | {links}": line for recipe, line in RECIPES.items()}
    return {name: line for name, line in named.items() if only in name}


def run(rank: int, blocks: int, links: str, only: str, scratch: Path) -> dict[str, str]:
    """Train every row in this process (a rank of several under mpirun); {row: hash}."""
    import torch
    import typer

    from hybrid.cli.app import app

    command = typer.main.get_command(app)
    barrier = _barrier()

    def hybrid(line: str, *more: object) -> None:
        command.main(args=[*line.split(), *map(str, more)], standalone_mode=False)

    found = {}
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    for number, (row, recipe) in enumerate(rows(links, blocks, only).items()):
        torch.set_num_threads(1)
        folder, file = scratch / str(number), scratch / f"{number}.safetensors"
        settings = f"train {COMMON} {recipe} {LINKS[links]} --blocks {blocks} --out {folder}"
        for name, extra in ((row, ""), (f"{row} | resumed", "--resume")):
            try:
                if extra and rank == 0:
                    _forget_the_end(folder)
                barrier()
                hybrid(f"{settings} {extra}")
                hybrid(f"export {folder} {file}")
                found[name] = _hash(file) if rank == 0 else ""
            except ValueError as error:
                found[name] = f"refused: {error}"
            barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{links} K={blocks} {number + 1}: {row}", file=sys.stderr, flush=True)
    return found


def _barrier():
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return lambda: None
    from mpi4py import MPI

    return MPI.COMM_WORLD.Barrier


def _forget_the_end(folder: Path) -> None:
    """Leave the checkpoints up to the last one within an epoch."""
    kept = sorted((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    within = [path for path in kept if int(path.name) % STEPS_AN_EPOCH]
    for path in kept:
        if path > (within or kept)[-1]:
            shutil.rmtree(path)


def _hash(file: Path) -> str:
    """Of names, shapes and bytes: a file's own layout does not matter."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def launch(links: str, blocks: int, only: str, scratch: Path) -> dict[str, str]:
    """All rows of one kind of links and number of blocks, in processes of their own."""
    folder = scratch / f"{links}-{blocks}"
    folder.mkdir()
    mine = [sys.executable, "-m", "tests.golden", "--rank", links, str(blocks), str(folder)]
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }
    if links == "mpirun":
        mpirun = str(Path(sys.executable).parent / "mpirun")
        mine = [mpirun, "-n", str(blocks), *mine]
    subprocess.run([*mine, "--only", only], env=environment, check=True)
    return json.loads((folder / "found.json").read_text())


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)))
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        links, blocks, scratch = asked.rank[0], int(asked.rank[1]), Path(asked.rank[2])
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
        found = run(rank, blocks, links, asked.only, scratch)
        if rank == 0:
            (scratch / "found.json").write_text(json.dumps(found))
        return 0
    scratch, found = Path(mkdtemp(prefix="hybrid-golden-")), {}
    for links in asked.links.split(","):
        for blocks in map(int, asked.blocks.split(",")):
            found |= launch(links, blocks, asked.only, scratch)
    shutil.rmtree(scratch)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if not asked.check:
        return 0
    golden = json.loads(asked.check.read_text())
    changed = [row for row in found if found[row] != golden.get(row)]
    print("\n".join(f"CHANGED {row}: {golden.get(row)} -> {found[row]}" for row in changed))
    print(f"{len(found)} rows, {len(changed)} changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
