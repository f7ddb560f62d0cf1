"""Files that are whole or not there, and errors that name them."""

from __future__ import annotations

import errno

import pytest

from hybrid.errors import one_line
from hybrid.folder.files import write_atomically, write_durably


@pytest.fixture
def full(monkeypatch) -> None:
    """A disk that takes no byte more."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hybrid.folder.files.os.fsync", fsync)


def test_a_full_disk_is_told_with_the_files_name(tmp_path, full) -> None:
    path = tmp_path / "file"
    with pytest.raises(OSError, match="No space left") as caught:
        write_durably(path, "x")
    assert caught.value.errno == errno.ENOSPC
    assert one_line(caught.value) == f"{path}: No space left on device"


def test_a_failed_write_leaves_what_was_there(tmp_path, request) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")
    request.getfixturevalue("full")
    with pytest.raises(OSError, match=str(path.name)):
        write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
