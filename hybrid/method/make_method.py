"""Make a method from options, blocks and data, for a run, a bench or a plan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybrid.data.samplers.base import Learning
from hybrid.links.grid import GridPlace
from hybrid.method.method import Method
from hybrid.method.optimizers import find_vectors, frozen_epochs, make_optimizer
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.method.schedule import Plateau, UserScheduler, make_schedule
from hybrid.method.user_optimizer import UserOptimizer
from hybrid.rounds.epoch_windows import Rate
from hybrid.settings.config import OptimizerSettings, ScheduleSettings, SplitSettings
from hybrid.settings.sections.base import Section
from hybrid.settings.sections.rounds import WINDOW
from hybrid.settings.selection import check_metric, check_mode
from hybrid.solvers import acting
from hybrid.solvers.acting import Facts
from hybrid.solvers.base import Setup, Solver
from hybrid.solvers.engine.engine import Scheduled
from hybrid.solvers.local_work.budget import Cost, LocalBudget, check_budgets
from hybrid.solvers.local_work.work import check_local_method
from hybrid.solvers.optimizers.muon import Muon

WORTH_SHARING = 0.03
"""The share of a mini-batch's operations from which replicas divide Muon's matrix products."""


def make_method(problem: Problem, options: Options) -> Method:
    """Make the method of these settings, with all open choices decided.

    ValueError, with the remedy, for settings that cannot work or have no effect.
    """
    options.check()
    user_optimizer = None
    if isinstance(options.optimizer, torch.optim.Optimizer):
        scheduled = isinstance(options.schedule, UserScheduler)
        user_optimizer = UserOptimizer.of(options.optimizer, problem.blocks, scheduled)
    costs: tuple[Cost, ...] = ()
    if isinstance(options.fill, Solver) and not options.rounds.local_budget:
        # recounted: a resumed run has only the cuts, and must get the same costs
        counted = problem.blocks.count_costs(problem.inputs)
        speeds = problem.blocks.speeds or [1.0] * len(counted)
        costs = tuple(Cost(f / s, b / s) for (f, b), s in zip(counted, speeds, strict=True))
    frozen = frozen_epochs(options.train.frozen, problem.blocks, options.train.epochs)
    method = Method(
        options=options,
        problem=problem,
        user_optimizer=user_optimizer,
        rates=_common_rates(problem, options, user_optimizer),
        frozen=frozen,
        first_trained=_first_trained(problem, options, frozen),
        setup=_setup(problem, options),
        local_budgets=tuple(LocalBudget(*pair) for pair in options.rounds.local_budget),
        costs=costs,
        shares_products=_shares_products(problem, options),
    )
    method.solver.check(method.setup)
    acting.check(sections(method), facts_of(method))
    _check_selection(method)
    _check_fill(method)
    check_budgets(method.local_budgets, len(method.problem.blocks), method.micro_batch)
    _check_messages(method)
    _check_ties(method)
    _check_lengths(method)
    _check_memory(method.of_replica(GridPlace(replicas=options.replicas)))
    return method


def _first_trained(problem: Problem, options: Options, frozen: Mapping[str, int]) -> int:
    """Find the first block that needs an adjoint of its output, for its weights or its records."""
    if options.solver.alternates or isinstance(options.fill, Solver):
        return 0
    always, blocks = {name for name, count in frozen.items() if not count}, problem.blocks
    for k in range(len(blocks)):
        named = (pair for unit in blocks.units_of(k) for pair in unit.parameters().items())
        if any(p.requires_grad and name not in always for name, p in named):
            return k
    return 0


def _common_rates(problem: Problem, options: Options, user: UserOptimizer | None) -> Rate | None:
    """Make the schedule of a user's optimizer; None: each block has a schedule with its own peak.

    A schedule that follows a metric is made anew by each rank's training, and only checked here.
    """
    if isinstance(options.schedule, UserScheduler):
        options.schedule.check(user)
    if isinstance(options.schedule, ScheduleSettings) and options.schedule.on_plateau:
        measured = problem.objectives.deciding.metrics
        check_metric("schedule.metric", options.schedule.metric, measured)
    if user is None:
        return None
    steps, epochs = problem.steps, options.train.epochs
    rates = make_schedule(options.schedule, user.rates[0], steps, epochs, user)
    return None if isinstance(rates, Plateau) else rates


def _setup(problem: Problem, options: Options) -> Setup:
    train, replicas, rounds = options.train, options.replicas, options.rounds
    every, window = rounds.correct_every or 0, _window(options, problem.steps)
    sweeps = options.solver.alternates and rounds.window is not None
    output = problem.objectives.output
    return Setup(
        problem.shapes,
        train.batch_size // replicas,
        stored_batches=window if sweeps else 0,
        sweeps=rounds.sweeps or 1,
        carried=options.solver.alternates and rounds.window == "all" and every != 1,
        window=window,
        local_work=isinstance(options.fill, Solver),
        correct_every=every,
        serial_steps=rounds.serial_steps(problem.steps),
        serial_end=rounds.serial_end,
        output=output,
        several_outputs=output is None,
        packed=problem.blocks.packed_cuts,
        integer_cuts=(*problem.blocks.cuts_changed_by("int8"),),
        bundled=problem.blocks.bundled,
        compiled=bool(train.compile),
        total=train.batch_size if replicas > 1 else 0,
        replicas=replicas,
        seed=train.seed,
    )


def _window(options: Options, steps: int) -> int:
    """Count the mini-batches of a round, in epochs of `steps`; an epoch's last may be shorter."""
    rounds = options.rounds
    if rounds.window == "all":
        return steps
    length = min(rounds.window or WINDOW, steps)
    corrected = (rounds.correct_every or 0) > 1 or rounds.serial_end
    if isinstance(options.sampler, Learning) and not rounds.window and not corrected:
        return min(length, options.sampler.lag)  # the length was not set by the user
    return length


