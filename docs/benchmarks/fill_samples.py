"""Which samples of a mini-batch a gap takes: the first, or those of the largest adjoints.

    python docs/benchmarks/fill_samples.py --data-dir ~/data

CIFAR-10's first 20,000 images, K = 4, m = 4, batch 128, 3 epochs, lr 0.25: the augmented
Lagrangian with filled gaps. Rows are network, room and choice; the room is given by hand
(`rounds.gaps`), 96 or 32 of 128 samples a pass. Accuracy alone counts here, not the clock.
Rows that fill_samples.json has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

FILE = Path(__file__).with_suffix(".json")
COMMON = (
    "--data cifar10 --blocks 4 --epochs 3 --lr 0.25 --solver augmented-lagrangian"
    " --set data.limit=20000 --set train.threads=1 --set train.evaluate_every=100"
    " --set checkpoint.every=100 --set rounds.fill=true --set correction.micro_batches=4"
)
ROOMS = {
    "1/4": "[[32,0],[32,0],[0,32],[0,32]]",
    "3/4": "[[96,0],[64,32],[32,64],[0,96]]",
}
CHOICES = ("first", "largest")


def rows(model: str, rooms: list[str]) -> dict[str, str]:
    """Names, and what each asks of the command."""
    return {
        f"{model}, {room}, {choice}": f"--model {model} --set rounds.gaps={ROOMS[room]}"
        f" --set rounds.fill_samples={choice}"
        for room in rooms
        for choice in CHOICES
    }


def trained(flags: str, seed: int, data_dir: str) -> float:
    """Test accuracy after a training."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = f"{flags} {COMMON} --seed {seed} --data-dir {data_dir} --out {out}"
        hybrid = [sys.executable, "-m", "hybrid", "train", *command.split()]
        subprocess.run(hybrid, check=True, stdout=subprocess.DEVNULL)
        accuracy: float = json.loads((out / "summary.json").read_text())["test_accuracy"]
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--seeds", nargs="*", default=["0", "1", "2"])
    options = parser.parse_args()
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    for seed in options.seeds:
        for name, flags in rows(options.model, options.rooms).items():
            if seed not in kept.get(name, {}):
                accuracy = trained(flags, int(seed), options.data_dir)
                kept.setdefault(name, {})[seed] = accuracy
                FILE.write_text(json.dumps(kept, indent=1) + "\n")
                print(f"{name}, seed {seed}: {accuracy:.2%}", flush=True)
    print("| network, room, choice | test accuracy | seeds |\n|---|---|---|")
    for name, row in kept.items():
        values = [100 * value for value in row.values()]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        print(f"| {name} | {mean(values):.2f}{spread} % | {len(values)} |")


if __name__ == "__main__":
    main()
