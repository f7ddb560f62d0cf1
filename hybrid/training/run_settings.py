"""The settings of a run: read, those of the run that goes on, and the grid that its ranks form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybrid.folder.disks import Disks
from hybrid.folder.runfolder import RunFolder
from hybrid.links.communicator import RankGroup, agreement
from hybrid.links.grid import Grid
from hybrid.ranks import launch
from hybrid.ranks.machines import check_machines, refuse_two_ways, resume_machines
from hybrid.settings import methods
from hybrid.settings.config import Config, SplitSettings
from hybrid.settings.resolve import Tables, as_tables, load, read_toml
from hybrid.solvers.base import Solver
from hybrid.training import references


def read_settings(
    file: Tables,
    overrides: Mapping[str, Any],
    run: Mapping[str, Any] | None = None,
    elastic: bool = False,
) -> Config:
    """Resolve a run's settings: defaults < the `run` that is resumed < file < command line.

    An `elastic` run has as many blocks as there are ranks where no other grid fits.
    """
    file = as_tables(file)
    resolved = load(file, overrides, base=run)
    references.check_code_is_given(resolved, overrides)
    chosen = {*overrides} | {f"{section}.{key}" for section, of in file.items() for key in of}
    written = {name for name, f in SplitSettings.model_fields.items() if f.default is not None}
    if not written <= {*file.get("split", {})}:  # no run has written it
        refuse_two_ways(resolved.split, chosen)
    if run is not None:
        _resume_grid(resolved, overrides, elastic)
    _resolve_grid(resolved, elastic)
    before = load({}, {}, base=run)
    if run is not None:
        resolved.split = resume_machines(resolved.split, before.split, chosen)
    check_machines(resolved.split)
    if run is None:
        return resolved
    if resolved.rounds.local_budget and "rounds.local_budget" not in chosen:
        _drop_timetable(resolved, before)
    if resolved.split.replicas == 1:
        _drop_settings_of_replicas(resolved, chosen)
    return resolved


def _resume_grid(resolved: Config, overrides: Mapping[str, Any], elastic: bool) -> None:
    """Choose a resumed run's grid: the one asked for, its earlier one, or one that fits."""
    before = Grid(len(resolved.split.cuts) + 1, resolved.split.replicas)
    asked = Grid(overrides.get("split.blocks", 0), overrides.get("split.replicas", 0))
    comm = launch.communicator()
    grid = Grid(asked.blocks or before.blocks, asked.replicas or before.replicas)
    if comm is not None:
        try:
            grid = before.resumed(asked, comm.size).on(comm.size)
        except ValueError:
            if not elastic:
                raise
    _update(resolved, "split", **grid._asdict())
    if grid.blocks != before.blocks:
        _update(resolved, "split", cuts=[])


def _drop_timetable(resolved: Config, before: Config) -> None:
    """Drop a resumed run's timetable of local work if its blocks or micro-batches have changed.

    With other replicas it stays, as its cuts do, unless their micro-batches are too small for it.
    """

    def micro_batch(config: Config) -> int:
        share = max(1, config.train.batch_size // resolved.split.replicas)
        count = len(config.split.cuts) + 1
        return methods.solver(config).micro_batch(share, count)

    part = micro_batch(resolved)
    same = (resolved.split.cuts, part) == (before.split.cuts, micro_batch(before))
    fits = all(sum(pair) <= part for pair in resolved.rounds.local_budget)
    if not (same and fits and isinstance(methods.named(resolved, "fill"), Solver)):
        _update(resolved, "rounds", local_budget=())


def _update(resolved: Config, section: str, **values: Any) -> None:
    setattr(resolved, section, getattr(resolved, section).model_copy(update=values))


def _drop_settings_of_replicas(resolved: Config, chosen: set[str]) -> None:
    """Drop a resumed run's replica settings that do nothing with one replica, unless chosen."""
    if not any(name.startswith("sync.") for name in chosen):
        resolved.sync = dict(Config().sync)
    if "train.sync_batchnorm" not in chosen:
        _update(resolved, "train", sync_batchnorm=False)
    if "split.side_by_side" not in chosen:
        _update(resolved, "split", side_by_side="auto")


def _resolve_grid(resolved: Config, elastic: bool) -> None:
    """Resolve the grid: blocks times replicas are the ranks under mpirun; else 2 blocks, 1 replica.

    Where one of the two is asked for, the ranks tell the other; else each rank is a block.
    """
    wanted, comm = resolved.split, launch.communicator()
    blocks = wanted.count
    if wanted.cuts and blocks != len(wanted.cuts) + 1:
        raise ValueError(
            f"split.blocks is {blocks} but split.cuts names {len(wanted.cuts)} cuts, which make "
            f"{len(wanted.cuts) + 1} blocks: leave one of the two out"
        )
    grid = Grid(blocks, wanted.replicas)
    try:
        grid = Grid(blocks or 2, wanted.replicas or 1) if comm is None else grid.on(comm.size)
        _update(resolved, "split", **grid._asdict())
    except ValueError:
        if comm is None or not elastic:
            raise
        _update(resolved, "split", blocks=comm.size, replicas=1, cuts=[])
        _drop_settings_of_replicas(resolved, set())
    train = resolved.train
    on_gpu = torch.cuda.is_available() and train.device != "cpu" and not train.deterministic
    if on_gpu and "balance" not in wanted.model_fields_set and not resolved.model.weights:
        _update(resolved, "split", balance="measured")  # a GPU's launches take much of the time


def find_run(out: Path, group: RankGroup) -> tuple[dict[str, Any] | None, list[str]]:
    """The settings of the run in a folder, on whatever disk its newest checkpoint is, and notices.

    None without a checkpoint. The folder is repaired, and the checkpoint brought to the first
    rank's disk. All ranks call it; AgreedError if the folder is in use.
    """
    if not any(group.allgather(out.exists())):
        return None, []
    folder = RunFolder(out)
    try:
        disks = Disks(folder, group)
        with agreement(group.first_of):
            folder.check_links()
        notices = disks.recover()
        settings: dict[str, Any] | None = None
        with agreement(group.first_of):
            if group.rank == 0 and folder.newest() is not None:
                stored = out / "config.toml"
                settings = read_toml(stored, links=False) if stored.exists() else {}
        return group.bcast(settings), notices
    finally:
        folder.release()


def name_run_folder(resolved: Config, now: str) -> Path:
    """A run folder named after the time and the run."""
    return Path(
        "runs", f"{now}-{resolved.model.name}-{resolved.data.name}-{resolved.solver['name']}"
    )
