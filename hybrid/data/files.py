"""Files of known content from the network, and CIFAR's binary format; faults name the file."""

import logging
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

PIXELS = 3 * 32 * 32
"""Bytes of one of CIFAR's images."""


@dataclass(frozen=True)
class Download:
    """A tar.gz archive to download, and the files to take out of it."""

    url: str
    md5: str
    folder: str
    members: tuple[str, ...]

    def into(self, directory: Path) -> None:
        """Make sure that the files are in `folder` of `directory`.

        Raises OSError if the archive cannot be had, ValueError if it is not the one expected.
        """
        # the archive is kept beside its folder: another rank may still be reading it
        archive = retrieve(self.url, self.md5, directory)
        extract(archive, self.members, directory / self.folder)


def retrieve(url: str, md5: str, directory: Path) -> Path:
    """The file behind `url` in `directory`, downloaded unless it is there with this checksum."""
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
    """Write the files of an archive of known content named in `members` into `directory`.

    A member is known by the last part of its name, so no path of the archive reaches the disk, and
    no half-written file ever has the real name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar, tempfile.TemporaryDirectory(dir=directory) as scratch:
        for entry in tar:
            name = PurePosixPath(entry.name).name
            source = tar.extractfile(entry) if name in members else None
            if source is not None:
                temporary = Path(scratch) / name
                with source, temporary.open("wb") as file:
                    shutil.copyfileobj(source, file)
                os.replace(temporary, directory / name)


def read_cifar_binary(
    paths: Sequence[Path], label_bytes: int, records: int | None = None
) -> tuple[Tensor, Tensor]:
    """Images, uint8 `(N, 3, 32, 32)`, and labels, int64 `(N,)`, of the files one after another.

    `label_bytes` is 1 for CIFAR-10 and 2 for CIFAR-100, whose second is the fine label; `records`
    is the number of images each file must hold (None: any). Raises ValueError on another size or
    on a label of no class.
    """
    record, classes = label_bytes + PIXELS, 10 if label_bytes == 1 else 100
    images, labels = [], []
    for path in paths:
        size = path.stat().st_size
        expected = record * (max(1, size // record) if records is None else records)
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes, expected {expected} "
                f"({expected // record} records of {record}): download it again"
            )
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(-1, record)
        images.append(data[:, label_bytes:].reshape(-1, 3, 32, 32))
        labels.append(data[:, label_bytes - 1].long())
        if int(labels[-1].max()) >= classes:
            index = int((labels[-1] >= classes).nonzero()[0])
            raise ValueError(
                f"{path} has the label {int(labels[-1][index])} at image {index}, "
                f"outside 0..{classes - 1}: download it again"
            )
    return torch.cat(images), torch.cat(labels)
