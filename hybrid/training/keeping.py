"""What a run keeps in a checkpoint, and takes back to go on from one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.errors import one_line
from hybrid.folder import checkpoint
from hybrid.folder.manifest import Progress, check
from solvers.variables.store import channels_last

if TYPE_CHECKING:
    from hybrid.training.run import Run

_FLIGHTS = "under way on block "


def keep(run: Run) -> None:
    """Begin a checkpoint; every rank calls it."""
    rank = run.links.rank
    manifest = {
        **run.trainer.names,
        "epoch": run.epoch,
        "steps_per_epoch": run.steps_per_epoch,
        "seed": run.trainer.train.seed,
        "window": run.windows.length,
        "cuts": run.blocks.cuts,
        "kept_as": run.kept_as,
        "gaps": [list(pair) for pair in run.trainer.gaps],
        "test_accuracy": run.test_accuracy,
        "residual": run.residual,
        "rounds": run.rounds.state(),
        "rollbacks": run.rollbacks,
        "totals": run.links.all_gather(dict(run.totals)),
        "loss_scales": run.links.all_gather(_loss_scale(run)),
    }
    units = {
        unit.name: checkpoint.tensors_of(unit, run.block.optimisers) for unit in run.blocks.of(rank)
    }
    kept = {}
    if rank:
        kept[_cut_name(run.blocks.cuts[rank - 1])] = run.rounds.cut_state()
    if run.rounds.fill is not None:
        kept[_gaps_name(rank)] = run.rounds.fill.state()
    flights = run.rounds.flight_state()
    if flights:
        kept[_flights_name(rank)] = flights
    assert run.writer is not None
    run.writer.begin(run.step, units, kept, manifest)


def take_back(run: Run, folder: Path) -> None:
    """Go on from the checkpoint `folder`; ValueError if it is of another run."""
    manifest = checkpoint.read_manifest(folder)
    check(Progress, manifest, folder / "manifest.json")
    _check(run, folder, manifest)
    with _fitting(folder):
        _restore(run, folder, manifest)


def _restore(run: Run, folder: Path, manifest: dict[str, Any]) -> None:
    checkpoint.restore(folder, manifest, run.blocks.of(run.links.rank), run.block.optimisers)
    run.epoch, run.step = manifest["epoch"], manifest["step"]
    run.test_accuracy = manifest["test_accuracy"]
    run.rollbacks = list(manifest["rollbacks"])
    same_cuts = manifest["cuts"] == run.blocks.cuts
    run.rounds.load_state(manifest["rounds"], same_cuts)
    _load_totals(run, manifest, same_cuts)
    _load_loss_scale(run, manifest, same_cuts)
    if same_cuts:
        run.residual = manifest["residual"]
        if manifest["gaps"] == [list(pair) for pair in run.trainer.gaps]:
            _load_gaps(run, folder, manifest)
    same_solver = manifest["solver"] == run.trainer.names["solver"]
    if same_cuts and same_solver:
        flights = checkpoint.load_kept(folder, manifest, _flights_name(run.links.rank))
        on_device = {k: t.to(run.device) for k, t in flights.items()}
        run.rounds.load_flight_state(channels_last(on_device))
    elif any(name.startswith(_FLIGHTS) for name in manifest["kept"]):
        blocks, changed = len(manifest["cuts"]) + 1, "solver" if same_cuts else "cuts"
        run.notice = (
            f"{folder}: what {manifest['solver']} had under way on {blocks} blocks is dropped, "
            f"because the {changed} changed"
        )
    # kept otherwise than now, they are of no use: a forward pass makes new ones
    if same_solver and manifest["kept_as"] == run.kept_as:
        _load_cuts(run, folder, manifest)


@contextmanager
def _fitting(folder: Path) -> Iterator[None]:
    """What a solver has kept is its own affair: a fault in taking it back is the checkpoint's."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{folder} holds what this run cannot go on with ({type(error).__name__}: "
            f"{one_line(error)}): resume with the settings it was made with"
        ) from error


