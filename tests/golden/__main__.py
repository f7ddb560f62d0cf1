"""Golden runs: the SHA-256 of the exported weights of every way to train, one JSON object.

    python -m tests.golden --out tests/golden/hashes.json      record them
    python -m tests.golden --check tests/golden/hashes.json    compare; exit 1 where any differs

A row is recipe, blocks, links (threads, mpirun, torchrun, virtual) and whether the run was resumed
in mid-epoch. The bits depend on the machine and on torch: compare before and after a change, in one
place. `--only` takes a part of a row's name.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

from tests.support.ranks.world import for_mpirun

RECIPES = {
    "backprop": "",
    "backprop, m=4": "solver.micro_batches=4 solver.clip_norm=1.0",
    "backprop, recompute": "solver.recompute=true",
    "backprop, int8": "solver.messages=int8",
    "backprop, adamw": "optimizer.name=adamw optimizer.lr=0.002",
    "backprop, bfloat16": "train.precision=bfloat16",
    "backprop, float16": "train.precision=float16",
    "penalty, window": "rounds.window=4 rounds.sweeps=1",
    "penalty, own sgd": "rounds.window=4 rounds.sweeps=2 solver.momentum=0.5",
    "augmented-lagrangian, window": "rounds.window=4 rounds.sweeps=1",
    "augmented-lagrangian, sweeps": "rounds.window=4 rounds.sweeps=3 solver.clip_norm=0.5"
    " solver.return_ratio=9",
    "augmented-lagrangian, filter": "rounds.window=2 rounds.sweeps=2 solver.filter=2"
    " solver.storage=bfloat16",
    "augmented-lagrangian, all": "rounds.window=all rounds.sweeps=2",
    "augmented-lagrangian, float16": "rounds.window=4 rounds.sweeps=2 train.precision=float16",
    "block-admm": "rounds.window=4 rounds.sweeps=1",
    "block-admm, kept": "rounds.window=all rounds.sweeps=1 rounds.correct_every=0",
    "block-admm, gauss-seidel": "rounds.window=4 rounds.sweeps=2 solver.order=gauss-seidel"
    " solver.z_steps=2 solver.theta_steps=2",
    "block-admm, constraint": "rounds.window=4 rounds.sweeps=2 solver.constraint=box:-2:2",
    "auxnet": "rounds.window=4 solver.lam_step=0.1",
    "ddg": "",
    "ddg, local work": "fill.name=augmented-lagrangian rounds.local_budget=BUDGET",
    "ddg, local work by penalty": "fill.name=penalty rounds.local_budget=BUDGET solver.stash=false",
    "ddg, m=1": "optimizer.lr=0.02 solver.micro_batches=1",
    "ddg, recompute": "solver.recompute=true",
    "ddg, no stash": "solver.stash=false",
    "ddg, soap": "optimizer.name=soap optimizer.lr=0.01",
    "ddg, nadamw": "optimizer.name=nadamw",
    "ddg, corrected": "optimizer.lr=0.02 rounds.correct_every=2 solver.clip_norm=1.0"
    " solver.micro_batches=1",
    "ddg, muon, extrapolated": "optimizer.name=muon delay.mend=extrapolate",
    "features-replay": "",
    "features-replay, m=1": "optimizer.lr=0.02 solver.micro_batches=1",
    "fdg": "solver.messages=int8",
    "fdg, m=1": "optimizer.lr=0.02 solver.gradient_shrinking=0.9 solver.micro_batches=1",
    "petra": "model.name=revnet20",
    "petra, m=1": "optimizer.lr=0.02 model.name=revnet20 solver.micro_batches=1",
    "local-updates": "",
    "local-updates, overlapping": "solver.style=overlapping solver.head=mlp:16",
    "local-updates, chunked": "solver.style=chunked solver.chunks=1",
}
"""A solver, what sets it apart, and its settings."""
COMMON = (
    "data.name=digits train.epochs=2 train.batch_size=32 data.limit=256 train.threads=1 "
    "checkpoint.keep_last=0 checkpoint.steps=1 train.report_every=2"
)
BLOCKS = (1, 2, 4)
LINKS = {"threads": "", "mpirun": "", "torchrun": "", "virtual": "links.kind=virtual"}
STEPS_AN_EPOCH = 8
BUDGET = (4, 8)
"""Samples of local steps of every block in a tick."""


def rows(links: str, blocks: int, only: str) -> dict[str, str]:
    """The rows of one kind of links, and what each asks of the command."""
    found = {}
    for recipe, settings in RECIPES.items():
        row = f"{recipe} | K={blocks} | {links}"
        settings = settings.replace("BUDGET", json.dumps([BUDGET] * blocks, separators=(",", ":")))
        words = " --set ".join(["", *f"{COMMON} {settings} {LINKS[links]}".split()])
        found[row] = f"train --solver {recipe.partition(',')[0]} --blocks {blocks} {words}"
    return {row: line for row, line in found.items() if only in row}


def run(rank: int, blocks: int, links: str, only: str, scratch: Path) -> dict[str, str]:
    """Train every row in this process (a rank of several under mpirun); {row: hash}."""
    import torch
    import typer

    from hybrid.cli.app import app

    command = typer.main.get_command(app)
    barrier = _barrier() if links in ("mpirun", "torchrun") else lambda: None

    def hybrid(line):
        command.main(args=line.split(), standalone_mode=False)

    found = {}
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    for number, (row, line) in enumerate(rows(links, blocks, only).items()):
        torch.set_num_threads(1)
        folder, file = scratch / str(number), scratch / f"{number}.safetensors"
        for name, extra in ((row, ""), (f"{row} | resumed", "--resume")):
            try:
                if extra and rank == 0:
                    _forget_the_end(folder)
                barrier()
                hybrid(f"{line} --out {folder} {extra}")
                hybrid(f"export {folder} {file}")
                found[name] = _hash(file) if rank == 0 else ""
            except ValueError as error:
                found[name] = f"refused: {error}".replace(str(scratch), "SCRATCH")
            barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{links} K={blocks} {number + 1}: {row}", file=sys.stderr, flush=True)
    return found


def _barrier():
    from hybrid.ranks import launch

    comm = launch.communicator()  # one rank of torchrun has none
    return (lambda: None) if comm is None else comm.barrier


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
    environment = os.environ | for_mpirun()
    launcher = Path(sys.executable).parent / links
    if links == "mpirun":
        mine = [str(launcher), "-n", str(blocks), *mine]
    if links == "torchrun":
        mine = [str(launcher), f"--nproc-per-node={blocks}", "--standalone", *mine[1:]]
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
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
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
