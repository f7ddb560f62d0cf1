"""Files that are whole or not there, and errors that name them."""

from __future__ import annotations

import errno

import pytest

from hybrid.errors import one_line
from hybrid.folder.files import write_atomically, write_durably


def failing(*_: object) -> None:
    """What a disk says that takes no byte more."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_with_the_files_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hybrid.folder.files.os.fsync", failing)
    with pytest.raises(OSError, match="No space left") as caught:
        write_durably(tmp_path / "file", "x")
    assert caught.value.errno == errno.ENOSPC
    assert one_line(caught.value) == f"{tmp_path / 'file'}: No space left on device"


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("content", ["after", b"after"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, call, content) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    monkeypatch.setattr(f"hybrid.folder.files.os.{call}", failing)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, content)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
