"""The audit of dependencies fails for a vulnerability, and says so where nothing was audited."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

audit = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "audit.py")))

CLEAN = {"name": "numpy", "version": "2.4.6", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}
FLAWED = {
    "name": "rich",
    "version": "15.0.0",
    "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["15.0.1"]}],
}


@pytest.mark.parametrize(
    ("packages", "status", "said"),
    [
        ([CLEAN], 0, "audit: 1 packages, no known vulnerability"),
        ([CLEAN, UNKNOWN], 0, "audit: 1 packages, no known vulnerability; not audited: torch"),
        ([UNKNOWN], 0, "audit: NOT AUDITED, the database knows none of 1 packages here"),
        ([CLEAN, FLAWED], 1, "audit: rich 15.0.0 has PYSEC-2026-1 (mended in 15.0.1)"),
    ],
)
def test_only_a_known_vulnerability_fails_and_is_named(packages, status, said):
    assert audit.verdict({"dependencies": packages}) == (status, said)


def test_without_the_database_one_line_says_that_nothing_was_audited():
    status, said = audit.verdict("Connection refused")
    assert (status, said.count("\n")) == (0, 0)
    assert "NOT AUDITED" in said
    assert "Connection refused" in said
