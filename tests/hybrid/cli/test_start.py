"""Help, the version and wrong words are answered at once: without torch."""

import resource
import subprocess
import sys

import pytest

BUDGET_SECONDS = 0.7
PROGRAM = """
import sys
from hybrid.__main__ import main
try:
    main()
finally:
    print("heavy:", sorted({"torch", "mpi4py", "numpy"} & sys.modules.keys()), file=sys.stderr)
"""


def seconds_and_said(words):
    """Processor time, which other processes of this machine have no part in, and all output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--help",), "Commands:"),
        (("--version",), "hybrid 0.1.0"),
        (("train", "--help"), "Example:"),
        (("bench", "--help"), "Example:"),
        (("train", "--modle", "x"), "No such option: --modle"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_needs_no_torch_comes_without_it_and_at_once(words, said):
    # the least of a few: a core that is shared with a busy neighbor counts slower, never faster
    for _ in range(4):
        seconds, output = seconds_and_said(words)
        assert said in output
        assert "heavy: []" in output
        if seconds < BUDGET_SECONDS:
            return
    pytest.fail(f"{seconds:.2f} s of processor time, the budget is {BUDGET_SECONDS} s")
