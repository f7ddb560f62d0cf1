"""Where blocks start, so that a pipeline's tick is short: whole units, or cuts inside them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from hybrid.networks.blocks import Blocks
from hybrid.networks.call_unit import CallUnit
from hybrid.networks.partition.divisible import Divisible
from hybrid.networks.units import Unit
from hybrid.solvers.local_work.budget import Cost, Pipeline

UNEVEN = 1.2
"""Largest tick over that of even blocks at which units stay whole and single tensors cross cuts: a
cut inside a unit costs a few percent of a block's time (docs/benchmarks/exact/crossing.md)."""
CLOSE = 1.05
"""Largest tick over the shortest one at which fewer tensors are preferred."""
STEPS = 40
"""Halvings of the interval in which the shortest tick lies."""

CostOf = Callable[[Sequence[Sequence[Unit]]], list[Cost]]
"""The costs of runs of units, which make up the network."""
Needed = Callable[[Blocks], Sequence[float]]
"""The bytes that each block needs."""


class Messages(NamedTuple):
    """What messages cost a pipeline whose blocks are timed in seconds."""

    seconds_per_byte: float
    """Of what crosses in float32, in the format that it is sent in."""
    hops: int = 1
    """Ticks by which a block's delay is longer than that of the next one; 1 in a flushed pass."""


@dataclass(frozen=True)
class Machines:
    """The machines that blocks run on."""

    speeds: Sequence[float]
    memory: Sequence[float] = ()
    """GB (10^9 bytes); empty: no limit."""
    needed: Needed | None = None
    """None: nobody knows yet what blocks need."""
    messages: Messages | None = None
    """None: messages cost nothing."""

    def starts(
        self,
        costs: Sequence[float],
        make: Callable[[list[int]], Blocks],
        crossing: Sequence[float] = (),
    ) -> list[int]:
        """Where blocks start so that the tick is as short as the memory allows.

        `costs` are those of what is not cut, `crossing` the bytes of a sample before each of it,
        and `make` cuts there. More units need more memory: what has no room on a machine has none
        with others beside it. ValueError if no cut has.
        """
        sums, over = [0.0, *accumulate(costs)], dict[tuple[int, int, int], float]()

        def seconds(k: int, start: int, end: int) -> float:
            if any(k == block and start <= a and b <= end for block, a, b in over):
                return inf
            return (sums[end] - sums[start]) / self.speeds[k]

        while starts := self._shortest(seconds, len(costs), crossing):
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

    def _shortest(
        self, seconds: Callable[[int, int, int], float], count: int, crossing: Sequence[float]
    ) -> list[int]:
        if self.messages is None or not any(crossing):
            return balance_starts(count, len(self.speeds), seconds)
        times = [self.messages.seconds_per_byte * each for each in crossing]
        return shortest_tick(count, len(self.speeds), seconds, times, self.messages.hops)

    def tick(self, costs: Sequence[Cost], crossing: Sequence[float] = ()) -> float:
        """T of blocks with these costs, over whose cuts so many bytes of a sample go."""
        pairs = zip(costs, self.speeds, strict=True)
        passes = [Cost(cost.forward / speed, cost.backward / speed) for cost, speed in pairs]
        a_byte, hops = self.messages or Messages(0.0)
        times = [a_byte * each for each in crossing]
        delays = [hops * (len(costs) - 1 - k) for k in range(len(costs))]
        return Pipeline(passes, delays, 1, times, times).tick()


class Candidate(NamedTuple):
    """One way to cut a network."""

    blocks: Blocks
    tick: float
    ideal: float
    """The tick of blocks that are even."""

    @property
    def is_even(self) -> bool:
        return self.tick <= UNEVEN * self.ideal


def balanced(units: Divisible, machines: Machines, cost: CostOf, inside: bool) -> Blocks:
    """Blocks with a short tick: of whole units or, where these are uneven, with cuts in some.

    As few tensors as possible cross the cuts without a much longer tick. ValueError if there are
    not so many units.
    """
    model, count = units.model, len(machines.speeds)
    if units.sample is None and count in (1, len(units.parts)):
        return Blocks(model, units.parts, [*range(count)])
    if count == 1:
        return Blocks(model, units.whole, [0])
    found, fault, of_parts = list[Candidate](), None, dict[str, float]()
    for finer in (False, True):
        chain = units.opened if finer else units.whole
        if finer and units.is_sequence:
            each = zip(units.whole, cost([[unit] for unit in units.whole]), strict=True)
            of_parts = {unit.name: sum(passes) for unit, passes in each}
        try:
            found += _candidates(units, chain, machines, cost, of_parts)
        except ValueError as error:  # some machine has no room
            fault = error
        if not inside or any(each.is_even for each in found):
            break
    if not found:
        raise fault or ValueError(_too_few(units, chain, count))
    least = min(each.tick for each in found)
    best = next(each.blocks for each in found if each.tick <= CLOSE * least)
    if best.units is units.whole:
        return best
    made = Blocks(model, *units.cut_at(best.cuts))
    made.costs = [Cost(0.0, 0.0)] * len(made.units)
    for k, start in enumerate(made.starts):
        made.costs[start] = best.costs[best.starts[k]]
    return made