def _check_selection(method: Method) -> None:
    """Reject a train.metric that is not measured or has no known direction."""
    train = method.options.train
    if train.metric:
        check_metric("train.metric", train.metric, method.problem.objectives.deciding.metrics)
        check_mode("train.metric", train.metric, train.metric_mode, "train.metric_mode")


def _check_fill(method: Method) -> None:
    """Reject local work where no rank waits, and local settings without effect."""
    fill = method.options.fill
    check_local_method(method.solver, fill)
    if not isinstance(fill, Solver):
        return
    fill.check(method.setup)
    corrected = replace(method.setup, correct_every=1)
    acting.check({"fill": fill}, facts_of(method).copy_with(solver=fill, setup=corrected))


def _shares_products(problem: Problem, options: Options) -> bool:
    """Whether the replicas of a block divide Muon's matrix products.

    Operations are counted, not timed, so all ranks get the same answer.
    """
    settings = options.optimizer
    if not isinstance(settings, OptimizerSettings) or settings.name != "muon":
        return False
    if options.replicas == 1 or not options.sync.exact:
        return False
    if settings.sharded is not None:
        return settings.sharded
    model: nn.Module = problem.blocks.model
    optimizer = make_optimizer(model, settings, find_vectors(model).values())
    assert isinstance(optimizer, Muon)
    passes = sum(map(sum, problem.blocks.count_costs(problem.inputs)))
    share = options.train.batch_size // options.replicas
    return optimizer.count_operations() > WORTH_SHARING * passes * share


def facts_of(method: Method) -> Facts:
    """Collect the facts that conditions of settings test."""
    options, problem = method.options, method.problem
    return Facts(
        command="train",
        solver=method.solver,
        setup=method.setup,
        sync=options.sync,
        sampler=options.sampler,
        rounds=options.rounds,
        train=options.train,
        optimizer=options.optimizer,
        schedule=options.schedule,
        delay=options.delay,
        checkpoint=options.checkpoint,
        resume=options.resume,
        batch_transform=options.batch_transform,
        replicas=options.replicas,
        ordered=problem.ordered,
        streamed=problem.streamed,
        steps=problem.steps,
        draws=problem.draws,
        normed=problem.normed,
        frozen=0 in method.frozen.values()
        or not all(p.requires_grad for p in problem.blocks.model.parameters()),
        survival=problem.survival,
    )


def check_replicas(options: Options) -> None:
    """Reject replica settings that do nothing at this replica count."""
    tables = {
        "sync": options.sync,
        "split": SplitSettings(side_by_side=options.side_by_side),
        "train": options.train,
    }
    acting.check(tables, Facts(replicas=options.replicas, sync=options.sync))


def sections(method: Method) -> dict[str, Any]:
    """Return the settings by section, except those that the user gave as objects or functions.

    [links] is checked elsewhere, where the number of processes is known.
    """
    options = method.options
    names = ("solver", "sync", "sampler", "rounds", "correction", "train", "delay", "optimizer")
    tables = {name: getattr(options, name) for name in (*names, "schedule", "checkpoint")}
    tables["split"] = SplitSettings(replicas=options.replicas, side_by_side=options.side_by_side)
    of_user = [n for n in ("optimizer", "schedule") if not isinstance(tables[n], Section)]
    return {name: table for name, table in tables.items() if name not in of_user}


