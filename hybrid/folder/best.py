"""Which checkpoint of a run did best on the test set."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from hybrid.folder import checkpoint
from hybrid.folder.manifest import RunPosition, check


def best(folders: Iterable[Path]) -> Path | None:
    """The checkpoint of a run with the best test metric; None without one.

    `folders` are its checkpoints, oldest first. A checkpoint counts if its own weights were tested
    and no later roll-back has discarded them. Of equal ones the first is the best.
    """
    found: list[tuple[Path, dict[str, Any]]] = []
    for folder in folders:
        with suppress(ValueError, OSError):  # a damaged checkpoint does not count
            body = checkpoint.read_manifest(folder)
            check(RunPosition, body, folder / "manifest.json")
            found.append((folder, body))
    if not found:
        return None
    rollbacks = found[-1][1]["rollbacks"]
    scores = {
        folder: score(body["tested"])
        for folder, body in found
        if body["tested_step"] == body["step"] and not _left(body, rollbacks)
    }
    known = {folder: one for folder, one in scores.items() if one is not None}
    return max(known, key=known.__getitem__) if known else None


def score(results: Mapping[str, Any]) -> float | None:
    """A number that is larger for better test metrics: the accuracy, else minus the loss."""
    for key, sign in (("accuracy", 1), ("loss", -1)):
        value = results.get(key)
        if isinstance(value, int | float):
            return sign * value if isfinite(value) else None
    return None


def _left(body: Mapping[str, Any], rollbacks: list[dict[str, Any]]) -> bool:
    """Whether a later roll-back went back to a step before this checkpoint."""
    since = rollbacks[len(body["rollbacks"]) :]
    return any(rollback["to"] < body["step"] for rollback in since)
