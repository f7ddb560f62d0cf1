"""Objects from settings: data, model, blocks, options, trainer."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import data
from hybrid.data import Data, Dataset, Sets, Texts
from hybrid.data.samplers.base import Learning
from hybrid.links.communicator import RankGroup
from hybrid.links.grid import Arrangement, Grid, GridPlace
from hybrid.method.memory import fit_to_memory
from hybrid.method.objectives import MODEL
from hybrid.method.options import Options
from hybrid.networks import local_init, models
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.networks.local_init import Division
from hybrid.networks.partition.balance import Messages
from hybrid.networks.partition.split import split
from hybrid.ranks import launch
from hybrid.ranks.machines import NAMES
from hybrid.registries import TEXT
from hybrid.settings import methods
from hybrid.settings.config import Config, DataSettings, SplitSettings
from hybrid.solvers import registry
from hybrid.solvers.acting import Facts, check
from hybrid.solvers.base import Solver
from hybrid.solvers.engine.engine import Scheduled
from hybrid.solvers.layers.projection import Projection
from hybrid.solvers.named import is_reference
from hybrid.training import references
from hybrid.training.summary import OWN_DATA
from hybrid.training.trainer import Trainer

NUMBERS = 1024
"""Of a sample by which a format's bytes are counted."""


def load_rank_data(resolved: Config) -> Sets:
    """Load all data; under mpirun a rank keeps the part that its block needs."""
    sets = load_all_sets(resolved.data, resolved.train.loss, resolved.train.seed)
    comm = launch.communicator()
    if comm is not None:
        solver, mine = registry.solver_class(resolved.solver["name"]), _places(comm, resolved.split)
        last = any(p.block == p.blocks - 1 for p in mine)
        learns = isinstance(methods.named(resolved, "sampler"), Learning)
        first = any(p.block == 0 for p in mine) or (learns and last)  # who chooses looks at them
        images, labels = "images" in solver.reads or first, "labels" in solver.reads or last
        sets = sets.only(images, labels)
    return sets


