"""What each rank did when: a file of its own for every rank, joined when somebody looks at them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid.folder.files import check_folder, write_atomically
from hybrid.reading import read_whole

FOLDER = "traces"
MOST_BYTES = 1 << 26
"""The largest file that is read."""
MOST_SPANS = 40_000
"""The most spans of earlier runs that a rank's file keeps."""


def write(run: Path, rank: int, spans: Sequence[dict[str, Any]]) -> None:
    """Write a rank's spans, after those before the run was resumed. Other ranks do theirs."""
    folder = run / FOLDER
    check_folder(folder)
    folder.mkdir(exist_ok=True)
    file = folder / f"{rank}.json"
    earlier = _spans(file)
    kept = earlier if len(earlier) < MOST_SPANS else []
    write_atomically(file, _text([*kept, *spans]))


def spans(run: Path) -> list[dict[str, Any]]:
    """Those of all ranks; without those of files that cannot be read."""
    files = sorted((run / FOLDER).glob("*.json"), key=lambda file: (len(file.name), file.name))
    return [span for file in files for span in _spans(file)]


def join(run: Path) -> bool:
    """Write all ranks' spans into one file, RUN/trace.json; False where there is none."""
    if not (found := spans(run)):
        return False
    write_atomically(run / "trace.json", _text(found))
    return True


def _text(found: Sequence[dict[str, Any]]) -> str:
    return json.dumps({"traceEvents": found})


def _spans(file: Path) -> list[dict[str, Any]]:
    """The spans in a file; none if it cannot be read."""
    try:
        found = json.loads(read_whole(file, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    events = found.get("traceEvents") if isinstance(found, dict) else None
    return events if isinstance(events, list) else []
