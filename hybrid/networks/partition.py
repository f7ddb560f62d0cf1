"""Cuts a model into blocks: evenly, by counted operations, by measured time, or by the user."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybrid.errors import no_exit, one_line
from hybrid.networks.blocks import SAMPLES, Blocks
from hybrid.networks.calls import Calls
from hybrid.networks.costs import count_costs, measure_costs
from hybrid.networks.local_init import find_pending_weights
from hybrid.networks.units import Chain, Unit, check_shared_tensors, is_sequence, units
from hybrid.solvers.acting import nearest
from hybrid.solvers.local_work.budget import Cost

BALANCES = ("operations", "measured", "even")
UNEVEN = 1.2
"""Largest cost of a block over the mean at which only single tensors cross cuts."""

CostOf = Callable[[Sequence[Sequence[Unit]]], list[Cost]]
"""The costs of runs of units, which make up the network."""


@no_exit()
def split(
    model: nn.Module,
    blocks: int | None = None,
    *,
    cuts: Sequence[str] | None = None,
    balance: str = "operations",
    sample: Any = None,
    weights: str | Path | None = None,
) -> Blocks:
    """Cut a model's units into contiguous blocks.

    The units are the children of an `nn.Sequential`. Any other module is cut between calls of its
    own forward (see `Calls`): where a single tensor crosses, or several if blocks would be uneven
    otherwise or a cut names such a place.

    `blocks` is the number of blocks, of about equal cost: `balance` "measured" times a forward and
    backward pass of each unit, "operations" counts its arithmetic and memory traffic (the same on
    every machine), "even" counts units. Alternatively, `cuts` names the first unit of every block
    but the first. `sample` is a batch of inputs to watch the forward on, and for the cost: a
    tensor, a tuple (by position) or a dict (by name); this project's models have one of their own.

    `weights` is a safetensors file, or a folder of such files with an index. Then the model's own
    weights go, or need no memory (`hybrid.without_weights`), and are zeros until a trainer begins:
    it reads them from there, under mpirun on each rank those of its own block.

    Raises ValueError for a split that is not possible, with the number of units.
    """
    sample = dict(sample) if isinstance(sample, Mapping) else sample  # such as a tokenizer's batch
    _check_arguments(model, blocks, cuts, balance, sample)
    pending = find_pending_weights(model, weights)
    cost = partial(_compute_costs, model, balance, sample)
    chain = units(model) if is_sequence(model) else []
    if chain and sample is not None and cuts is None and blocks != 1:
        chain = Blocks(model, chain, [0]).with_bundles(sample).units  # where it may be cut
    fits = set(cuts or ()) <= {unit.name for unit in chain} and (blocks or 1) <= len(chain)
    traceable = sample is not None and not isinstance(model, Chain)
    if not chain or (traceable and not fits):
        cut = _split_calls(model, blocks, cuts, cost, sample)
    else:
        cut = Blocks(model, chain, *_divide(chain, blocks, cuts, cost))
    _check_complete(cut)
    check_shared_tensors([cut.module(index) for index in range(len(cut))])
    cut.check_changed_buffers()
    cut.pending = pending
    return cut


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
    if not all(isinstance(x, Tensor) and x.dim() for x in tree_leaves(sample) if x is not None):
        raise ValueError(
            f"sample is a {type(sample).__name__}: give a batch of inputs, a tensor, a tuple or a "
            "dict of tensors with one row for each sample"
        )


def _divide(
    chain: Sequence[Unit],
    blocks: int | None,
    cuts: Sequence[str] | None,
    cost: CostOf,
    fault: str = "",
) -> tuple[list[int], list[Cost]]:
    """Where the blocks of a chain start, and its units' costs where these decided.

    `fault` is why the chain has not more units.
    """
    names = [unit.name for unit in chain]
    if cuts is not None:
        return [0, *_find_cut_indices(list(cuts), names)], []
    assert blocks is not None
    if not 1 <= blocks <= len(chain):
        raise ValueError(
            f"{blocks} blocks asked of {len(chain)} units ({', '.join(names)}): "
            f"ask for 1 to {len(chain)} blocks, or {fault or 'take a deeper model'}"
        )
    if blocks in (1, len(chain)):
        return list(range(blocks)), []
    costs = cost([[unit] for unit in chain])
    return balance_starts([sum(each) for each in costs], blocks), costs


def _compute_costs(
    model: nn.Module, balance: str, sample: Any, runs: Sequence[Sequence[Unit]]
) -> list[Cost]:
    """Of each of the runs of units, which make up the network."""
    if balance == "even":
        return [Cost(1.0 * len(run), 2.0 * len(run)) for run in runs]
    if sample is None and isinstance(model, Chain):
        sample = model.sample(SAMPLES)
    if sample is None:
        raise ValueError(
            "costs need sample=, a batch of inputs to run the units on; "
            "or give cuts=, or balance='even'"
        )
    place = next((p.device for p in model.parameters()), None)
    sample = tree_map(lambda x: x.to(place) if isinstance(x, Tensor) else x, sample)
    bundled = Blocks(model, [run[0].merged(run) for run in runs], [0]).with_bundles(sample)
    measure = count_costs if balance == "operations" else measure_costs
    try:
        return measure(model, bundled.units, bundled.pack_inputs(sample))
    except RuntimeError as error:
        raise ValueError(
            f"the units of {type(model).__name__} cannot be costed, one by one forward and "
            f"backward: {one_line(error)[:200]}; give cuts=, or correct the unit"
        ) from error


def _split_calls(
    model: nn.Module, blocks: int | None, cuts: Sequence[str] | None, cost: CostOf, sample: Any
) -> Blocks:
    """Any module in blocks: single tensors cross the cuts, or several where that pays."""
    if sample is None and blocks == 1:
        return Blocks(model, [Unit("model", {"": model})], [0])
    if sample is None:
        raise ValueError(
            f"a {type(model).__name__} is cut between the calls of its forward, which needs "
            "sample=, a batch of its inputs"
        )
    calls = Calls(model, sample, cuts or ())
    chain = calls.units()
    if cuts is None and blocks is not None and 1 < blocks <= len(chain):
        widths = [len(each.shapes) for each in calls.interfaces]
        return _balance_calls(model, chain, widths, blocks, cost)
    named = None if cuts is None else calls.find_units_named(cuts)
    change = f"change {type(model).__name__}: {calls.fault}" if calls.fault else ""
    return Blocks(model, chain, *_divide(chain, blocks, named, cost, change))


def _balance_calls(
    model: nn.Module, chain: list[Unit], widths: list[int], blocks: int, cost: CostOf
) -> Blocks:
    """Balanced cuts, crossed by as few tensors as possible without a much slower block.

    `widths`: how many tensors, beside integers, go into each unit but the first. A block's cost
    stands at its first unit: what crosses no cut is not packed, so it is not the sum of its units'.
    """
    candidates: list[Blocks] = []
    for most in sorted(set(widths)):
        places = [0, *[i for i, width in enumerate(widths, 1) if width <= most], len(chain)]
        runs = [chain[a:b] for a, b in pairwise(places)]
        if len(runs) < blocks:
            continue
        starts = [places[i] for i in balance_starts([*map(sum, cost(runs))], blocks)]
        cut = Blocks(model, chain, starts, [Cost(0.0, 0.0)] * len(chain))
        wholes = cost([cut.units_of(k) for k in range(blocks)])
        for start, whole in zip(starts, wholes, strict=True):
            cut.costs[start] = whole
        candidates.append(cut)
        if _slowest(cut) <= UNEVEN * min(sum(map(sum, each.costs)) / blocks for each in candidates):
            break
    least = min(map(_slowest, candidates))
    return next(cut for cut in candidates if _slowest(cut) <= UNEVEN * least)


def _slowest(blocks: Blocks) -> float:
    return max(map(sum, blocks.costs))


def _find_cut_indices(cuts: Sequence[str], names: Sequence[str]) -> list[int]:
    """The places of cuts among the units; ValueError for unknown names or another order."""
    indices: list[int] = []
    for cut in cuts:
        if cut not in names:
            near = nearest(cut, names, 0.6)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(
                f"no unit {cut!r} among the {len(names)} units ({', '.join(names)}){hint}"
            )
        indices.append(names.index(cut))
    if 0 in indices:
        raise ValueError(f"a cut before {names[0]!r}, the first unit, would leave block 0 empty")
    if indices != sorted(set(indices)):
        raise ValueError(f"cuts {cuts} are not in the model's order: {', '.join(names)}")
    return indices


def balance_starts(costs: Sequence[float], blocks: int) -> list[int]:
    """Starts of `blocks` contiguous runs whose largest sum is smallest.

    The solution is exact, by dynamic programming. Among equal ones the sum of squares decides, then
    the earlier cut.
    """
    sums = [0.0, *accumulate(costs)]
    peak, _ = _best_runs(sums, blocks, max)
    _, starts = _best_runs(
        sums, blocks, lambda squares, run: squares + run**2 if run <= peak else inf
    )
    return starts


def _best_runs(
    sums: Sequence[float], blocks: int, extend: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The smallest score and its starts; `extend` adds a run to a score."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(blocks):
        best = {
            end: min(
                (extend(score, sums[end] - sums[start]), [*starts, start])
                for start, (score, starts) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(sums))
        }
    return best[len(sums) - 1]
