"""Which parameters of a network are frozen, and for how many epochs."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.networks.blocks import Blocks
from hybrid.solvers.acting import unknown


def frozen_epochs(wanted: Mapping[str, int], blocks: Blocks, epochs: int) -> dict[str, int]:
    """By the full name of a parameter: the epochs for which it is frozen; 0: all of `epochs`.

    `wanted` has names of parameters or of what holds them; the longest that fits counts. ValueError
    for a name that is no such, and if nothing would be left to train in some epoch.
    """
    named = {n: p for unit in blocks.units for n, p in unit.parameters().items()}
    trained = [name for name, p in named.items() if p.requires_grad]
    for prefix in wanted:
        if not any(_within(name, prefix) for name in named):
            parts = [name.split(".") for name in named]
            known = {".".join(part[: i + 1]) for part in parts for i in range(len(part))}
            raise ValueError(f"train.frozen: {unknown(prefix, sorted(known), 'parameter')}")
        if not any(_within(name, prefix) for name in trained):
            raise ValueError(
                f"train.frozen.{prefix} is {wanted[prefix]}, but none of its parameters requires a "
                "gradient, so it would change nothing: leave it out"
            )
    found: dict[str, int] = {}
    for name in trained if wanted else ():
        prefixes = [prefix for prefix in wanted if _within(name, prefix)]
        if prefixes:
            count = wanted[max(prefixes, key=len)]
            found[name] = count if count < epochs else 0
    for name in [*found]:  # and by its other names, where the weight has several
        tied = [other for other in trained if named[other] is named[name]]
        found |= dict.fromkeys(tied, found[name])
    for tied in [names for ties in blocks.ties.values() for names in ties]:
        counts = [found[name] for name in tied if name in found]
        found |= dict.fromkeys(tied, counts[0]) if counts else {}
    if found and len(found) == len(trained):
        raise ValueError(
            f"train.frozen is {dict(wanted)}, which leaves no parameter to train in the first "
            "epoch: leave some out of it"
        )
    return found


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
