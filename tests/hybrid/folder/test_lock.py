"""A run folder has one owner at a time, and one that is dead loses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from hybrid.folder import lock
from hybrid.folder.lock import Lock, TakenError, check_owner

HOLD = """
import sys, time
from pathlib import Path
from hybrid.folder import lock
lock.BEAT = float(sys.argv[2])
try:
    lock.Lock(Path(sys.argv[1]))
except lock.TakenError as error:
    print(error)
    sys.exit(3)
print("mine", flush=True)
time.sleep(60)
"""


def holder(folder: Path, beat: float = 5.0) -> subprocess.Popen[str]:
    """A process that owns the folder, or has said why not."""
    words = [sys.executable, "-c", HOLD, str(folder), str(beat)]
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


def edited(folder: Path, **changes: Any) -> None:
    """The lock as another machine would have written it."""
    file = folder / "run.lock"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def age(folder: Path, seconds: float) -> None:
    then = (folder / "run.lock").stat().st_mtime - seconds
    os.utime(folder / "run.lock", (then, then))


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
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_who_where_since_when_and_how_to_take_over_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    mine = Lock(tmp_path)
    with pytest.raises(TakenError) as error:
        Lock(tmp_path)
    said = str(error.value)
    for part in (f"job 4711, process {os.getpid()} on {os.uname().nodename}, since 20", "remove"):
        assert part in said
    assert str(tmp_path / "run.lock") in said
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_elsewhere_lives_while_its_file_is_touched(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(lock, "SILENCE", 4.0)
    other = holder(tmp_path, beat=0.2)
    assert other.stdout is not None
    other.stdout.readline()
    edited(tmp_path, machine="another")
    with pytest.raises(TakenError, match="is in use by"):
        Lock(tmp_path)
    assert "waiting for a sign of life" in capsys.readouterr().err
    other.kill()
    other.wait()
    begin = monotonic()
    Lock(tmp_path).release()
    assert 0.5 < monotonic() - begin < 30


@pytest.mark.timeout(30)
def test_a_lock_whose_time_lies_days_ahead_is_dead_unless_it_moves(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lock, "SILENCE", 0.5)
    other = Lock(tmp_path)
    other._ended.set()
    other._beats.join()
    edited(tmp_path, machine="another")
    age(tmp_path, -3 * 86_400)
    begin = monotonic()
    Lock(tmp_path).release()
    assert monotonic() - begin > 0.4


def test_an_owner_that_stood_still_finds_that_it_is_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 60.0)
    first = Lock(tmp_path)
    edited(tmp_path, machine="another")
    age(tmp_path, lock.SILENCE + 1)
    second = Lock(tmp_path)
    with pytest.raises(TakenError, match="taken over by the run of"):
        check_owner(tmp_path, first.token)
    first.release()
    check_owner(tmp_path, second.token)
    assert json.loads((tmp_path / "run.lock").read_text())["token"] == second.token
    second.release()


def test_a_lock_that_was_removed_ends_its_run_and_a_silent_server_does_not(tmp_path, monkeypatch):
    mine = Lock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(TimeoutError(110, "timed out")))
        check_owner(tmp_path, mine.token)
    (tmp_path / "run.lock").unlink()
    with pytest.raises(TakenError, match=r"run\.lock was removed or replaced while"):
        check_owner(tmp_path, mine.token)
    with pytest.raises(TakenError, match=r"run\.lock was removed or replaced while"):
        check_owner(Path(__file__), mine.token)


def test_a_process_number_that_another_has_now_is_no_owner(tmp_path) -> None:
    Lock(tmp_path)
    edited(tmp_path, born="1")
    Lock(tmp_path).release()


def test_who_dies_while_taking_over_is_followed_in_turn(tmp_path) -> None:
    Lock(tmp_path)
    edited(tmp_path, pid=2**22 + 1)
    left = json.loads((tmp_path / "run.lock").read_text())
    (tmp_path / f"run.lock.after-{left['token']}").write_text(json.dumps(left))
    Lock(tmp_path).release()


@pytest.mark.parametrize("made", ["garbage", "empty", "list", "pipe", "link"])
def test_what_is_no_lock_is_replaced_when_it_is_old(made: str, tmp_path) -> None:
    file = tmp_path / "run.lock"
    if made == "pipe":
        os.mkfifo(file)
    elif made == "link":
        file.symlink_to("/etc/passwd")
    else:
        file.write_text({"garbage": "\x1b[2J{", "empty": "", "list": "[1]"}[made])
    if made != "link":
        os.utime(file, (1, 1))
    Lock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_where_the_lock_belongs_is_named(tmp_path) -> None:
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ValueError, match=r"run\.lock is a folder where a run's lock belongs"):
        Lock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_what_a_lock_says_of_its_owner_is_printable(tmp_path) -> None:
    mine = Lock(tmp_path)
    edited(tmp_path, host="\x1b[31m\nhybrid: error", since=["x" * 10_000])
    with pytest.raises(TakenError) as error:
        Lock(tmp_path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
    mine.release()


def test_a_folder_made_for_a_run_that_wrote_nothing_goes_with_it(tmp_path) -> None:
    folder = tmp_path / "a" / "b"
    Lock(folder).release()
    assert list(tmp_path.iterdir()) == []
    mine = Lock(folder)
    (folder / "config.toml").touch()
    mine.release()
    assert (folder / "config.toml").exists()


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    mine = Lock(tmp_path)
    with pytest.raises(TakenError):
        Lock(tmp_path)
    check_owner(tmp_path, mine.token)
    edited(tmp_path, pid=2**22 + 1)
    second = Lock(tmp_path)
    check_owner(tmp_path, second.token)
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_process_of_this_host_still_owns_its_folder(tmp_path) -> None:
    job = holder(tmp_path, beat=0.1)
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signal.SIGSTOP)
    sleep(0.2)
    age(tmp_path, 10 * lock.SILENCE)
    with pytest.raises(TakenError):
        Lock(tmp_path)
    job.kill()
    job.wait()
