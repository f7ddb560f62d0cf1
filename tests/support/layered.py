"""Folders that cannot be renamed, as those of a container's image: mounted, or by pretending."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


@contextmanager
def mounted(lower: Path) -> Iterator[Path]:
    """Where the folder `lower` is below an overlay; OSError where none can be mounted."""
    beside = [lower.with_name(f"{lower.name}-{name}") for name in ("upper", "work", "merged")]
    for folder in beside:
        folder.mkdir()
    upper, work, merged = beside
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr)
    try:
        yield merged
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)


@contextmanager
def pretended(lower: Path) -> Iterator[Path]:
    """The same by an os.replace that refuses folders which are there by now."""
    there = {folder.stat().st_ino for folder in (lower, *lower.rglob("*")) if folder.is_dir()}
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if os.path.isdir(source) and os.stat(source).st_ino in there:
            text = os.strerror(errno.EXDEV)
            raise OSError(errno.EXDEV, text, str(source), None, str(target))
        real(source, target)

    with mock.patch("os.replace", replace):
        yield lower