def _check_messages(method: Method) -> None:
    """Reject number formats and filters that the tensors at a cut do not allow."""
    solver, correction, blocks = method.solver, method.correction, method.problem.blocks
    fill = method.options.fill
    for each, where in ((solver, "solver"), (correction, "correction"), (fill, "fill")):
        packed = ("storage",) if _sends_apart(each) else ("messages", "storage")
        for name in packed:
            kind = getattr(each, name, "float32")
            for cut in blocks.cuts_changed_by(kind):
                raise ValueError(
                    f"{where}.{name} is {kind!r}, which would change the integers that "
                    f"cross the cut before {cut}: choose float32, or another cut"
                )
        kind, weights = getattr(each, "storage", "float32"), blocks.model.parameters()
        if kind != "float32" and any(p.dtype is torch.float64 for p in weights):
            raise ValueError(
                f"{where}.storage is {kind!r}, and the network has weights of float64, for which "
                "nothing of 16 bits is stored: leave it out, or take the network's .float()"
            )
    for start, shape in zip(blocks.starts[1:], method.setup.shapes, strict=True):
        for each in (solver, fill):
            factor = getattr(each, "filter", 1)
            if factor > 1 and (len(shape) != 3 or shape[1] % factor or shape[2] % factor):
                raise ValueError(
                    f"the filter is {factor}, but activations at the cut before "
                    f"{blocks.units[start].name} have shape {shape}: choose a filter that divides "
                    "their height and width"
                )


def _sends_apart(settings: Any) -> bool:
    """Whether several tensors cross a cut apart by these settings, and not packed as one."""
    program = getattr(settings, "program", None)
    return isinstance(settings, Scheduled) and getattr(program, "apart", True)


def _check_ties(method: Method) -> None:
    """Reject tied weights on several blocks whose copies could not be kept equal."""
    options, ties = method.options, method.problem.blocks.ties
    if not ties:
        return
    faults = {
        f"solver.name is {method.solver.name!r}, whose blocks step by themselves": (
            not method.solver.steps_alike
        ),
        f"train.precision is {options.train.precision!r}": options.train.precision == "float16",
        f"delay.mend is {options.delay.mend!r}, which blocks apply by their delay": (
            options.delay.mend != "none"
        ),
        f"sync.name is {options.sync.name!r}": options.replicas > 1 and not options.sync.exact,
    }
    blocks, weights = next(iter(ties.items()))
    for fault in (fault for fault, holds in faults.items() if holds):
        raise ValueError(
            f"blocks {' and '.join(map(str, blocks))} both have the weight {weights[0][0]!r} "
            f"(also called {weights[0][-1]!r}), and {fault}: untie it (in Hugging Face's "
            "configurations tie_word_embeddings=False), or change that"
        )
    if isinstance(options.optimizer, OptimizerSettings) or method.user_optimizer is not None:
        return  # their copies have the same rule
    optimizers = {k: method.make_optimizer(k) for k in {k for blocks in ties for k in blocks}}
    for blocks, names in ((blocks, names) for blocks, ws in ties.items() for names in ws):
        rules = [method.rule_of(optimizers[k], k, names) for k in blocks]
        if any(rule != rules[0] for rule in rules):
            raise ValueError(
                f"blocks {' and '.join(map(str, blocks))} both have the weight {names[0]!r}, and "
                "the optimizer's factory gives it other settings on each: let these depend on the "
                "parameter's name or shape alone, or untie it"
            )


def _check_lengths(method: Method) -> None:
    """Reject samples of several lengths if all samples need one shape."""
    solver = method.solver
    needs = {
        f"{solver.name} stores variables of one shape for all": solver.alternates,
        "local work (fill.name) needs records of one shape": method.setup.local_work,
        "train.compile compiles for one shape": bool(method.options.train.compile),
    }
    for what, needed in needs.items():
        if needed and method.problem.varies:
            raise ValueError(
                f"samples have several lengths, and {what}: pad to a fixed length "
                "(padding='max_length'; max_length of the collator), or choose otherwise"
            )


def _check_memory(method: Method) -> None:
    """ValueError if the auxiliary variables of a block need more memory than allowed."""
    window, limit = method.setup.stored_batches, method.options.rounds.memory_gb
    section = "solver" if window else "fill"
    for index in range(len(method.problem.blocks)):
        needed = method.memory(index)
        if needed <= limit * 1e9:
            continue
        fits = int(window * limit * 1e9 / needed)
        what = f"a window of {window} mini-batches" if window else "local work"
        shorter = f"take a window of {fits}, or " if fits else ""
        raise ValueError(
            f"{what} needs {needed / 1e9:.3g} GB of auxiliary variables on rank {index}, the "
            f"budget is {limit:g} GB: {shorter}set {section}.storage=bfloat16, {section}.filter=2 "
            "or a larger rounds.memory_gb"
        )
