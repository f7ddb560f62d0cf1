"""Files of known content from the network, and safely out of their archives."""

import gzip
import logging
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hybrid.errors import one_line

MOST_BYTES = 1 << 29
"""What an archive may unpack to; CIFAR's have 190 MB."""


@dataclass(frozen=True)
class Download:
    """A file to download; `members` are the files to take out of it if it is an archive."""

    url: str
    md5: str
    folder: str
    members: tuple[str, ...] = ()

    def into(self, directory: Path) -> None:
        """Make sure that the files are in `folder` of `directory`.

        Raises OSError if the file cannot be had, ValueError if it is not the one expected.
        """
        target = directory / self.folder
        # an archive is kept beside its folder: another rank may still be reading it
        file = retrieve(self.url, self.md5, directory if self.members else target)
        if self.members:
            extract(file, self.members, target)


def retrieve(url: str, md5: str, directory: Path) -> Path:
    """The file behind `url` in `directory`, downloaded unless it is there already."""
    import pooch  # here, since it brings an HTTP client along

    logger: logging.Logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        name = PurePosixPath(url).name
        return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=name, path=directory))
    except ValueError as error:
        raise ValueError(
            f"{url} does not have the MD5 checksum {md5}: try again, or get the file elsewhere"
        ) from error
    finally:
        logger.setLevel(level)


def extract(archive: Path, members: Sequence[str], directory: Path) -> None:
    """Write the regular files of a tar.gz archive named in `members` into `directory`.

    A member is known by the last part of its name and nothing else is written, so no path of the
    archive reaches the disk. Raises ValueError if the archive is damaged, lacks a member or unpacks
    to more than MOST_BYTES.
    """
    missing = set(members)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        # a stream: no entry can send the reader back to bytes it has had
        with gzip.open(archive) as unzipped:
            bounded: Any = _Bounded(unzipped)
            with tarfile.open(fileobj=bounded, mode="r|") as tar:
                for entry in tar:
                    name = PurePosixPath(entry.name).name
                    if name in missing and entry.isfile():
                        _write(tar, entry, directory / name)
                        missing.remove(name)
    except Exception as error:  # a damaged header can raise more than tarfile's own errors
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        why = one_line(error)
        raise ValueError(f"{archive} is damaged ({why}): delete it and try again") from error
    if missing:
        raise ValueError(f"{archive} holds no {', '.join(sorted(missing))}: delete it")


class _Bounded:
    """A stream that is an error once it has given MOST_BYTES: what a small archive unpacks to."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self.stream, self.given = stream, 0

    def read(self, size: int) -> bytes:
        piece = self.stream.read(size)
        self.given += len(piece)
        if self.given > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES} bytes")
        return piece


def _write(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    # a sparse file is mostly holes, of any size, which are in no archive
    if entry.issparse() or not 0 <= entry.size <= MOST_BYTES:
        raise ValueError(f"its {path.name} claims {entry.size} bytes")
    source = tar.extractfile(entry)
    assert source is not None
    # no half-written file ever has the real name
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        temporary = Path(scratch) / path.name
        with source, temporary.open("wb") as file:
            shutil.copyfileobj(source, file)
        os.replace(temporary, path)
