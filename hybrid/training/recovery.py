"""What a run does when it diverges: back to a checkpoint, and on from it with smaller steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid.rounds.rounds import DivergedError

if TYPE_CHECKING:
    from hybrid.training.run import Run


def roll_back(run: Run, error: DivergedError) -> None:
    """Go back to the newest checkpoint, or raise `error` with its remedy; every rank calls it.

    To the one before the last one tried, if none has been written since. The first roll-back halves
    local steps, if there are any; each later one halves all steps. Nothing is removed: the writer
    sets newer checkpoints aside when the run has one again.
    """
    before, step = run.rollbacks, run.step
    run.rounds.drain()  # or the messages of what is given up would be taken for others
    if run.folder is None or run.writer is None or len(before) >= run.trainer.checkpoint.rollbacks:
        raise DivergedError(f"{error}; {_remedy(run)}") from None
    run.writer.finish()
    found = run.checkpoints()
    if not run.kept_since_rollback:
        found = [f for f in found if int(f.name) < before[-1]["to"]] or found[:1]
    run.kept_since_rollback = False
    run.build()
    run.go_on_from(found[-1])
    run.rollbacks = [*before, {"step": step, "reason": str(error), "to": run.step}]
    set_rates(run)
    rates = run.rollbacks[-1]["rates"] = dict(run.block.rates)
    with run.links.agreement():
        if run.links.rank == 0:
            run.folder.rewind(run.step)
    run.metric({"phase": "rollback", "from": step, "rates": [rates["exact"], rates["local"]]})
    run.progress.say(
        f"{error}; going on from the checkpoint of step {run.step} with exact steps "
        f"{rates['exact']:g} and local steps {rates['local']:g} times their size"
    )


def set_rates(run: Run) -> None:
    """Step sizes after the roll-backs there have been."""
    number, local = len(run.rollbacks), bool(run.rounds.solver or run.rounds.fill)
    run.block.rates = {"local": 0.5**number, "exact": 0.5 ** max(number - local, 0)}


def _remedy(run: Run) -> str:
    lower = f"lower --lr (now {run.trainer.optimiser.lr:g})"
    section = "solver" if run.rounds.alone else "correction"
    if section == "correction" or hasattr(run.trainer.solver, "clip_norm"):
        lower += f" or set {section}.clip_norm"
    if run.folder is None:
        return lower
    newest = run.folder.newest()
    good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint"
    tried = f"{len(run.rollbacks)} roll-backs did not help; " if run.rollbacks else ""
    return f"{tried}{good}; {lower}"
