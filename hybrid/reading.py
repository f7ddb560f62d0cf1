"""The only way to read files that others may have put there, in run folders above all.

A folder may hold a pipe, which would block a reader for ever, a link to another user's file, or a
file of any size that takes no room on the disk.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_OF_LINES = 1 << 30
"""The largest file of lines; an hour of a small run has half a million bytes."""
MOST_OF_A_LINE = 1 << 24


def opened(path: Path, most: int, links: bool = False) -> BinaryIO:
    """A regular file of at most `most` bytes; ValueError for anything else, by any of `links`."""
    if path.is_symlink() and not links:
        raise ValueError(f"{path} is a link, which is not followed: put the file itself there")
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    found = os.fstat(descriptor)
    said = ""
    if not stat.S_ISREG(found.st_mode):
        said = f"{path} is not a regular file, which it must be"
    elif found.st_size > most:
        said = (
            f"{path} has {found.st_size} bytes, more than the {most} it may have: it is damaged, "
            "or not what its name says"
        )
    elif found.st_size > _memory() // 2:
        said = (
            f"{path} has {found.st_size} bytes, more than this machine's memory has room for: it "
            "is damaged, or of a larger machine"
        )
    if said:
        os.close(descriptor)
        raise ValueError(said)
    return os.fdopen(descriptor, "rb")


def read_whole(path: Path, most: int, links: bool = False) -> bytes:
    """The content of such a file."""
    with opened(path, most, links) as file:
        return file.read(most + 1)[:most]


def read_lines(
    path: Path, most: int = MOST_OF_LINES, longest: int = MOST_OF_A_LINE
) -> Iterator[bytes]:
    """The complete lines of such a file, with their breaks; a killed run may leave half a line.

    One at a time, so that who wants a bounded number of them reads no more. ValueError for a line
    of more than `longest` bytes, as a hole in a file is.
    """
    with opened(path, most) as file:
        number = 0
        while line := file.readline(longest + 1):
            number += 1
            if len(line) > longest:
                raise ValueError(
                    f"{path} line {number} has more than {longest} bytes: it is damaged, so "
                    "remove the line"
                )
            if line.endswith(b"\n"):
                yield line


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