def _places(comm: RankGroup, wanted: SplitSettings) -> list[GridPlace]:
    """This rank's possible places in the grid, whose arrangement may still be open."""
    sides: tuple[Arrangement, ...] = ("chain", "peers")
    if wanted.side_by_side != "auto":
        sides = (wanted.side_by_side,)
    grid = Grid(comm.size // wanted.replicas, wanted.replicas)
    return [grid.place(comm.rank, side) for side in sides]


def local_blocks(comm: RankGroup, wanted: SplitSettings) -> set[int]:
    """The blocks that may be this rank's."""
    return {place.block for place in _places(comm, wanted)}


def load_data_sets(wanted: DataSettings, loss: str = "") -> tuple[Data, Data | None]:
    """Load the whole training and test sets, as `load_all_sets` does."""
    return load_all_sets(wanted, loss)[:2]


def load_all_sets(wanted: DataSettings, loss: str = "", seed: int = 0) -> Sets:
    """The data of a run, whole; the validation set is what is given, or a share by that seed.

    By the name of the loss, targets of one's own data are inputs of the network, too.
    """
    sets = _load_sets(wanted, loss)
    if not wanted.validation:
        return sets
    if sets.validation is not None:
        raise ValueError(
            f"data.validation is {wanted.validation:g}, but {wanted.name} gives validation data of "
            "its own: leave one of the two out"
        )
    train, validation = data.hold_out(sets.train, wanted.validation, seed)
    return Sets(train, sets.test, validation)


def _load_sets(wanted: DataSettings, loss: str) -> Sets:
    reference = data.reference(wanted.name)
    check({"data": wanted}, Facts(own_data=bool(reference), data=wanted))
    if reference:
        of = partial(data.as_data, workers=wanted.workers, labels_are_inputs=loss == MODEL)
        train, *others = references.make_data_sets(reference)
        return Sets(of(train), *(None if each is None else of(each) for each in others))
    if wanted.name == OWN_DATA:
        raise ValueError(
            "the run was made by a script, on data of its own: start the script again, or give "
            "--data package.module:function, which gives (training, test) or (training, "
            "validation, test) data"
        )
    if wanted.name == TEXT:
        if not wanted.dir:
            raise ValueError(
                "data.name is 'text': name a text file or a folder of such with --data-dir"
            )
        texts, held_out = data.load_text(wanted.dir, wanted.length)
        return Sets(texts.take(wanted.limit) if wanted.limit else texts, held_out)
    train, test = data.load(wanted.name, wanted.dir, wanted.limit)
    plain = replace(train, augmentation=data.Augmentation())
    return Sets(train if wanted.augment else plain, test)


def take_batch_size(resolved: Config, train: Data) -> None:
    """Take over the batch size of a DataLoader, if none is set; ValueError if it is another."""
    options = build_options(resolved)
    options.take_batch_size(train)
    resolved.train = options.train


def load_own(wanted: DataSettings) -> tuple[Dataset | Texts, Dataset | Texts]:
    """Load training and test sets of this package; ValueError for a user's function."""
    train, test = load_data_sets(wanted)
    if not isinstance(train, Dataset | Texts) or not isinstance(test, Dataset | Texts):
        raise ValueError(f"data.name is {wanted.name!r}: choose one of {', '.join(data.NAMES)}")
    return train, test


def build_model(resolved: Config, samples: Data) -> models.Chain:
    """This package's network, its weights a function of the seed alone."""
    shape, classes = _shape_and_classes(resolved, samples)
    if shape[1:2] != shape[2:]:
        raise ValueError(f"images of {shape[1]} x {shape[2]} pixels are not square")
    names = ("length",) if len(shape) == 1 else ("channels", "image_size")
    torch.manual_seed(resolved.train.seed)
    chain = models.build(resolved.model.name, classes, **dict(zip(names, shape, strict=False)))
    try:
        return models.stochastic_depth(chain, resolved.model.survival)
    except ValueError as error:
        raise ValueError(f"model.{error}") from None


def build_network(resolved: Config, data: Data) -> nn.Module:
    """Build the network of a run, built-in or the user's, with weights that depend on the seed.

    They are all zeros in one memory where a file has others.
    """
    if not resolved.model.weights:
        return _make_network(resolved, data)
    with local_init.without_weights():
        network = _make_network(resolved, data)
    local_init.lay_zeros(network)
    return network


def _make_network(resolved: Config, data: Data) -> nn.Module:
    if not is_reference(resolved.model.name):
        return build_model(resolved, data)
    check({"model": resolved.model}, Facts(model=resolved.model))
    torch.manual_seed(resolved.train.seed)
    return references.make_network(resolved.model.name)


def _shape_and_classes(resolved: Config, samples: Data) -> tuple[tuple[int, ...], int]:
    """Shape of one sample, an image or a text, and the number of classes."""
    if isinstance(samples, Dataset | Texts):
        return samples.shape, samples.classes
    if models.reads_texts(resolved.model.name):
        raise ValueError(
            f"{resolved.model.name} reads bytes (--data {TEXT}): for texts of your own, give "
            "--model package.module:function"
        )
    inputs, _ = samples.sample(1)
    classes = getattr(getattr(samples, "dataset", None), "classes", None)
    if not (isinstance(inputs, Tensor) and inputs.dim() == 4 and classes is not None):
        raise ValueError(
            f"{resolved.model.name} needs images (C, H, W) and a data set that names its classes "
            "(dataset.classes): give --model package.module:function"
        )
    return tuple(inputs.shape[1:]), len(classes)


def build_options(resolved: Config) -> Options:
    """What a method needs of the settings, as objects."""
    return Options(**_objects(resolved))


def _objects(resolved: Config) -> dict[str, Any]:
    wanted = resolved.split
    return {
        "solver": methods.solver(resolved),
        "fill": methods.named(resolved, "fill"),
        "correction": methods.correction(resolved),
        "sampler": methods.named(resolved, "sampler"),
        "replicas": wanted.replicas or 1,
        "side_by_side": wanted.side_by_side,
        "sync": methods.named(resolved, "sync"),
        "train": resolved.train,
        "optimizer": resolved.optimizer,
        "schedule": resolved.schedule,
        "delay": resolved.delay,
        "links": resolved.links,
        "loss": references.load_loss(resolved.train.loss),
        "checkpoint": resolved.checkpoint,
        **dict(resolved.rounds),
    }


def divide(resolved: Config, train: Data) -> Division | None:
    """How the network is cut, for all ranks; one of them calls it. None: each builds all of it."""
    if launch.communicator() is None or resolved.split.blocks == 1:
        return None
    if resolved.model.weights:
        cut = _cut(resolved, train, build_network(resolved, train))
        return Division(cut.starts, cut.cuts, cut.costs, {})
    return local_init.divide(
        partial(build_network, resolved, train),
        partial(_cut, resolved, train),
        resolved.split.balance == "measured",
    )


def build_blocks(resolved: Config, train: Data, division: Division | None = None) -> Blocks:
    """The network in blocks; with a division those have weights that may be this rank's."""
    comm = launch.communicator()
    if comm is None or division is None:
        return _cut(resolved, train, build_network(resolved, train))
    own = local_blocks(comm, resolved.split)
    made = local_init.build_local(partial(build_network, resolved, train), division, own)
    blocks = _cut(resolved, train, made, division.cuts)
    if len(division.costs) == len(blocks.units):
        blocks = replace(blocks, costs=division.costs)
    if blocks.pending is None:
        local_init.share_memory(blocks, own)
    return blocks


def _cut(resolved: Config, train: Data, made: nn.Module, cuts: list[str] | None = None) -> Blocks:
    wanted, own = resolved.split, is_reference(resolved.model.name)
    cuts = cuts or wanted.cuts or None
    machines = {name: getattr(wanted, name) for name in NAMES if cuts is None}
    solver, size = methods.solver(resolved), SAMPLES
    inside = solver.cuts_inside and not resolved.train.compile
    if wanted.balance == "measured" and cuts is None:
        size = _micro_batch(resolved, solver, train)
        if not resolved.model.weights:
            made.to(launch.device(resolved.train.device))
    sample = train.sample(size)[0] if own or wanted.balance == "measured" else None
    blocks = split(
        made,
        wanted.blocks,
        cuts=cuts,
        balance=wanted.balance,
        sample=sample,
        weights=resolved.model.weights or None,
        inside=None if wanted.inside is None and inside else bool(wanted.inside),
        messages=_messages(resolved, solver) if wanted.balance == "measured" else None,
        **machines,
    )
    blocks.speeds = tuple(map(float, wanted.speeds))
    if blocks.recut is not None:
        options = build_options(resolved)
        options.take_batch_size(train)
        blocks = fit_to_memory(blocks, options, train)
    return _cut_at_projections(blocks, bool(wanted.cuts))


def build_trainer(
    resolved: Config,
    loaded: Sets,
    out: Path,
    resume: bool,
    division: Division | None = None,
    weights: Path | None = None,
) -> Trainer:
    """The trainer of a run; under a launcher with the division that one rank has found.

    `weights` is where this rank finds those of model.weights, if not there.
    """
    found = resolved.model_copy()
    if weights is not None:
        found.model = resolved.model.model_copy(update={"weights": str(weights)})
    trainer = Trainer(
        build_blocks(found, loaded[0], division),
        **_objects(resolved),
        out=out,
        resume=resume,
        names={"model": resolved.model.name, "data": resolved.data.name},
        config=resolved,
    )
    if division is not None:
        trainer.whole = partial(build_network, resolved, loaded[0])
    return trainer


def _micro_batch(resolved: Config, solver: Solver, train: Data) -> int:
    """Samples of a micro-batch on each rank."""
    size = train.batch_size or resolved.train.batch_size
    share = max(1, size // (resolved.split.replicas or 1))
    count = getattr(solver, "num_micro_batches", lambda size, blocks: 1)
    return -(-share // count(share, resolved.split.count))


def _messages(resolved: Config, solver: Solver) -> Messages | None:
    """What messages of a pipeline cost, where the links' rate is known; None: it is not."""
    if resolved.links.kind != "virtual" or not isinstance(solver, Scheduled):
        return None
    wire, K = solver.wire(), resolved.split.count
    sent = sum(c.sample_bytes((NUMBERS,)) for c in (wire.up, wire.down)) / (2 * 4 * NUMBERS)
    rate = resolved.links.gigabits_per_second * 1e9 / 8
    hops = solver.delay(0, K) - solver.delay(1, K) if K > 1 else 1
    return Messages(sent / rate, max(1, hops))


def _cut_at_projections(blocks: Blocks, explicit: bool) -> Blocks:
    """Cuts moved to where a projection is: a constraint is a cut's, so it must start a block."""
    starts = list(blocks.starts)
    for index, unit in enumerate(blocks.units):
        if index in starts or not any(isinstance(m, Projection) for m in unit.parts.values()):
            continue
        if explicit or len(starts) < 2:
            raise ValueError(
                f"unit {unit.name!r} is a constraint on a cut, and no block starts there (cuts: "
                f"{', '.join(blocks.cuts) or 'none'}): add it to split.cuts"
            )
        nearest = min(starts[1:], key=lambda start: abs(start - index))
        starts[starts.index(nearest)] = index
    return replace(blocks, starts=sorted(starts))
