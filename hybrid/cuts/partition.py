"""A model cut into blocks: evenly, by counted operations, by measured time, or by given cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from hybrid.cuts.arguments import (
    check_split,
    check_uncut_modules,
    find_cut_indices,
    make_units_of_list,
)
from hybrid.cuts.balance import balance_starts
from hybrid.cuts.blocks import Blocks, default_sample
from hybrid.cuts.costs import count_costs, measure_costs, merge_units
from hybrid.cuts.modules import check_shared_tensors
from hybrid.cuts.segments import Graph
from hybrid.errors import no_exit, one_line
from hybrid.models import Chain, Unit, is_sequence, units
from hybrid.solvers.exact.gaps import Cost

UNEVEN = 1.2
"""Largest cost of a block over the mean at which only single tensors cross cuts."""
UNEVEN_INSIDE = 1.02
"""The same if cuts inside units are allowed."""


@no_exit()
def split(
    model: nn.Module | Sequence[tuple[str, nn.Module]],
    blocks: int | None = None,
    *,
    cuts: Sequence[str] | None = None,
    balance: str = "operations",
    inside: bool = False,
    sample: Any = None,
) -> Blocks:
    """Cut a model's units into contiguous blocks.

    The units are the children of an `nn.Sequential`, or the modules of a list of (name, module)
    that run one after the other. Any other module is traced, and its units are the pieces of its
    graph between which a single tensor is alive, or several tensors if blocks would be uneven
    otherwise or a cut names such a place. With `inside`, an `nn.Sequential` and a list are traced,
    too, and cut inside their units.

    `blocks` is the number of blocks, of about equal cost: `balance` "measured" times a forward and
    backward pass of each unit, "operations" counts its arithmetic and memory traffic (the same on
    every machine), "even" counts units. Alternatively, `cuts` names the first unit of every block
    but the first. `sample` is a batch of inputs for the trace and the cost: a tensor, a tuple (by
    position) or a dict (by name); this project's models have a sample of their own.

    Raises ValueError for a split that is not possible, with the number of units.
    """
    check_split(blocks, cuts, balance, sample)
    if isinstance(model, nn.Module):
        network, chain = model, units(model) if is_sequence(model) else []
        served = set(cuts or ()) <= {unit.name for unit in chain} and (blocks or 1) <= len(chain)
        own = sample is not None and not isinstance(model, Chain)
        along = inside or not chain or (own and not served)
    else:
        (network, chain), along = make_units_of_list(model), inside
    if along:
        return _split_graph(network, blocks, cuts, balance, sample, inside)
    return _split_chain(network, chain, blocks, cuts, balance, sample)


def _split_chain(
    model: nn.Module,
    chain: list[Unit],
    blocks: int | None,
    cuts: Sequence[str] | None,
    balance: str,
    sample: Any,
) -> Blocks:
    names = [unit.name for unit in chain]
    if cuts is not None:
        return Blocks(model, chain, [0, *find_cut_indices(list(cuts), names)])
    assert blocks is not None
    if not 1 <= blocks <= len(chain):
        raise ValueError(
            f"{blocks} blocks asked of {len(chain)} units ({', '.join(names)}): "
            f"ask for 1 to {len(chain)} blocks, or take a deeper model"
        )
    if blocks in (1, len(chain)):
        return Blocks(model, chain, list(range(blocks)))
    costs = _compute_costs(model, chain, balance, sample)
    starts = balance_starts([sum(cost) for cost in costs], blocks)
    return Blocks(model, chain, starts, costs)


def _compute_costs(model: nn.Module, chain: list[Unit], balance: str, sample: Any) -> list[Cost]:
    if balance == "even":
        return [Cost(1.0, 2.0)] * len(chain)
    x = default_sample(model, sample)
    made = Blocks(model, chain, [0]).with_bundles(x)
    measure = count_costs if balance == "operations" else measure_costs
    try:
        return measure(model, made.units, made.pack_inputs(x))
    except RuntimeError as error:
        raise ValueError(
            f"the units of {type(model).__name__} cannot be costed, one by one forward and "
            f"backward: {one_line(error)[:200]}; give cuts=, or correct the unit"
        ) from error


def _split_graph(
    model: nn.Module,
    blocks: int | None,
    cuts: Sequence[str] | None,
    balance: str,
    sample: Any,
    inside: bool,
) -> Blocks:
    """A traced module in blocks: single tensors cross the cuts, or several where that pays."""
    if inside:
        check_uncut_modules(model)
    if isinstance(model, Chain):
        sample = default_sample(model, sample)
    if sample is None and blocks == 1:
        return Blocks(model, [Unit("model", {"": model})], [0])
    if sample is None:
        raise ValueError(
            f"a {type(model).__name__} is cut along its graph, which needs sample=, a batch of its "
            "inputs"
        )
    graph = Graph(model, sample)
    chain = graph.units()
    if cuts is not None:
        made = _split_chain(model, chain, None, graph.find_units_named(cuts), balance, sample)
    else:
        assert blocks is not None
        made = _balance_graph(model, chain, graph.widths, blocks, balance, sample, inside)
    check_shared_tensors([made.module(index) for index in range(len(made))])
    return made


def _balance_graph(
    model: nn.Module,
    chain: list[Unit],
    widths: list[int],
    blocks: int,
    balance: str,
    sample: Any,
    inside: bool,
) -> Blocks:
    """Balanced cuts, crossed by as few tensors as possible without a much slower block.

    `widths`: how many tensors go into each unit but the first.
    """
    known: dict[tuple[int, ...], Blocks] = {}

    def made(starts: Sequence[int]) -> Blocks:
        # what crosses no cut is not packed: a block's cost is not the sum of its units'
        if tuple(starts) not in known:
            found = Blocks(model, chain, list(starts), [Cost(0.0, 0.0)] * len(chain))
            runs = [found.units_of(k) for k in range(blocks)]
            own = _compute_costs(model, [merge_units(run) for run in runs], balance, sample)
            for start, run, cost in zip(starts, runs, own, strict=True):
                units = len(run) if balance == "even" else 1
                found.costs[start] = Cost(*(units * part for part in cost))
            known[tuple(starts)] = found
        return known[tuple(starts)]

    uneven = UNEVEN_INSIDE if inside else UNEVEN
    tried: list[tuple[Blocks, list[int]]] = []
    for most in sorted(set(widths)) or [1]:
        places = [0, *[i for i, width in enumerate(widths, 1) if width <= most]]
        runs = [merge_units(chain[a:b]) for a, b in pairwise([*places, len(chain)])]
        if len(runs) < blocks:
            continue
        if blocks == 1:
            return Blocks(model, chain, [0])
        first = _split_chain(model, runs, blocks, None, balance, sample).starts
        found = made([places[i] for i in first])
        tried.append((_move_cuts(found, places, made) if inside else found, places))
        if _slowest(tried[-1][0]) <= uneven * min(_mean_cost(one) for one, _ in tried):
            break
    if not tried:
        return _split_chain(model, chain, blocks, None, balance, sample)  # raises the error
    least = min(_slowest(one) for one, _ in tried)
    chosen, places = next(pair for pair in tried if _slowest(pair[0]) <= uneven * least)
    return _move_cuts(chosen, places, made)


def _move_cuts(found: Blocks, places: list[int], made: Callable[[Sequence[int]], Blocks]) -> Blocks:
    """The blocks after moving cuts by one place as long as that makes the slowest block faster."""
    while True:
        starts, tried = found.starts, []
        slow = max(range(len(starts)), key=lambda k: sum(found.costs[found.starts[k]]))
        for k, by in ((slow, 1), (slow + 1, -1)):
            if 0 < k < len(starts) and (place := places.index(starts[k]) + by) < len(places):
                moved = [*starts[:k], places[place], *starts[k + 1 :]]
                if moved == sorted(set(moved)):
                    tried.append(made(moved))
        best = min(tried, key=_slowest, default=found)
        if _slowest(best) >= _slowest(found):
            return found
        found = best


def _slowest(blocks: Blocks) -> float:
    return max(map(sum, blocks.costs))


def _mean_cost(blocks: Blocks) -> float:
    return sum(map(sum, blocks.costs)) / len(blocks)
