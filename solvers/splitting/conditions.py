"""Where the settings of methods with auxiliary variables have an effect."""

from __future__ import annotations

from hybrid.solvers.acting import Acts, Facts

CORRECTED = Acts(
    "rounds.correct_every is above 0, or it fills waits",
    lambda run: run.setup.correct_every,
)
LAM_STEPS = Acts(
    "lam takes steps (several sweeps, or window 'all')",
    lambda run: run.solver.steps_lam(run.setup),
)
LAM_STEPS_OR_STARTS = Acts(
    "lam takes steps (several sweeps, or lam_start 'stepped')",
    lambda run: (
        run.solver.steps_lam(run.setup)
        or (run.solver.lam_start == "stepped" and run.setup.correct_every)
    ),
)
FILTERED = Acts("its filter is above 1", lambda run: run.solver.filter > 1)
COMPARED = Acts(
    "it fills no waits, and rounds.correct_every is 1 or rounds.sweeps at least 4",
    lambda run: not run.setup.fills and (run.setup.correct_every == 1 or run.setup.sweeps >= 4),
)
OWN_STEPS = Acts(
    "it fills no waits, which have no steps of their own",
    lambda run: not run.setup.fills,
)
MOVES = Acts(
    "multipliers move (several sweeps, or window 'all')",
    lambda run: run.solver.moves(run.setup),
)
EXCHANGES = Acts(
    "a later sweep uses the dual (several sweeps, or window 'all')",
    lambda run: run.setup.exchanges,
)
FACTORIZED = Acts("a cut has a factorization", lambda run: run.setup.factorized)
PLAIN_CUT = Acts(
    "a cut has no factorization, whose Z has a closed form",
    lambda run: _has_plain_cut(run),
)
STEPS_OF_Z = Acts(
    "a cut has no factorization, or solver.order is 'jacobi' and window not 'all'",
    lambda run: _has_plain_cut(run) or (run.solver.order == "jacobi" and not run.setup.carried),
)


def _has_plain_cut(run: Facts) -> bool:
    """Whether a cut has no factorization."""
    setup = run.setup
    return not setup.factorized or len(setup.factorized) < setup.blocks - 1
