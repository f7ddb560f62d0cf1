"""What a run is asked for, and says of itself: config.toml, a line at its start, a summary."""

import resource
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybrid.errors import counted
from hybrid.method.callback import RunInfo
from hybrid.method.method import Method
from hybrid.method.options import Options
from hybrid.method.schedule import Plateau
from hybrid.ranks import launch
from hybrid.settings import methods
from hybrid.settings.config import Config, Section
from hybrid.settings.resolve import to_toml
from hybrid.solvers import registry
from hybrid.solvers.local_work.budget import LocalBudget
from hybrid.training import references
from hybrid.training.checkpointing import Position

OWN_LOSS = "your own"
"""The name of a caller's loss in config.toml."""

OWN_DATA = "custom"
"""The name of data that were given to `fit`."""


def make_config_text(method: Method, budgets: Sequence[LocalBudget]) -> str:
    """The text of config.toml; objects of the caller's are mentioned in comments.

    `budgets` is the timetable in use, so that the file repeats the run.
    """
    options = method.options
    rounds = options.rounds.model_copy(update={"local_budget": budgets} if budgets else {})
    cuts, name = list(method.problem.blocks.cuts), method.solver.name
    if options.config is not None:
        split = options.config.split.model_copy(update={"blocks": len(cuts) + 1, "cuts": cuts})
        solver = {"name": name, **methods.values(method.solver)}  # m may have been measured
        # a DataLoader may have said the batch size
        updates = {"split": split, "train": options.train, "rounds": rounds, "solver": solver}
        return to_toml(options.config.model_copy(update=updates))
    notes = ["# a run of the library"]
    if name not in registry.names() or registry.solver_class(name) is not type(method.solver):
        notes.append(f"# the solver is the caller's own: {type(method.solver).__name__}")
        return "\n".join([*notes, f"# cuts = {cuts}\n"])
    tables = {
        "model": {"name": options.names["model"]},
        "data": {"name": options.names["data"]},
        "solver": {"name": name, **methods.values(method.solver)},
        "correction": methods.values(options.correction),
        "rounds": rounds.model_dump(),
        "split": {"blocks": len(cuts) + 1, "cuts": cuts, "replicas": options.replicas},
    }
    for section, registry_of in methods.NAMED.items():
        chosen = getattr(options, section)
        if chosen.name in registry_of and registry_of[chosen.name] is type(chosen):
            tables[section] = {"name": chosen.name, **methods.values(chosen)}
        else:
            notes.append(f"# the {registry_of.kind} is the caller's own: {chosen.name}")
    for section in ("train", "optimizer", "schedule", "delay", "links", "checkpoint"):
        value = getattr(options, section)
        if isinstance(value, Section):
            tables[section] = value.model_dump()
        else:
            notes.append(f"# [{section}] is the caller's own, not what stands below")
    for option in ("loss", "denominator", "regularizer", "metrics", "batch_transform"):
        if getattr(options, option) is not None:
            notes.append(f"# {option} is the caller's own")
    if options.loss is not None:
        tables["train"]["loss"] = OWN_LOSS
    return "\n".join([*notes, to_toml(Config.model_validate(tables))])


def run_info(method: Method, at: Position) -> RunInfo:
    """The run as callbacks see it."""
    options = method.options
    sections = {name: getattr(options, name) for name in ("train", "optimizer", "schedule")}
    return RunInfo(
        names=dict(options.names),
        cuts=list(method.problem.blocks.cuts),
        epochs=options.train.epochs,
        steps_per_epoch=method.steps,
        step=at.step,
        results=at.results,
        settings={
            f"{name}.{key}": value
            for name, section in sections.items()
            if isinstance(section, Section)
            for key, value in section.model_dump().items()
        },
        out=options.out,
    )


def describe_run(
    method: Method, budgets: Sequence[LocalBudget], tensors_by: str, resumed_after: int
) -> str:
    """Model, data, method and blocks on one line; `tensors_by`: what carries them between ranks."""
    options, cuts = method.options, method.problem.blocks.cuts
    names, fill = options.names, ""
    if method.setup.local_work:
        samples = [sum(local) for local in budgets]
        fits = f"{', '.join(map(str, samples))} local samples per block and tick"
        none = "nothing fits: no block waits long enough for half a micro-batch"
        fill = f" ({options.fill.name} in idle time, {fits if any(samples) else none})"
    blocks = counted(len(cuts) + 1, "block")
    parts = [
        f"{names['model']} on {names['data']}: {names['solver']}{fill}, {blocks}"
        + (f", cut before {' and '.join(cuts)}" if cuts else ""),
        f"{options.replicas} replicas, {options.sync.name}" * (options.replicas > 1),
        f"{torch.get_num_threads()} thread(s) a block on {method.device}",
        f"tensors travel by {tensors_by}" * bool(tensors_by),
        "" if method.solver.repeatable else "not reproducible: threads without an order",
        f"resumed after step {resumed_after}" * options.resume,
        f"run folder {options.out}" if options.out else "",
    ]
    return "; ".join(filter(None, parts))


