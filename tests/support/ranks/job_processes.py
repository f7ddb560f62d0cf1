"""Processes that can be told by their environment, whoever their parents are by now."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

VARIABLE = "HYBRID_TEST_JOB"
"""Processes that are started with it pass it on to those that they start."""


def living(mark: str) -> dict[int, str]:
    """The command of every living process so marked, by its number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{VARIABLE}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
    return found
