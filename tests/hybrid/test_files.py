"""Files that are whole or not there, and errors that name them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hybrid.errors import one_line
from hybrid.files import write_atomically, write_durably


def test_a_full_disk_is_told_with_the_files_name() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        write_durably(Path("/dev/full"), "x")
    assert caught.value.errno == errno.ENOSPC
    assert one_line(caught.value) == "/dev/full: No space left on device"


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hybrid.files.os.fsync", full)
    with pytest.raises(OSError, match=str(path.name)):
        write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