def describe_eager(reasons: Sequence[str]) -> list[str]:
    """Name the ranks whose passes are not recorded as graphs though that was asked for."""
    return [
        f"rank {', '.join(str(r) for r, each in enumerate(reasons) if each == why)} runs without "
        f"graphs: {why}"
        for why in dict.fromkeys(filter(None, reasons))
    ]


def advise_resume(options: Options) -> str:
    """How to resume an interrupted run, after a semicolon; empty if it has no folder."""
    if options.out is None:
        return ""
    if options.config is None:
        return f"; go on with resume=True, out={str(options.out)!r}"
    words = ["--resume", "--out", str(options.out)]
    words += references.reference_flags(options.config)
    return f"; go on with: {launch.starting_words()}hybrid train {shlex.join(words)}"


def describe_end(options: Options, epoch: int, stopped: str) -> str:
    """The answer to a resume of a run that has ended; `stopped`: why it stopped early, or empty."""
    why = f" ({stopped})" * bool(stopped)
    more = "let it wait for more epochs" if stopped else "give it more epochs"
    return (
        f"{options.out} has ended after {counted(epoch, 'epoch')}{why}, and nothing is left to "
        f"do: to train on, {more}"
    )


def describe_selection(
    options: Options, measured_on: str, plateau: Plateau | None, measured: Mapping[str, float]
) -> dict[str, str]:
    """By which metric, on which set, a run's weights were selected; empty if they were not.

    `measured_on` is the set that decides, and `measured` has the weights' metrics on it.
    """
    by = ""
    if options.train.early_stop or (options.checkpoint.best and options.out is not None):
        by = options.train.selection.name(measured) if measured_on else "loss"
    elif plateau is not None:
        by = plateau.metric
    return {"selected_on": (measured_on or "training") * bool(by), "selected_by": by}


def share_of_rank(totals: dict[str, float], device: torch.device, blocked: float) -> dict[str, Any]:
    """One rank's part of the summary; `blocked`: seconds that it waited for checkpoints."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    reserved = 0
    if device.type == "cuda":
        peak = int(torch.cuda.max_memory_allocated(device))
        reserved = torch.cuda.max_memory_reserved(device)
    return {
        "totals": totals,
        "peak_memory_bytes": peak,
        "gpu_memory_bytes": reserved,
        "checkpoint_seconds": blocked,
    }


def make_summary(
    method: Method, everyone: Sequence[dict[str, Any]], results: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of summary.json, from every rank's share and the results of the run."""
    options, blocks, solver = method.options, method.problem.blocks, method.solver
    totals = everyone[0]["totals"]
    seconds = totals["serial_seconds"] + totals["parallel_seconds"]
    micro_batches = solver.num_micro_batches(
        options.train.batch_size // options.replicas, len(blocks)
    )
    delays = [solver.delay(index, len(blocks)) / micro_batches for index in range(len(blocks))]
    return {
        **options.names,
        **dict.fromkeys(("validation_accuracy", "validation_loss", "test_accuracy", "test_loss")),
        "blocks": len(blocks),
        "cuts": blocks.cuts,
        "replicas": options.replicas,
        "sync": options.sync.name if options.replicas > 1 else "",
        "fill": options.fill.name,
        "epochs": options.train.epochs,
        "seed": options.train.seed,
        "train_seconds": seconds,
        "images_per_second": totals["images"] / seconds if seconds else 0.0,
        "serial_seconds": totals["serial_seconds"],
        "parallel_seconds": totals["parallel_seconds"],
        "idle_share": [
            # the waits of a report count as idle time and its duration does not, which shows in
            # a short run
            min(1.0, rank["totals"]["idle_seconds"] / seconds) if seconds else 0.0
            for rank in everyone
        ],
        # within the parallel phases
        "local_steps": [int(rank["totals"]["local_steps"]) for rank in everyone],
        "local_seconds": [rank["totals"]["local_seconds"] for rank in everyone],
        "bytes_sent": [int(rank["totals"]["bytes_sent"]) for rank in everyone],
        # of every rank: the steps by which its own gradients are late
        "delay": delays * options.replicas,
        **{key: [rank[key] for rank in everyone] for key in everyone[0] if key != "totals"},
        **results,
    }
