"""Files that are whole or absent, and are never written through links."""

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content`; a failure leaves what was there.

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


def write_durably(path: Path, content: bytes | str) -> None:
    """Write a new file in place of any old one, and wait until the disk has it."""
    path.unlink(missing_ok=True)
    # exclusive: a link that somebody puts there meanwhile is not followed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with naming(path), os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path, first: str = "") -> None:
    """Remove a file, a link, a pipe, or a folder with all that is in it, its file `first` first."""
    if path.is_dir() and not path.is_symlink():
        if first:
            (path / first).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> bool:
    """Rename a file or folder atomically; False if its file system cannot.

    A container's overlay refuses it for folders of its lower layers.
    """
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def free_name(path: Path) -> Path:
    """The first of PATH-1, PATH-2, ... that does not exist."""
    return next(
        found
        for number in count(1)
        if not os.path.lexists(found := path.with_name(f"{path.name}-{number}"))
    )


def move(source: Path, target: Path, last: str = "") -> None:
    """Rename a file or folder; copy and remove it where the file system cannot rename it.

    The file `last`, without which the folder does not count, is copied last and removed first:
    wherever this is interrupted, one of the two places has the whole folder.
    """
    if not rename(source, target):
        _copy(source, target, last)
        sync(target.parent)
        remove(source, last)


def _copy(source: Path, target: Path, last: str) -> None:
    """Copy onto the disk; pipes and devices, which have no content, are left out."""
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
    elif source.is_dir():
        target.mkdir(exist_ok=True)
        for inner in sorted(source.iterdir(), key=lambda path: path.name == last):
            _copy(inner, target / inner.name, "")
        sync(target)
    elif source.is_file():
        write_durably(target, source.read_bytes())


def check_file(path: Path) -> None:
    """ValueError unless a file can be written at `path` itself."""
    check_link(path)
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path} is not a regular file and is not replaced: remove it, or choose another name"
        )


def check_place(path: Path) -> None:
    """As `check_file`; OSError, naming the folder, unless a file can be made there."""
    check_file(path)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path.parent)) from None


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
    """Let errors of writing name the file, as those of opening it do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync(folder: Path) -> None:
    """Wait until the disk has the folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
