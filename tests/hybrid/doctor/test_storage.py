"""What the doctor says of file systems, by made-up mounts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hybrid.doctor import storage

MOUNTS = """\
rootfs / ext4 rw 0 0
server:/home {base}/home nfs4 rw,vers=4.2 0 0
scratch {base}/scratch lustre rw 0 0
tmpfs {base}/with\\040space tmpfs rw 0 0
/dev/sdb {base}/home/ada/local xfs rw 0 0
nonsense
"""


@pytest.fixture
def mounts(tmp_path):
    """A /proc/mounts with an NFS home, a Lustre scratch and a disk of the host in the home."""
    for name in ("home/ada/local", "scratch", "with space"):
        (tmp_path / name).mkdir(parents=True)
    file = tmp_path / "mounts"
    file.write_text(MOUNTS.format(base=tmp_path))
    return file


def by_subject(findings):
    return {finding.subject: finding for finding in findings}


def refusing(error):
    def refuse(*_, **__):
        raise error

    return refuse


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("home/ada", "nfs4, a network file system"),
        ("home/ada/local/not/there", "xfs, of this host"),
        ("scratch", "lustre, a network file system"),
        ("scratchy", "ext4, of this host"),
        ("with space", "tmpfs, of this host"),
    ],
)
def test_a_path_is_on_the_innermost_mount(mounts, tmp_path, path, kind) -> None:
    assert storage.file_system(tmp_path / path, mounts) == kind
    assert storage.file_system(tmp_path / path, tmp_path / "none") == "unknown"


def test_a_run_folder_of_one_host_is_pointed_out_to_many(mounts, tmp_path) -> None:
    local = tmp_path / "home/ada/local"
    assert "all see" in by_subject(storage.run_folder(local, 2, mounts))["run folder"].remedy
    assert not by_subject(storage.run_folder(local, 1, mounts))["run folder"].remedy
    scratch = tmp_path / "scratch/new/runs"
    assert not by_subject(storage.run_folder(scratch, 2, mounts))["run folder"].remedy
    assert not scratch.exists()


def test_a_folder_that_cannot_be_written_to_is_a_finding(monkeypatch, mounts, tmp_path) -> None:
    denied = PermissionError(13, "Permission denied", str(tmp_path))
    monkeypatch.setattr("tempfile.TemporaryFile", refusing(denied))
    (found,) = storage.run_folder(tmp_path, 1, mounts)
    assert (found.subject, "--out" in found.remedy) == ("run folder", True)
    assert "Permission denied" in found.value


@pytest.mark.parametrize(
    ("blocks", "files", "warned"), [(1, 10, True), (1 << 20, 10, False), (1 << 20, 0, True)]
)
def test_too_little_space_or_no_file_left_is_pointed_out(
    monkeypatch, tmp_path, blocks, files, warned
) -> None:
    full = os.statvfs_result((4096, 4096, 1 << 21, blocks, blocks, 100, files, files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    (found,) = storage.free_space(tmp_path)
    assert bool(found.remedy) == warned


def test_a_slow_disk_is_pointed_out_and_nothing_is_left_on_it(monkeypatch, tmp_path) -> None:
    assert not storage.durable_write(tmp_path)[0].remedy
    monkeypatch.setattr(storage, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.1))
    assert "checkpoint.every" in storage.durable_write(tmp_path)[0].remedy
    assert list(tmp_path.iterdir()) == []


def test_caches_python_and_temporary_files_in_a_network_home_are_pointed_out(
    monkeypatch, mounts, tmp_path
) -> None:
    home = str(tmp_path / "home/ada")
    monkeypatch.setattr("site.getsitepackages", lambda: [f"{home}/.venv/lib"])
    found = by_subject(
        storage.homes({"HOME": home, "CUPY_CACHE_DIR": f"{home}/.cupy", "TMPDIR": home}, mounts)
    )
    assert "container" in found["Python"].remedy
    assert "unset CUPY_CACHE_DIR" in found["CuPy cache"].remedy
    assert "export TMPDIR" in found["TMPDIR"].remedy
    local = {"HOME": home, "CUPY_CACHE_DIR": f"{home}/local/c", "TMPDIR": f"{home}/local"}
    missing = {"HOME": "/", "TMPDIR": str(tmp_path / "none")}
    assert "written" in by_subject(storage.homes(missing, mounts))["TMPDIR"].value
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path / "scratch")])
    assert not any(finding.remedy for finding in storage.homes(local, mounts))


def test_a_server_that_does_not_answer_is_a_finding_not_a_hang(monkeypatch, mounts) -> None:
    monkeypatch.setattr(storage, "soon", refusing(OSError("no answer in 10 s")))
    for finding in (*storage.homes({}, mounts), *storage.run_folder(Path("/"), 1, mounts)):
        assert "no answer" in finding.value
        assert finding.remedy


def test_data_that_one_rank_cannot_read_is_pointed_out(tmp_path) -> None:
    good, bad = storage.readable(tmp_path), storage.readable(tmp_path / "none")
    assert not storage.data_folder(tmp_path, True, [good, good])[0].remedy
    (found,) = storage.data_folder(tmp_path, True, [good, bad])
    assert found.value.startswith("rank 1 cannot read it: ")
    assert "HYBRID_DATA" in found.remedy
    assert storage.data_folder(tmp_path, True, [bad, bad])[0].remedy
    assert not storage.data_folder(tmp_path, False, [bad, bad])[0].remedy


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path) -> None:
    def check(seen):
        return storage.same_folder(tmp_path, lambda name: name, lambda mine: [mine, *seen])

    assert not check([True])[0].remedy
    (found,) = check([True, False])
    assert (found.value.split(" does")[0], "--out" in found.remedy) == ("rank 2", True)
    assert list(tmp_path.iterdir()) == []