def _check(run: Run, folder: Path, manifest: dict[str, Any]) -> None:
    path = folder.parent.parent
    units, model = [unit.name for unit in run.blocks.units], run.trainer.names["model"]
    if manifest["model"] != model or sorted(manifest["units"]) != sorted(units):
        raise ValueError(
            f"{path} is a run of {manifest['model']} with {len(manifest['units'])} units, not of "
            f"{model} with {len(units)}: give its --model, or another --out"
        )
    mine = {"data": run.trainer.names["data"], "seed": run.trainer.train.seed}
    for key, value in mine.items():
        if manifest[key] != value:
            raise ValueError(
                f"{path} is a run with {key} {manifest[key]}, not {value}: "
                f"resume with its {key}, choose another --out, or, if that is another run's "
                f"checkpoint, remove {folder} to resume from one before"
            )
    if manifest["steps_per_epoch"] != run.steps_per_epoch:
        raise ValueError(
            f"{path} has {manifest['steps_per_epoch']} steps an epoch, these "
            f"settings {run.steps_per_epoch}: resume with its data and batch size"
        )
    stopped_at = manifest["step"] % run.steps_per_epoch
    if stopped_at and manifest["window"] != run.windows.length:
        raise ValueError(
            f"{path} stopped after step {stopped_at} of an epoch with a window of "
            f"{manifest['window']}, not {run.windows.length}: resume with its --window"
        )


def _load_totals(run: Run, manifest: dict[str, Any], same_cuts: bool) -> None:
    """What was counted so far; of other blocks only what all of them count alike."""
    totals = manifest["totals"][run.links.rank if same_cuts else 0]
    common = ("images", "serial_seconds", "parallel_seconds")
    run.totals |= totals if same_cuts else {name: totals[name] for name in common}


def _loss_scale(run: Run) -> dict[str, float]:
    """What float16's loss scale of a block is, and for how many steps; empty without one."""
    if run.block.scaler is None:
        return {}
    state = run.block.scaler.state_dict()
    return {"scale": float(state["scale"]), "steps": float(state["_growth_tracker"])}


def _load_loss_scale(run: Run, manifest: dict[str, Any], same_cuts: bool) -> None:
    """The block's own, or the smallest of other blocks'."""
    scales = [kept for kept in manifest["loss_scales"] if kept]
    if run.block.scaler is None or not scales:
        return
    smallest = {"scale": min(kept["scale"] for kept in scales), "steps": 0.0}
    own = manifest["loss_scales"][run.links.rank] if same_cuts else smallest
    state = run.block.scaler.state_dict()
    state |= {"scale": own["scale"], "_growth_tracker": int(own["steps"])}
    run.block.scaler.load_state_dict(state)


def _load_gaps(run: Run, folder: Path, manifest: dict[str, Any]) -> None:
    """The records that filled gaps draw on, after a stop in mid-epoch."""
    records = checkpoint.load_kept(folder, manifest, _gaps_name(run.links.rank))
    if run.rounds.fill is None or not records:
        return
    first = run.epoch * run.steps_per_epoch
    windows = run.windows.of_epoch(run.epoch, first)
    batches = [batch for trained, _ in windows for batch in trained.batches]
    run.rounds.fill.load_state(records, batches[: run.step - first][::-1])


def _load_cuts(run: Run, folder: Path, manifest: dict[str, Any]) -> None:
    """What the solvers kept at the cuts of this block; other cuts than before have nothing."""
    cuts = ["", *run.blocks.cuts, ""][run.links.rank : run.links.rank + 2]
    before, after = (checkpoint.load_kept(folder, manifest, _cut_name(cut)) for cut in cuts)
    run.rounds.load_cut_state(before, after)
    everywhere = all(_cut_name(cut) in manifest["kept"] for cut in run.blocks.cuts)
    run.rounds.recorded = manifest["rounds"]["recorded"] and everywhere


def _cut_name(cut: str) -> str:
    return f"cut before {cut}"


def _gaps_name(rank: int) -> str:
    return f"gaps of block {rank}"


def _flights_name(rank: int) -> str:
    return f"{_FLIGHTS}{rank}"
