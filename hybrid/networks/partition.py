"""Cuts a model into blocks: evenly, by counted operations, by measured time, or by the user."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from hybrid.solvers.acting import fault_of, nearest
from hybrid.solvers.local_work.budget import Cost

BALANCES = ("operations", "measured", "even")
UNEVEN = 1.2
"""Largest cost of a block over the mean at which only single tensors cross cuts."""

CostOf = Callable[[Sequence[Sequence[Unit]]], list[Cost]]
"""The costs of runs of units, which make up the network."""
Needed = Callable[[Blocks], Sequence[float]]
"""The bytes that each block needs."""


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

    `speeds` are the relative speeds of the blocks' machines, and `memory` is what these have, in GB
    (10^9 bytes): cuts follow both. The largest cost of a block over its speed is as small as the
    memory allows. What a block needs of it depends on the method, so a trainer moves the cuts where
    some block has not enough, or refuses. All replicas have the same cuts: a block is as fast as
    its slowest replica, and has the memory of the smallest.

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
    cost = partial(_compute_costs, model, balance, sample)
    chain = units(model) if is_sequence(model) else []
    if chain and sample is not None and cuts is None and blocks != 1:
        chain = Blocks(model, chain, [0]).with_bundles(sample).units  # where it may be cut
    fits = set(cuts or ()) <= {unit.name for unit in chain} and (blocks or 1) <= len(chain)
    traceable = sample is not None and not isinstance(model, Chain)
    calls = not chain or (traceable and not fits)
    cut_units = (
        _split_calls(model, blocks, cuts, cost, sample)
        if calls
        else partial(_divide, model, chain, blocks, cuts, cost)
    )

    def cut(needed: Needed | None = None) -> Blocks:
        made = cut_units(Machines(speeds or [1.0] * (blocks or 0), memory, needed))
        _check_complete(made)
        check_shared_tensors([made.module(index) for index in range(len(made))])
        made.check_changed_buffers()
        made.pending, made.speeds = pending, tuple(speeds)
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
    if not all(isinstance(x, Tensor) and x.dim() for x in tree_leaves(sample) if x is not None):
        raise ValueError(
            f"sample is a {type(sample).__name__}: give a batch of inputs, a tensor, a tuple or a "
            "dict of tensors with one row for each sample"
        )


@dataclass(frozen=True)
class Machines:
    """The machines that blocks run on."""

    speeds: Sequence[float]
    memory: Sequence[float] = ()
    """GB (10^9 bytes); empty: no limit."""
    needed: Needed | None = None
    """None: nobody knows yet what blocks need."""

    def starts(self, costs: Sequence[float], make: Callable[[list[int]], Blocks]) -> list[int]:
        """Where blocks start so that the slowest is as fast as the memory allows.

        `costs` are those of what is not cut, and `make` cuts there. More units need more memory:
        what has no room on a machine has none with others beside it. ValueError if no cut has.
        """
        sums, over = [0.0, *accumulate(costs)], dict[tuple[int, int, int], float]()

        def seconds(k: int, start: int, end: int) -> float:
            if any(k == block and start <= a and b <= end for block, a, b in over):
                return inf
            return (sums[end] - sums[start]) / self.speeds[k]

        while starts := balance_starts(len(costs), len(self.speeds), seconds):
            needed = self.needed(make(starts)) if self.needed and self.memory else []
            runs = zip(needed, self.memory, pairwise([*starts, len(costs)]), strict=False)
            new = {(k, *run): x for k, (x, most, run) in enumerate(runs) if x > most * 1e9}
            if not new:
                return starts
            over |= new
        k, start, end = min(over, key=lambda run: (run[2] - run[1], over[run]))
        cut = make([0, *sorted({start, end} - {0, len(costs)})])
        names = [repr(unit.name) for unit in cut.units_of(int(start > 0))]
        what = " to ".join(dict.fromkeys([names[0], names[-1]]))
        raise ValueError(
            f"no cut leaves room for all: block {k} needs {over[k, start, end] / 1e9:.3g} GB for "
            f"unit {what}, and its machine's memory has {self.memory[k]:g}: take more blocks, "
            "smaller micro-batches, recompute, an optimizer of fewer moments, or another machine"
        )


def _divide(
    model: nn.Module,
    chain: list[Unit],
    blocks: int | None,
    cuts: Sequence[str] | None,
    cost: CostOf,
    machines: Machines,
    fault: str = "",
) -> Blocks:
    """A chain in blocks, with its units' costs where these decided.

    `fault` is why the chain has not more units.
    """
    names = [unit.name for unit in chain]
    if cuts is not None:
        return Blocks(model, chain, [0, *_find_cut_indices(list(cuts), names)])
    assert blocks is not None
    if not 1 <= blocks <= len(chain):
        raise ValueError(
            f"{blocks} blocks asked of {len(chain)} units ({', '.join(names)}): "
            f"ask for 1 to {len(chain)} blocks, or {fault or 'take a deeper model'}"
        )
    costs = [] if blocks in (1, len(chain)) else cost([[unit] for unit in chain])
    sums = [sum(each) for each in costs] or [1.0] * len(chain)
    return Blocks(model, chain, machines.starts(sums, partial(Blocks, model, chain)), costs)


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
) -> Callable[[Machines], Blocks]:
    """What cuts any module: single tensors cross the cuts, or several where that pays."""
    if sample is None and blocks == 1:
        return partial(_divide, model, [Unit("model", {"": model})], 1, None, cost)
    if sample is None:
        raise ValueError(
            f"a {type(model).__name__} is cut between the calls of its forward, which needs "
            "sample=, a batch of its inputs"
        )
    calls = Calls(model, sample, cuts or ())
    chain = calls.units()
    if cuts is None and blocks is not None and 1 < blocks <= len(chain):
        widths = [len(each.shapes) for each in calls.interfaces]
        return partial(_balance_calls, model, chain, widths, cost)
    named = None if cuts is None else calls.find_units_named(cuts)
    change = f"change {type(model).__name__}: {calls.fault}" if calls.fault else ""
    return partial(_divide, model, chain, blocks, named, cost, fault=change)


def _balance_calls(
    model: nn.Module, chain: list[Unit], widths: list[int], cost: CostOf, machines: Machines
) -> Blocks:
    """Balanced cuts, crossed by as few tensors as possible without a much slower block.

    `widths`: how many tensors, beside integers, go into each unit but the first. A block's cost
    stands at its first unit: what crosses no cut is not packed, so it is not the sum of its units'.
    """
    speeds, candidates, ideal = machines.speeds, list[tuple[float, Blocks]](), inf
    for most in sorted(set(widths)):
        places = [0, *[i for i, width in enumerate(widths, 1) if width <= most], len(chain)]
        runs = [chain[a:b] for a, b in pairwise(places)]
        if len(runs) < len(speeds):
            continue

        def at(starts: list[int], places: list[int] = places) -> Blocks:
            return Blocks(model, chain, [places[i] for i in starts])

        try:
            cut = at(machines.starts([*map(sum, cost(runs))], at))
        except ValueError:  # no room, but where more tensors may cross
            if not candidates and most == max(widths):
                raise
            continue
        wholes = cost([cut.units_of(k) for k in range(len(cut))])
        cut.costs = [Cost(0.0, 0.0)] * len(chain)
        for start, whole in zip(cut.starts, wholes, strict=True):
            cut.costs[start] = whole
        slowest = max(sum(whole) / speed for whole, speed in zip(wholes, speeds, strict=True))
        candidates.append((slowest, cut))
        ideal = min(ideal, sum(map(sum, wholes)) / sum(speeds))
        if slowest <= UNEVEN * ideal:
            break
    least = min(slowest for slowest, _ in candidates)
    return next(cut for slowest, cut in candidates if slowest <= UNEVEN * least)


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


def balance_starts(count: int, blocks: int, seconds: Callable[[int, int, int], float]) -> list[int]:
    """Starts of `blocks` contiguous runs of `count` units whose largest time is smallest.

    `seconds` gives a block's time for the run from a start to an end: inf, if it may not have that.
    The solution is exact, by dynamic programming. Among equal ones the sum of squares decides, then
    the earlier cut. Empty without any.
    """
    peak, _ = _best_runs(count, blocks, lambda score, *run: max(score, seconds(*run)))

    def squares(score: float, *run: int) -> float:
        each = seconds(*run)
        return score + each**2 if each <= peak else inf

    return _best_runs(count, blocks, squares)[1] if peak < inf else []


def _best_runs(
    count: int, blocks: int, extend: Callable[[float, int, int, int], float]
) -> tuple[float, list[int]]:
    """The smallest score and its starts; `extend` adds a block's run, start to end, to a score."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for block in range(blocks):
        best = {
            end: min(
                (extend(score, block, start, end), [*starts, start])
                for start, (score, starts) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, count + 1)
        }
    return best[count]
