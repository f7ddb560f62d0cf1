"""AuxNet's speed-up model: rho(K) predicted from timed parts, and measured on virtual links.

    python docs/benchmarks/auxnet.py --model resnet20 --blocks 2 4 8

The parts are timed on this machine, one thread; the plain loop and a sweep of `auxnet`, on virtual
links (10 Gb/s, 10 us), then train the same mini-batches. Only the parallel phase counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch

from hybrid import split
from hybrid.data.generated import synthetic
from hybrid.links import Network, RankLinks, run_virtual
from hybrid.method.blocks import make_block
from hybrid.networks import models
from hybrid.rounds.windows import EpochSource
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import AuxNet, Backprop, Batch, Setup, Solver, Window
from hybrid.solvers.kernels.operations import couple
from hybrid.solvers.splitting.auxnet import auxiliary_network


def timed(work: Callable[[], object], turns: int = 5) -> float:
    work()
    found = []
    for _ in range(turns):
        start = thread_time()
        work()
        found.append(thread_time() - start)
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.build(options.model, 10, channels=3, image_size=32)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data, _ = synthetic()
    source = EpochSource(data, 0, 0, True, torch.device("cpu"))
    ids = torch.arange(4 * options.batch_size).split(options.batch_size)
    batches = [Batch(i, 1e-6, source) for i in ids]
    images, labels = batches[0].images(), batches[0].labels()

    t_d = timed(batches[0].images)
    t_fb = timed(lambda: torch.nn.functional.cross_entropy(model(images), labels).backward())
    rows: dict[str, Any] = {"T_d": t_d, "T_f + T_b": t_fb}
    serial = measured(model, 1, batches)
    print(
        "| K | t_psi + t_f + t_b, share of T_f + T_b | rho predicted | measured |\n"
        "|---|---|---|---|"
    )
    for count in options.blocks:
        blocks = split(model, count, balance="operations")
        shapes = blocks.cut_shapes(images)
        extra = max(cut_costs(shape, images) for shape in shapes)
        predicted = (t_d + t_fb) / (t_d + t_fb / count + extra)
        found = serial / measured(model, count, batches)
        rows[str(count)] = {"extra": extra, "predicted": predicted, "measured": found}
        print(f"| {count} | {extra / t_fb:.2f} | {predicted:.2f} | {found:.2f} |", flush=True)
    Path(__file__).with_name("auxnet.json").write_text(json.dumps(rows, indent=1) + "\n")


def cut_costs(shape: tuple[int, ...], images: torch.Tensor) -> float:
    """t_psi + t_f + t_b at a cut."""
    solver = AuxNet()
    image = tuple(images.shape[1:])
    network = auxiliary_network(image, shape, solver.width, solver.depth, seed=1)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    lam = network(images).detach()

    def work() -> None:
        out = network(images)
        out.backward(couple(out.detach(), lam, None, solver.beta).p_out)

    return timed(work)


def measured(model: models.Chain, count: int, batches: list[Batch]) -> float:
    """Seconds of a sweep over the mini-batches; with one block, of the plain loop."""
    blocks = split(model, count, balance="operations") if count > 1 else split(model, 1)
    shapes = blocks.cut_shapes(batches[0].images())

    def program(links: RankLinks) -> float:
        cpu = torch.device("cpu")
        block = make_block(blocks, links.rank, OptimizerSettings(), cpu)
        solver: Solver = AuxNet() if count > 1 else Backprop()
        trained = solver.start(block, links, Setup(tuple(shapes), len(batches[0]), len(batches)))
        trained.train(Window(batches))
        found = []
        for _ in range(3):
            links.all_gather(None)
            start = links.now()
            trained.train(Window(batches))
            links.all_gather(None)
            found.append(links.now() - start)
        return min(found)

    return max(run_virtual(count, program, Network(10e9 / 8, 10e-6), 1))


if __name__ == "__main__":
    main()
