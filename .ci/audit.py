"""Ask the advisory database about every installed package; a known vulnerability is a failure.

Where the database cannot be asked this says so in one line and is no failure: nothing was audited.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any


def installed() -> list[str]:
    """name==version of what this environment holds, but for what is installed from a folder."""
    command = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # a build of one's own (torch 2.13.0+cpu) has the advisories of the release
    pins = (re.fullmatch(r"([\w.-]+)==([^+\s]+)(\+\S+)?", line) for line in listed.splitlines())
    return [f"{pin[1]}=={pin[2]}" for pin in pins if pin]


def ask(pins: list[str], timeout: float = 90) -> dict[str, Any] | str:
    """pip-audit's report, or why there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins))
        file.flush()
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [sys.executable, "-m", "pip_audit", *options, "--requirement", file.name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout:g} seconds"
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return report


def verdict(report: dict[str, Any] | str) -> tuple[int, str]:
    """Exit status, and what to say."""
    if isinstance(report, str):
        return 0, f"audit: NOT AUDITED, the advisory database cannot be asked: {report[:200]}"
    packages = report["dependencies"]
    found = [
        f"audit: {package['name']} {package['version']} has {flaw['id']}"
        f" (mended in {', '.join(flaw['fix_versions']) or 'no release yet'})"
        for package in packages
        for flaw in package.get("vulns", [])
    ]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if found:
        return 1, "\n".join(found)
    if len(skipped) == len(packages):
        return 0, f"audit: NOT AUDITED, the database knows none of {len(packages)} packages here"
    left = f"; not audited: {', '.join(skipped)}" if skipped else ""
    return 0, f"audit: {len(packages) - len(skipped)} packages, no known vulnerability{left}"


def main() -> int:
    """Audit this environment."""
    status, text = verdict(ask(installed()))
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
