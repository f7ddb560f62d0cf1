"""Compiled code is found again only in folders that nobody else could write to."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from hybrid.ranks import caches


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in caches._VARIABLES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return tmp_path / f"hybrid-{os.getuid()}"


def test_the_caches_lie_in_a_folder_of_mode_700(folder, monkeypatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "/elsewhere")
    for _ in range(2):
        caches.keep_private()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert os.environ["CUPY_CACHE_DIR"] == "/elsewhere"


@pytest.mark.parametrize("made", ["open to the group", "another's", "a link", "a file"])
def test_a_folder_that_another_may_have_made_is_refused(made: str, folder, tmp_path) -> None:
    if made == "a link":
        (tmp_path / "mine").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "mine")
    elif made == "a file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
    if made == "open to the group":
        folder.chmod(0o770)
    elif made == "another's":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    with pytest.raises(OSError if made == "a file" else ValueError, match=str(folder)):
        caches.keep_private()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
