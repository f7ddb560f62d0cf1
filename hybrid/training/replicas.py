"""What replicas can and cannot do, and which of their ranks lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import prod
from typing import NamedTuple

from hybrid.cuts.partition import Blocks
from hybrid.links.base import Side
from hybrid.training.setup import Options, RunSetup
from solvers.base import Setup, Shape, Solver
from solvers.sync.base import Strategy
from solvers.sync.registry import STRATEGIES


def check(
    options: Options, solver: Solver, setup: Setup, normed: bool, survival: float = 1.0
) -> None:
    """ValueError, with the remedy, for replicas and strategies that cannot work or act.

    `survival` is the least probability that a unit is there in a pass.
    """
    sync, train, R = options.sync, options.train, options.replicas
    name = sync.name
    if R == 1:
        refuse_inert(options)
        return
    if survival < 1:
        raise ValueError(
            f"split.replicas is {R}, and a unit of the model survives a pass with probability "
            f"{survival:.3g} (model.survival): each replica would leave out others, of which there "
            "then are no gradients to agree on: take one replica"
        )
    if train.sync_batchnorm:
        _check_norms(options, normed)
    if setup.factorised:
        raise ValueError(
            f"split.replicas is {R}, and a factorisation learns its dictionary from the samples of "
            "one replica: take one replica, or no factorisation"
        )
    if sync.exact:
        if train.precision == "float16" and getattr(sync, "messages", "float32") != "float32":
            raise ValueError(
                f"sync.messages is {sync.messages!r}, and train.precision 'float16', whose "  # type: ignore[attr-defined]
                "overflows would stay in what rounding leaves for the next step: choose bfloat16"
            )
        return
    for setting, value, instead in (
        ("train.ema", train.ema, "leave it out"),
        ("train.graphs", train.graphs, "leave it out"),
        ("train.precision", train.precision == "float16" and train.precision, "choose bfloat16"),
    ):
        if value:
            raise ValueError(
                f"{setting} is {value}, and replicas have other weights within a round of "
                f"{name}: {instead}, or choose sync.name={STRATEGIES.default}"
            )
    if sync.anchored and solver.trains_beside:
        raise ValueError(
            f"sync.name is {name!r}, which keeps a copy of the network's weights, and "
            f"{solver.name!r} trains others beside them: choose sync.name={STRATEGIES.default}"
        )
    if sync.plain and (norm := getattr(solver, "clip_norm", 0.0)):
        raise ValueError(
            f"solver.clip_norm is {norm:g}, and {name!r} steps on sums of the gradients of several "
            f"steps: leave it out, or choose sync.name={STRATEGIES.default}"
        )
    if why := sync.inert(len(setup.shapes) + 1):
        raise ValueError(f"{why}, and it would change nothing: leave it out")
    if sync.plain and not solver.exact and (solver.alternates or setup.correct_every):
        raise ValueError(
            f"sync.name is {name!r}, which adds up gradients of one kind of step, and "
            f"{solver.name!r} has exact and local ones: choose another strategy, or another solver"
        )


def _check_norms(options: Options, normed: bool) -> None:
    train, R = options.train, options.replicas
    if train.batch_size % R:
        raise ValueError(
            f"train.sync_batchnorm is True, and train.batch_size {train.batch_size} gives {R} "
            "replicas unequal shares, so passes that cannot agree: take "
            f"{train.batch_size // R * R}"
        )
    if not normed:
        raise ValueError(
            "train.sync_batchnorm is True, but the network has no BatchNorm, so it would change "
            "nothing: leave it out"
        )
    for key in ("graphs", "compile"):
        if getattr(train, key):
            raise ValueError(
                f"train.{key} is True, and train.sync_batchnorm, which talks to other ranks within "
                "a pass: leave one of them out"
            )


def refuse_inert(options: Options) -> None:
    """ValueError for settings of replicas where there are none."""
    sync, plain = options.sync, type(options.sync)()
    given = [f.name for f in fields(sync) if getattr(sync, f.name) != getattr(plain, f.name)]  # type: ignore[arg-type]
    if type(sync) is not type(Options().sync):
        given = ["name", *given]
    if given:
        raise ValueError(
            f"sync.{given[0]} is {getattr(sync, given[0])!r}, but there is 1 replica, so it would "
            "change nothing: leave it out, or ask for --replicas"
        )
    options.train.refuse("train", "there is 1 replica", "sync_batchnorm")
    if options.side_by_side != "auto":
        raise ValueError(
            f"split.side_by_side is {options.side_by_side!r}, but there is 1 replica, so it would "
            "change nothing: leave it out, or ask for --replicas"
        )


class Grid(NamedTuple):
    """K blocks x R replicas."""

    blocks: int
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """K R."""
        return self.blocks * self.replicas

    def __str__(self) -> str:
        parts = [
            f"{count} {what}{'s' * (count > 1)}"
            for count, what in ((self.blocks, "block"), (self.replicas, "replica"))
            if count > 1
        ]
        return " x ".join(parts) or "1 block"


def grids(ranks: int, units: int, samples: int) -> list[Grid]:
    """Every way to write so many ranks as K x R, most blocks first; ValueError if there is none.

    A block has a unit of the model at least, and a replica a sample of the mini-batch.
    """

    def ways(count: int) -> list[Grid]:
        blocks = range(min(units, count), 0, -1)
        return [Grid(K, count // K) for K in blocks if count % K == 0 and count <= K * samples]

    if found := ways(ranks):
        return found
    near = next(count for count in range(min(ranks, units * samples), 0, -1) if ways(count))
    raise ValueError(
        f"{ranks} ranks are no K blocks x R replicas of a model of {units} units and a mini-batch "
        f"of {samples} samples: take {near} ranks, or a larger --batch-size"
    )


def wrong_product(blocks: int, replicas: int, ranks: int) -> str:
    """That blocks times replicas are not the ranks, and what would do."""
    ways = [f"mpirun -n {blocks * replicas}"]
    if ranks % blocks == 0:
        ways.append(f"--replicas {ranks // blocks}")
    if ranks % replicas == 0:
        ways.append(f"--blocks {ranks // replicas}")
    return (
        f"{blocks} blocks x {replicas} replicas are {blocks * replicas} ranks, and there are "
        f"{ranks}: choose {' or '.join(ways)}"
    )


def arrangement(setup: RunSetup) -> Side:
    """Which ranks lie side by side, as a rule on one host: as asked for, else `closest`."""
    if setup.side_by_side != "auto":
        return setup.side_by_side
    size, shapes = setup.train.batch_size, setup.method.setup.shapes
    return closest(setup.blocks, shapes, size, setup.replicas, setup.sync)


def closest(
    blocks: Blocks, shapes: Sequence[Shape], size: int, replicas: int, sync: Strategy
) -> Side:
    """Which ranks send each other more: those of a chain, or peers.

    In a step a chain sends activations and adjoints of its share of the mini-batch over every cut,
    peers their gradients twice, but for what is their own.
    """
    R = replicas
    values = sum(map(prod, shapes)) * size / R
    weights = sum(p.numel() for p in blocks.model.parameters())
    every = getattr(sync, "steps", 1)
    return "chain" if values >= weights * (R - 1) / R / every else "peers"
