"""A run folder has one owner at a time, and one that is dead loses it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from hybrid.folder import lock
from hybrid.folder.lock import Lock, TakenError, check_owner

HOLD = """
import sys, time
from pathlib import Path
from hybrid.folder import lock
try:
    owner = lock.Lock(Path(sys.argv[1]))
except lock.TakenError as error:
    print(error)
    sys.exit(3)
print("mine", flush=True)
time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that owns the folder, or has said why not."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def edited(folder: Path, **changes: Any) -> None:
    """The lock as another machine would have written it."""
    file = folder / "run.lock"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("dead", [False, True], ids=["free", "after a dead owner"])
def test_of_many_that_start_at_once_one_owns_the_folder(dead: bool, tmp_path) -> None:
    """Eight processes: what it costs is their start."""
    if dead:
        first = holder(tmp_path)
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
        first.wait()
    jobs = [holder(tmp_path) for _ in range(8)]
    try:
        said = [job.stdout.readline() for job in jobs if job.stdout is not None]
        owner = jobs[said.index("mine\n")]
        assert said.count("mine\n") == 1
        refused = f"{tmp_path} is in use by the run of process {owner.pid} on "
        assert sum(line.startswith(refused) for line in said) == 7
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
        owner.send_signal(signal.SIGSTOP)
        with pytest.raises(TakenError):  # a stopped process still owns its folder
            Lock(tmp_path)
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def test_who_owns_it_where_and_since_when_is_said_in_printable_words(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    owner = Lock(tmp_path)
    with pytest.raises(TakenError) as error:
        Lock(tmp_path)
    for part in (
        f"job 4711, process {os.getpid()} on {os.uname().nodename}, since 20",
        "another folder",
    ):
        assert part in str(error.value)
    edited(tmp_path, run="\x1b[31m\nhybrid: error" + "x" * 10_000)
    with pytest.raises(TakenError) as error:
        Lock(tmp_path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
    owner.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_on_another_host_is_waited_for(tmp_path, monkeypatch, capsys) -> None:
    """A file server needs some time to find that a host is lost."""
    monkeypatch.setattr(lock, "PATIENCE", 0.5)
    owner = Lock(tmp_path)
    edited(tmp_path, host="another")
    begin = monotonic()
    with pytest.raises(TakenError, match="is in use by"):
        Lock(tmp_path)
    assert monotonic() - begin > 0.4
    assert capsys.readouterr().err.count("waiting 0.5 s in case that host is lost") == 1
    owner.release()
    Lock(tmp_path).release()


@pytest.mark.parametrize("fault", [errno.ENOSYS, errno.ENOLCK], ids=errno.errorcode.get)
def test_without_locks_the_run_that_started_last_owns_the_folder(
    fault, tmp_path, monkeypatch, capsys
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = Lock(tmp_path), Lock(tmp_path)
    assert "is on a file system without locks" in capsys.readouterr().err
    with pytest.raises(TakenError, match="taken over by the run of process"):
        check_owner(tmp_path, first.token)
    check_owner(tmp_path, second.token)


def test_a_lock_that_was_removed_ends_its_run_and_a_silent_server_does_not(tmp_path, monkeypatch):
    owner = Lock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(TimeoutError(110, "timed out")))
        check_owner(tmp_path, owner.token)
    (tmp_path / "run.lock").unlink()
    for place in (tmp_path, Path(__file__)):
        with pytest.raises(TakenError, match=r"run\.lock was removed or replaced while"):
            check_owner(place, owner.token)
    second = Lock(tmp_path)
    owner.release()
    check_owner(tmp_path, second.token)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "hard link"])
def test_what_is_no_lock_is_named_and_left_alone(kind: str, tmp_path) -> None:
    file, theirs = tmp_path / "run.lock", tmp_path / "theirs"
    theirs.write_text("theirs")
    make = {"pipe": os.mkfifo, "folder": os.mkdir}.get(kind)
    if make is not None:
        make(file)
    else:
        (file.symlink_to if kind == "link" else file.hardlink_to)(theirs)
    with pytest.raises(ValueError, match=f"{file} .*remove it") as error:
        Lock(tmp_path)
    assert "\n" not in str(error.value)
    assert theirs.read_text() == "theirs"
