"""What the doctor says of folders and shared memory."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hybrid.doctor import machine


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("tempfile.NamedTemporaryFile", "Permission denied"),
        ("hybrid.doctor.machine.soon", "no answer"),
    ],
)
def test_a_folder_that_cannot_be_written_to_or_does_not_answer_is_a_finding(
    monkeypatch, tmp_path, place, reason
) -> None:
    monkeypatch.setattr(place, failing(OSError(13, reason, str(tmp_path))))
    (found,) = machine.run_folder(tmp_path, None)
    assert (found.subject, "--out" in found.remedy) == ("run folder", True)
    assert reason in found.value


def test_a_folder_is_not_made_and_too_little_shared_memory_is_pointed_out(
    monkeypatch, tmp_path
) -> None:
    assert not machine.run_folder(tmp_path / "not" / "yet", None)[0].remedy
    assert list(tmp_path.iterdir()) == []
    full = os.statvfs_result((4096, 4096, 16384, 1, 1, 100, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    (shared,) = machine.shared_memory()
    assert (shared.value, "--shm-size" in shared.remedy) == ("64 MB", True)


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path) -> None:
    def check(*others):
        comm = SimpleNamespace(bcast=lambda name: name, allgather=lambda sees: [sees, *others])
        return machine.run_folder(tmp_path, comm)

    assert not check([True])[0].remedy
    (found,) = check([True], [False])
    assert (found.value.split(" does")[0], "--out" in found.remedy) == ("rank 2", True)
    assert list(tmp_path.iterdir()) == []
