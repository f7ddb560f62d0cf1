"""What each rank did when: one file for each rank, joined when somebody looks at them.

A file is JSON in which every span has a line of its own, so that any number of them can be read:

    {"traceEvents": [
    {"name": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0.5, "dur": 2.5},
    ...
    ]}
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hybrid.files import check_folder, read_lines, write_atomically
from hybrid.folder.manifest import Count, ManifestPart

FOLDER = "traces"
MOST_BYTES = 1 << 26
"""The largest file that is read."""
LONGEST = 1 << 12
"""The most bytes of a span."""
MOST_SPANS = 40_000
"""The most spans of earlier runs that a rank's file keeps."""
MOST_JOINED, MOST_RANKS = 1 << 18, 4096
"""The most spans of all ranks together, which have equal shares of it, and the most files."""

Word = Annotated[str, Field(max_length=200)]


class StoredSpan(ManifestPart):
    """What is known of a span; other keys are left out."""

    name: Word
    ph: Literal["X", "M"]
    pid: Count
    tid: Count
    ts: float = 0.0
    dur: float = 0.0
    args: dict[Literal["name", "step", "micro_batch"], Word | int] = Field({})


def name(rank: int) -> str:
    """The file of a rank's spans in the run folder."""
    return f"{FOLDER}/{rank}.json"


def write(run: Path, rank: int, spans: Sequence[dict[str, Any]]) -> None:
    """Write a rank's spans, after those before the run was resumed. Other ranks do theirs."""
    folder = run / FOLDER
    check_folder(folder)
    folder.mkdir(exist_ok=True)
    file = run / name(rank)
    earlier = _spans(file, MOST_SPANS + 1)
    earlier = earlier if len(earlier) <= MOST_SPANS else []
    write_atomically(file, _text([*earlier, *spans]))


def spans(run: Path) -> list[dict[str, Any]]:
    """Those of all ranks, at most `MOST_JOINED`; without those of files that cannot be read."""
    folder = run / FOLDER
    if folder.is_symlink():
        return []
    files = [file for file in folder.glob("*.json") if re.fullmatch(r"\d{1,9}\.json", file.name)]
    files = sorted(files, key=lambda file: int(file.stem))[:MOST_RANKS]
    return [span for file in files for span in _spans(file, MOST_JOINED // len(files))]


def join(run: Path) -> list[dict[str, Any]]:
    """Write all ranks' spans into RUN/trace.json, and return them."""
    if events := spans(run):
        write_atomically(run / "trace.json", _text(events))
    return events


def _text(events: Sequence[dict[str, Any]]) -> str:
    lines = ",\n".join(map(json.dumps, events))
    return f'{{"traceEvents": [\n{lines}\n]}}\n'


def _spans(file: Path, most: int) -> list[dict[str, Any]]:
    """The first spans in a file; those before a place that cannot be read."""
    events = []
    with suppress(OSError, ValueError):
        for line in islice(read_lines(file, MOST_BYTES, LONGEST), 1, most + 1):
            with suppress(ValueError):
                span = StoredSpan.model_validate_json(line.rstrip(b",\n"))
                events.append(span.model_dump(exclude_unset=True))
    return events
