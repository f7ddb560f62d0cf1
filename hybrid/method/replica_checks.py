"""What replicas can and cannot do."""

from __future__ import annotations

from dataclasses import fields

from hybrid.method.facts import Facts
from hybrid.method.options import Options
from hybrid.optimizers import making as optimizers
from hybrid.settings.config import OptimizerSettings
from solvers.sync.registry import STRATEGIES


def check_replicas(facts: Facts) -> None:
    """ValueError, with the remedy, for replicas and strategies that cannot work or act."""
    options, solver, setup, survival = facts.options, facts.solver, facts.setup, facts.survival
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
        _check_norms(options, facts.normed)
    if setup.factorized:
        raise ValueError(
            f"split.replicas is {R}, and a factorization learns its dictionary from the samples of "
            "one replica: take one replica, or no factorization"
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
    if sync.anchored and solver.has_auxiliary_weights:
        raise ValueError(
            f"sync.name is {name!r}, which keeps a copy of the network's weights, and "
            f"{solver.name!r} trains others beside them: choose sync.name={STRATEGIES.default}"
        )
    if getattr(sync, "optimizer_state", "own") == "mean":
        _check_optimizer_state(options.optimizer)
    if sync.plain and (norm := getattr(solver, "clip_norm", 0.0)):
        raise ValueError(
            f"solver.clip_norm is {norm:g}, and {name!r} steps on sums of the gradients of several "
            f"steps: leave it out, or choose sync.name={STRATEGIES.default}"
        )
    if why := sync.inert(len(setup.shapes) + 1):
        raise ValueError(f"{why}, and it would change nothing: leave it out")
    if sync.plain and not solver.exact and (solver.alternates or setup.corrects):
        other = "leave out rounds.serial_epochs" if setup.serial_steps else "another solver"
        raise ValueError(
            f"sync.name is {name!r}, which adds up gradients of one kind of step, and "
            f"{solver.name!r} has exact and local ones here: choose another strategy, or {other}"
        )


def _check_optimizer_state(wanted: OptimizerSettings | optimizers.Factory) -> None:
    if isinstance(wanted, OptimizerSettings) and optimizers.copies(wanted) == 2:
        raise ValueError(
            f"sync.optimizer_state is 'mean', but the optimizer {wanted.name!r} keeps nothing of a "
            "weight from step to step: leave it out, or give it a momentum"
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
