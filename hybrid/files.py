"""Files that others may have made are read in one way; files are written whole or not at all.

A folder may hold a pipe, which would block a reader for ever, a link to another user's file, or a
file of any size that takes no room on the disk. Nothing is written through a link either.
"""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MOST_OF_LINES = 1 << 30
"""The largest file of lines; an hour of a small run has half a million bytes."""
MOST_OF_A_LINE = 1 << 24


def opened(path: Path, most: int, links: bool = False) -> BinaryIO:
    """Open a regular file of at most `most` bytes; ValueError for anything else, by any of `links`.

    Half of the memory has to hold it.
    """
    if path.is_symlink() and not links:
        raise ValueError(f"{path} is a link, which is not followed: put the file itself there")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    status = os.fstat(descriptor)
    fault = ""
    if not stat.S_ISREG(status.st_mode):
        fault = "is not a regular file, which it must be"
    elif status.st_size > most:
        fault = (
            f"has {status.st_size} bytes, more than the {most} it may have: it is damaged, or not "
            "what its name says"
        )
    elif status.st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
        fault = (
            f"has {status.st_size} bytes, more than this machine's memory has room for: it is "
            "damaged, or of a larger machine"
        )
    if fault:
        os.close(descriptor)
        raise ValueError(f"{path} {fault}")
    return os.fdopen(descriptor, "rb")


def read_whole(path: Path, most: int, links: bool = False) -> bytes:
    """The content of such a file."""
    with naming(path), opened(path, most, links) as file:
        return file.read(most + 1)[:most]


def read_part(path: Path, offset: int, size: int) -> bytes:
    """Some bytes of a file; OSError if it ends before them."""
    with naming(path), path.open("rb", buffering=0) as file:
        content = os.pread(file.fileno(), size, offset)
        if len(content) < size:
            raise OSError(errno.EIO, f"it ends before byte {offset + size}", str(path))
        return content


def write_part(path: Path, offset: int, content: bytes) -> None:
    """Write bytes at their place in a file, which begins anew with its first byte."""
    check_file(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if offset else os.O_TRUNC)
    with naming(path), os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.seek(offset)
        file.write(content)


def read_lines(
    path: Path, most: int = MOST_OF_LINES, longest: int = MOST_OF_A_LINE
) -> Iterator[bytes]:
    """The complete lines of such a file, with their breaks; a killed run may leave half a line.

    One at a time, so that who wants a bounded number of them reads no more. ValueError for a line
    of more than `longest` bytes, as a hole in a file is.
    """
    with naming(path), opened(path, most) as file:
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


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content`; a failure leaves the file unchanged.

    Raises ValueError if `path` is a link, a folder or a device.
    """
    check_file(path)
    # a name of its own: another process may be writing the same file
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        write_durably(partial, content)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def whole_folder(path: Path, names: str) -> Iterator[Path]:
    """Give an empty folder to write into, which replaces `path` if the body succeeds.

    ValueError if `path` is anything but a folder of files whose names match `names`, a regular
    expression.
    """
    check_folder(path)
    for each in sorted(path.iterdir()) if path.exists() else ():
        if not (re.fullmatch(names, each.name) and each.is_file() and not each.is_symlink()):
            raise ValueError(
                f"{path} has {each.name} in it, which would be lost: choose another name, or "
                "remove the folder"
            )
    place = path.absolute()
    if path.exists() and os.path.exists(".") and Path.cwd().is_relative_to(path.resolve()):
        raise ValueError(
            f"{path} is the folder that this command was given in, and is replaced as a whole: "
            "name a new one"
        )
    name = f".{place.name}.{secrets.token_hex(4)}"
    partial, old = (place.with_name(f"{name}.{end}") for end in ("partial", "old"))
    try:
        with naming(path):
            partial.mkdir()
        yield partial
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        if path.exists():
            os.replace(place, old)
        try:
            os.replace(partial, place)
        except OSError:
            if old.exists():
                os.replace(old, place)
            raise
    finally:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
    sync(place.parent)


def write_durably(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write a new file in place of any old one, and wait until the disk has it."""
    content = content.encode() if isinstance(content, str) else content
    path.unlink(missing_ok=True)
    # exclusive: a link that somebody puts there meanwhile is not followed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with naming(path), os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        for part in [content] if isinstance(content, bytes) else content:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a folder's entries, or a file's content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path, first: str = "") -> None:
    """Remove a file, a link, a pipe, or a folder with all that is in it, its file `first` first."""
    if path.is_dir() and not path.is_symlink():
        if first:
            (path / first).unlink(missing_ok=True)
        try:
            shutil.rmtree(path)
        except RecursionError:
            raise ValueError(
                f"{path} has folders in folders, too deep to be removed here: rm -r does it"
            ) from None
    else:
        path.unlink(missing_ok=True)


def check_file(path: Path) -> None:
    """ValueError unless a file can be written at `path` itself."""
    check_link(path)
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path} is not a regular file and is not replaced: remove it, or choose another name"
        )


def check_folder(path: Path) -> None:
    """ValueError unless `path` itself is a folder, or can become one."""
    check_link(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file where a folder must be: remove it, or choose another")


def check_link(path: Path) -> None:
    """ValueError if `path` is a link."""
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, and nothing is written through a link: "
            "remove it, or name the place itself"
        )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of reading and writing name this path, as those of opening it do."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename == str(path):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
