"""Whether a solver's settings can work and have an effect, without a training around it."""

from types import SimpleNamespace

from hybrid.solvers.acting import Facts
from hybrid.solvers.acting import check as check_conditions


def check(solver, setup, precision="float32", **facts):
    """ValueError as of a run with this setup; `facts`: what else is known of it."""
    solver.check(setup)
    train = SimpleNamespace(precision=precision)
    known = Facts(solver=solver, setup=setup, train=train, **facts)
    check_conditions({"solver": solver}, known)
