"""Where the time of the tests goes:  python .ci/durations.py JUNIT.xml >tests/durations.json

JUNIT.xml is what `PYTEST_ADDOPTS=--junitxml=JUNIT.xml make test` leaves. The slowest files and
tests are kept with the day and the machine: whoever makes the tests faster looks here first.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

FILES, TESTS = 40, 60
"""How many of the slowest are kept."""


def durations(junit: Path) -> dict[str, Any]:
    """Seconds of the slowest files and tests, and of all of them."""
    files, counts, tests = Counter[str](), Counter[str](), Counter[str]()
    # the file is this project's own
    for case in ElementTree.parse(junit).getroot().iter("testcase"):  # noqa: S314
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds = float(case.attrib["time"])
        files[file] += seconds
        counts[file] += 1
        tests[f"{file}::{case.attrib['name']}"] += seconds
    return {
        "date": f"{date.today()}",
        "machine": f"{os.cpu_count()} cores of {processor()}",
        "tests": counts.total(),
        "seconds": round(files.total(), 1),
        "slowest files": {
            file: {"seconds": round(seconds, 1), "tests": counts[file]}
            for file, seconds in files.most_common(FILES)
        },
        "slowest tests": {name: round(each, 1) for name, each in tests.most_common(TESTS)},
    }


def processor() -> str:
    """Its name, as the kernel has it."""
    known = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", known.read_text() if known.exists() else "")
    return found[1] if found else "an unknown processor"


if __name__ == "__main__":
    print(json.dumps(durations(Path(sys.argv[1])), indent=1))
