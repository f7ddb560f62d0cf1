"""Cuts a model into blocks: evenly, by counted operations, by measured time, or by the user."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.errors import no_exit, one_line
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.networks.costs import count_costs, measure_costs
from hybrid.networks.local_init import find_pending_weights
from hybrid.networks.partition.balance import Machines, Messages, Needed, balanced
from hybrid.networks.partition.divisible import Divisible
from hybrid.networks.units import Chain, Unit, check_shared_tensors, merged
from hybrid.solvers.acting import fault_of
from hybrid.solvers.local_work.budget import Cost

BALANCES = ("operations", "measured", "even")


@no_exit()
def split(
    model: nn.Module,
    blocks: int | None = None,
    *,
    cuts: Sequence[str] | None = None,
    balance: str = "operations",
    sample: Any = None,
    weights: str | Path | None = None,
    speeds: Sequence[float] = (),
    memory: Sequence[float] = (),
    inside: bool | None = None,
    messages: Messages | None = None,
) -> Blocks:
    """Cut a model's units into contiguous blocks.

    The units are the children of an `nn.Sequential`. Any other module, and a unit where blocks
    would be uneven otherwise or where a cut names such a place, is cut between calls of its forward
    (see `Calls`): where a single tensor crosses, or several if that makes blocks more even. With
    `inside` false, units stay whole unless `cuts` says otherwise; unset, they are cut where there
    are fewer than blocks, or where costs are measured: a cut inside a unit sends more.

    `blocks` is the number of blocks, of about equal cost: `balance` "measured" times a forward and
    backward pass of each unit, "operations" counts its arithmetic and memory traffic (the same on
    every machine), "even" counts units. Alternatively, `cuts` names the first unit of every block
    but the first. `sample` is a batch of inputs to watch the forward on, and for the cost: a
    tensor, a tuple (by position) or a dict (by name); this project's models have one of their own.

    `weights` is a safetensors file, or a folder of such files with an index. Then the model's own
    weights go, or need no memory (`hybrid.without_weights`), and are zeros until a trainer begins:
    it reads them from there, under mpirun on each rank those of its own block.

    `speeds` are the relative speeds of the blocks' machines, and `memory` is what these have, in GB
    (10^9 bytes): cuts follow both. The largest cost of a block over its speed is as small as the
    memory allows. What a block needs of it depends on the method, so a trainer moves the cuts where
    some block has not enough, or refuses. All replicas have the same cuts: a block is as fast as
    its slowest replica, and has the memory of the smallest.

    With `messages` and balance "measured", cuts make the tick of the pipeline as short as possible:
    a large message costs more than a slightly larger block.

    Raises ValueError for a split that is not possible, with the number of units.
    """
    sample = dict(sample) if isinstance(sample, Mapping) else sample  # such as a tokenizer's batch
    _check_arguments(model, blocks, cuts, balance, sample)
    for name, numbers in (("speeds", speeds), ("memory", memory)):
        if fault := fault_of(numbers, blocks or 0):
            raise ValueError(f"{name} is {numbers!r}; {fault}")
        if numbers and cuts is not None:
            raise ValueError(f"cuts and {name} both settle the blocks: leave one of the two out")
    pending = find_pending_weights(model, weights)
    if sample is None and isinstance(model, Chain):
        sample = model.sample(SAMPLES)
        if sample.is_floating_point():
            sample = sample.to(next(model.parameters()).dtype)
    units = Divisible(model, sample)
    cost = partial(_compute_costs, model, balance, sample)

    def cut(needed: Needed | None = None, at: Sequence[str] | None = cuts) -> Blocks:
        if at is not None:
            made = Blocks(model, *units.cut_at(at))
        else:
            machines = Machines(speeds or [1.0] * (blocks or 0), memory, needed, messages)
            few = (blocks or 1) > 1 and (blocks or 1) > len(units.whole)
            uneven = balance == "measured" if inside is None else inside and balance != "even"
            made = balanced(units, machines, cost, inside is not False and (few or uneven))
        _check_complete(made)
        check_shared_tensors([made.module(index) for index in range(len(made))])
        made.check_changed_buffers()
        made.pending, made.speeds = pending, tuple(speeds)
        made.cut_at = partial(cut, None)
        return made

    made = cut()
    made.recut = cut if memory else None
    return made


def _check_complete(cut: Blocks) -> None:
    """ValueError if some tensor of the model is in no unit: nobody would train or keep it."""
    known = {name for unit in cut.units for name in unit.tensors()}
    if missing := [name for name in cut.model.state_dict() if name not in known]:
        raise ValueError(
            f"{len(missing)} tensors of {type(cut.model).__name__} are in none of its "
            f"{len(cut.units)} units, {missing[0]!r} first: give them to a module that its forward "
            "calls"
        )


def _check_arguments(
    model: Any, blocks: int | None, cuts: Sequence[str] | None, balance: str, sample: Any
) -> None:
    """ValueError for invalid arguments."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"split was given {str(model)[:60]!r}: give a torch.nn.Module")
    if cuts is None and blocks is None:
        raise ValueError("split needs a number of blocks, or cuts by unit name")
    if balance not in BALANCES:
        raise ValueError(f"balance is {balance!r}; choose one of {', '.join(BALANCES)}")
    if not isinstance(blocks, int | None):
        raise ValueError(f"split was given {blocks!r} blocks: give a whole number")
    if blocks is not None and blocks < 1:
        raise ValueError(f"{blocks} blocks asked: ask for 1 or more")
    if not all(isinstance(x, Tensor) and x.dim() for x in tree_leaves(sample) if x is not None):
        raise ValueError(
            f"sample is a {type(sample).__name__}: give a batch of inputs, a tensor, a tuple or a "
            "dict of tensors with one row for each sample"
        )


def _compute_costs(
    model: nn.Module, balance: str, sample: Any, runs: Sequence[Sequence[Unit]]
) -> list[Cost]:
    """Of each of the runs of units, which make up the network."""
    if balance == "even":
        return [Cost(1.0 * len(run), 2.0 * len(run)) for run in runs]
    if sample is None:
        raise ValueError(
            "costs need sample=, a batch of inputs to run the units on; "
            "or give cuts=, or balance='even'"
        )
    place = next((p.device for p in model.parameters()), None)
    sample = tree_map(lambda x: x.to(place) if isinstance(x, Tensor) else x, sample)
    bundled = Blocks(model, [merged(run) for run in runs], [0]).with_bundles(sample)
    measure = count_costs if balance == "operations" else measure_costs
    try:
        return measure(model, bundled.units, bundled.pack_inputs(sample))
    except RuntimeError as error:
        raise ValueError(
            f"the units of {type(model).__name__} cannot be costed, one by one forward and "
            f"backward: {one_line(error)[:200]}; give cuts=, or correct the unit"
        ) from error
