"""Settings, blocks and data settled into a method: the same for a run, a bench and a plan."""

from __future__ import annotations

from hybrid.data.samplers.base import Learning
from hybrid.links.grid import Place
from hybrid.method.checks import check
from hybrid.method.gaps import settled_gaps
from hybrid.method.method import Method
from hybrid.method.options import Options
from hybrid.method.problem import Problem
from hybrid.method.sharing import shares_products
from hybrid.rounds.controller import powers
from hybrid.settings.config import RoundSettings
from hybrid.settings.round_options import WINDOW
from hybrid.settings.rounds import settled
from hybrid.solvers.base import Setup, Solver
from hybrid.solvers.exact.exact_pass import PassSettings


def settle(
    problem: Problem,
    solver: Solver,
    correction: PassSettings,
    rounds: RoundSettings,
    options: Options,
) -> Method:
    """The method that these settings ask for, with everything decided that they leave open.

    ValueError, with the remedy, for settings that cannot work or would change nothing.
    """
    options.check()
    rounds = settled(solver, rounds)
    round_batches = _round_batches(rounds, options, problem.steps)
    setup = _setup(problem, solver, rounds, options, round_batches)
    method = Method(
        solver=solver,
        correction=correction,
        setup=setup,
        rounds=rounds,
        options=options,
        steps=problem.steps,
        round_batches=round_batches,
        gaps=settled_gaps(rounds, problem, setup.batch_size, correction.micro_batches),
        survival=problem.survival,
        draws=any(problem.drawing),
        normed=problem.normed,
        shares_products=shares_products(problem, options),
        cutout=problem.cutout,
        problem=problem,
    )
    check(method)
    _check_loss(method)
    _check_messages(method)
    _check_memory(method.of_replica(Place(replicas=options.replicas)))
    return method


def _round_batches(rounds: RoundSettings, options: Options, steps: int) -> int:
    """Mini-batches of a round, in epochs of so many; of the longest one, where they differ."""
    if rounds.window == "auto":
        return powers(min(rounds.window_limit, steps))[-1]
    if rounds.window == "all":
        return steps
    length = min(rounds.window or WINDOW, steps)
    corrected = (rounds.correct_every or 0) > 1
    if isinstance(options.sampler, Learning) and not rounds.window and not corrected:
        return min(length, options.sampler.lag)  # nobody asked for rounds of that length
    return length


def _setup(
    problem: Problem, solver: Solver, rounds: RoundSettings, options: Options, round_batches: int
) -> Setup:
    train, replicas, every = options.train, options.replicas, rounds.correct_every or 0
    output = problem.objectives.output
    windowed = solver.alternates and rounds.window is not None
    return Setup(
        problem.shapes,
        train.batch_size // replicas,
        window=round_batches if windowed else 0,
        sweeps=rounds.sweeps or 1,
        carried=solver.alternates and rounds.window == "all" and every != 1,
        fills=bool(rounds.fill),
        own_fill=rounds.fill_step == "own",
        correct_every=every if rounds.window != "auto" else min(every, 1),
        serial_steps=rounds.serial_steps(problem.steps),
        factorized=problem.factorized,
        output=output,
        several_outputs=output is None,
        packed=problem.blocks.packed_cuts,
        bundled=problem.blocks.bundled,
        compiled=train.compile,
        total=train.batch_size if replicas > 1 else 0,
        replicas=replicas,
        seed=train.seed,
    )


def _check_loss(method: Method) -> None:
    """ValueError for a loss of whole mini-batches where they are trained in parts."""
    setup, options = method.setup, method.options
    parts = {
        "micro-batches": method.solver.num_micro_batches(setup.batch_size),
        "micro-batches of corrections": method.correction.micro_batches if setup.corrects else 1,
        "replicas": setup.replicas if options.sync.exact else 1,
        "parts in gaps": 1 + len(method.gaps),
    }
    into = [f"{count} {what}" for what, count in parts.items() if count > 1]
    if method.problem.objectives.undivided and into:
        raise ValueError(
            f"{method.problem.objectives.undivided}: {' and '.join(into)} would train on another "
            "loss than the whole mini-batch. Give a value for each sample (reduction='none'), "
            "torch's CrossEntropyLoss or NLLLoss with class weights, or a loss with a method "
            "denominator(targets); or train undivided, with 1 micro-batch and 1 replica"
        )


def _check_messages(method: Method) -> None:
    """ValueError for a format or a filter of what crosses a cut that cannot be."""
    solver, correction, blocks = method.solver, method.correction, method.problem.blocks
    passes = solver if solver.exact else correction
    for made, where in ((solver, "solver"), (correction, "correction")):
        for name in ("messages", "storage"):
            kind = getattr(made, name, "float32")
            for cut in blocks.cuts_changed_by(kind):
                raise ValueError(
                    f"{where}.{name} is {kind!r}, which would change the integers that "
                    f"cross the cut before {cut}: choose float32, or another cut"
                )
    factor = max(getattr(solver, "filter", 1), getattr(passes, "filter", 1))
    for cut, shape in zip(blocks.cuts, method.setup.shapes, strict=True):
        if factor > 1 and (len(shape) != 3 or shape[1] % factor or shape[2] % factor):
            raise ValueError(
                f"the filter is {factor}, but activations at the cut before {cut} have "
                f"shape {shape}: choose a filter that divides their height and width"
            )


def _check_memory(method: Method) -> None:
    """ValueError if the auxiliary variables of a block need more memory than allowed."""
    window, limit = method.setup.window, method.rounds.memory_gb
    for index in range(len(method.problem.blocks)):
        needed = method.memory(index)
        if needed <= limit * 1e9:
            continue
        fits = int(window * limit * 1e9 / needed)
        what = f"a window of {window} mini-batches" if window else "the work in gaps"
        shorter = f"take a window of {fits}, or " if fits else ""
        if fits and method.rounds.window == "auto":
            shorter = f"set rounds.window_limit={powers(fits)[-1]}, or "
        raise ValueError(
            f"{what} needs {needed / 1e9:.3g} GB of auxiliary variables on rank {index}, the "
            f"budget is {limit:g} GB: {shorter}set solver.storage=bfloat16, solver.filter=2 or "
            "a larger rounds.memory_gb"
        )
