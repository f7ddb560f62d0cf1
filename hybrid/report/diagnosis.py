"""Two sentences about a run's time: who waited and what to change, and where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean

from hybrid.report.records import Record
from hybrid.report.timeline import Span, shares

UNEVEN = 0.1
"""Two blocks that differ by more of their waiting have cuts that lie badly."""
MUCH = 0.25
"""A share of the time that is worth a change."""
_KINDS = {
    "forward": "forward passes",
    "backward": "backward passes",
    "local step": "local steps",
    "step": "the optimizer",
    "wait: previous": "waiting for the block before",
    "wait: next": "waiting for the block behind",
    "wait: peers": "waiting for replicas",
    "wait": "waiting for all ranks",
    "send": "sending",
    "checkpoint": "checkpoints",
    "evaluate": "evaluation",
}
"""The beginning of a span's name -> in words; the first that fits counts."""


def diagnosis(record: Record, found: Sequence[Span]) -> list[str]:
    """The two sentences, as far as the run has told of its time."""
    told = [waiting(record), spending(shares(found))]
    return [sentence for sentence in told if sentence]


def waiting(record: Record) -> str:
    """Which rank waited most, and what moves its waiting; empty where nothing is known of it."""
    blocks = record.summary.blocks or 0
    idle = idle_shares(record)
    if len(idle) < 2 or blocks < 1 or len(idle) % blocks:
        return ""
    by_block = [fmean(idle[block::blocks]) for block in range(blocks)]
    most, least = by_block.index(max(by_block)), by_block.index(min(by_block))
    if by_block[most] - by_block[least] > UNEVEN:
        return _uneven(record, by_block, most, least)
    if max(by_block) > MUCH:
        return (
            f"All ranks waited alike, {min(idle):.0%} to {max(idle):.0%} of the training: their "
            "blocks are even, and it is the schedule that lets them wait. Take more micro-batches, "
            "or another method by hybrid plan."
        )
    return f"Ranks waited at most {max(idle):.0%} of the training: the cuts lie well."


def idle_shares(record: Record) -> list[float]:
    """Of every rank; of a run that has not ended the mean of its reports."""
    if record.summary.idle_share:
        return record.summary.idle_share
    columns = zip_longest(*(line.idle for line in record.lines if line.idle), fillvalue=0.0)
    return [fmean(column) for column in columns]


def spending(found: Mapping[str, float]) -> str:
    """Where the time of all ranks went, the largest share first; empty without a trace."""
    spent: defaultdict[str, float] = defaultdict(float)
    for name, share in found.items():
        kind = next(
            (words for start, words in _KINDS.items() if name.startswith(start)), "anything else"
        )
        spent[kind] += share
    if not spent:
        return ""
    largest = sorted(spent.items(), key=lambda pair: -pair[1])
    told = [f"{share:.0%} {kind}" for kind, share in largest if share >= 0.01]
    said = f"Of the traced time of all ranks, {', '.join(told)}."
    if spent[_KINDS["wait: peers"]] > MUCH:
        said += (
            " Sums cost much: take fewer replicas, larger mini-batches or sync.messages=bfloat16."
        )
    if spent[_KINDS["checkpoint"]] > MUCH:
        said += " Checkpoints cost much: write fewer of them (checkpoint.every)."
    return said


def _uneven(record: Record, by_block: Sequence[float], most: int, least: int) -> str:
    several = (record.summary.replicas or 1) > 1
    first, second = (f"ranks of block {x}" if several else f"rank {x}" for x in (most, least))
    between = record.summary.cuts[min(most, least) : max(most, least)]
    where = f" than before {' and '.join(between)}" if between else ""
    return (
        f"{first.capitalize()} waited {by_block[most]:.0%} of the training, and {second} "
        f"{by_block[least]:.0%}: cut {'later' if most < least else 'earlier'}{where} (split.cuts), "
        "or by time (split.balance=measured)."
    )