def _too_few(units: Divisible, chain: list[Unit], count: int) -> str:
    """Why a chain cannot be cut into `count` blocks."""
    names = ", ".join(unit.name for unit in chain)
    change = f"change {type(units.model).__name__}: {units.fault}" if units.fault else ""
    return (
        f"{count} blocks asked of {len(chain)} units ({names}): ask for 1 to {len(chain)} blocks, "
        f"or {change or 'take a deeper model'}"
    )


def _candidates(
    units: Divisible,
    chain: list[Unit],
    machines: Machines,
    cost: CostOf,
    of_parts: Mapping[str, float],
) -> Iterator[Candidate]:
    """Balanced cuts of a chain, crossed by as few tensors as possible, then by more.

    Where several tensors cross, a block's cost stands at its first unit: what crosses no cut is not
    packed, so it is not the sum of its units'. `of_parts` are the costs of parts by their names.
    """
    model, count, widths = units.model, len(machines.speeds), [*map(_width, chain[1:])]
    crossing = [0.0] * len(chain)
    if machines.messages is not None:
        crossing = Blocks(model, chain, [0]).crossing_bytes(units.sample)
    for most in sorted(set(widths)):
        places = [0, *[i for i, width in enumerate(widths, 1) if width <= most], len(chain)]
        if len(places) <= count:
            continue

        def at(starts: list[int], places: list[int] = places) -> Blocks:
            return Blocks(model, chain, [places[i] for i in starts])

        runs = [chain[a:b] for a, b in pairwise(places)]
        costs = cost(runs)
        sums = _rescaled([*map(sum, costs)], runs, of_parts)
        try:
            cut = at(machines.starts(sums, at, [crossing[i] for i in places[:-1]]))
        except ValueError:  # no room, but where more tensors may cross
            if most == max(widths):
                raise
            continue
        if most == max(widths) == 1:
            cut.costs = costs
            ends = pairwise([*cut.starts, len(chain)])
            wholes = [Cost(*map(sum, zip(*costs[a:b], strict=True))) for a, b in ends]
        else:
            wholes = cost([cut.units_of(k) for k in range(count)])
            cut.costs = [Cost(0.0, 0.0)] * len(chain)
            for start, whole in zip(cut.starts, wholes, strict=True):
                cut.costs[start] = whole
        ideal = sum(map(sum, wholes)) / sum(machines.speeds)
        yield Candidate(cut, machines.tick(wholes, [crossing[i] for i in cut.starts[1:]]), ideal)


def _rescaled(
    costs: list[float], runs: Sequence[Sequence[Unit]], of_parts: Mapping[str, float]
) -> list[float]:
    """Costs of runs that add up to those of the parts that they lie in, where these are known.

    A run by itself costs more: what crosses its ends is written, read, and added up there.
    """
    places: dict[str, list[int]] = {}
    for i, (first, *_) in enumerate(runs):
        if isinstance(first, CallUnit):
            places.setdefault(first.calls.prefix, []).append(i)
    for part in places.keys() & of_parts.keys():
        factor = of_parts[part] / (sum(costs[i] for i in places[part]) or 1.0)
        for i in places[part]:
            costs[i] *= factor
    return costs


def _width(unit: Unit) -> int:
    """How many tensors, beside integers, go into a unit inside a part."""
    if not isinstance(unit, CallUnit) or unit.start == 0:
        return 1
    return len(unit.calls.interfaces[unit.start - 1].shapes)


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


def shortest_tick(
    count: int,
    blocks: int,
    seconds: Callable[[int, int, int], float],
    messages: Sequence[float],
    hops: int,
) -> list[int]:
    """Starts of `blocks` contiguous runs of `count` units that make the shortest tick T.

    `seconds` as for `balance_starts`; messages[i]: t of what crosses before unit i. With w_k the
    passes of block k and `hops` = d_k - d_{k+1}, T is the least number for which all trips k..j

        sum_{i=k..j} (w_i - T) + sum_{i=k..j-1} (2 t_i - (hops - 1) T) <= 0     and     t_i <= T

    The largest sum over the trips that end on block j follows from that on block j-1, and the
    smaller it is, the better: so a program over blocks and ends finds for a T whether there is a
    cut, and bisection finds T. Empty without any cut.
    """

    def starts_within(T: float) -> list[int]:
        best: dict[int, tuple[float, list[int]]] = {0: (-inf, [])}
        for block in range(blocks):
            ways = dict[int, tuple[float, list[int]]]()
            for start, (trip, starts) in best.items():
                if block and messages[start] > T:
                    continue
                before = max(0.0, trip + 2 * messages[start] - (hops - 1) * T) if block else 0.0
                for end in range(start + 1, count + 2 + block - blocks):
                    longest = before + seconds(block, start, end) - T
                    if longest > 0:
                        break
                    if end not in ways or longest < ways[end][0]:
                        ways[end] = longest, [*starts, start]
            best = ways
        return best.get(count, (0.0, []))[1]

    if not (shortest := balance_starts(count, blocks, seconds)):
        return []
    runs = enumerate(pairwise([*shortest, count]))
    low, high = 0.0, 2 * sum(messages) + sum(seconds(k, *run) for k, run in runs)
    for _ in range(STEPS):
        middle = (low + high) / 2
        if starts := starts_within(middle):
            shortest, high = starts, middle
        else:
            low = middle
    return shortest
