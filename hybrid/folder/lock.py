"""Whose a run folder is: one run's at a time."""

import errno
import json
import os
import socket
import threading
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

from hybrid.errors import printable, tell
from hybrid.reading import read_whole

BEAT = 5.0
"""Seconds from one sign of life to the next."""
SILENCE = 90.0
"""Seconds without one after which an owner elsewhere counts as dead; network file systems may show
a change a minute late."""
_NAME = "run.lock"
_MOST_BYTES = 1 << 16


class TakenError(ValueError):
    """Another run owns the folder."""


class Lock:
    """`run.lock` in a run folder: who makes it owns the folder until it is removed.

        .run.lock.TOKEN                who wants the folder writes who it is,
        -> run.lock                    and links it to this name, which one alone can do;
        -> run.lock.after-DEAD         or, where the owner DEAD has ended without removing it, to
        -> run.lock                    this one, and then renames that over the dead one's.

    An owner lives while its process does, where that can be seen: on the same boot of the same
    host. Elsewhere it lives while its file is touched, which a thread does every `BEAT` seconds,
    by the clock of the file system, which is the same for all. An owner that stood still for
    `SILENCE` seconds and goes on finds that it is none any more. Raises TakenError (a ValueError)
    if the folder has an owner, OSError if nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _NAME
        self.token = token_hex(4)
        self._made = _made(folder)
        self._mine = folder / f".{_NAME}.{self.token}"
        self._ended = threading.Event()
        try:
            self._descriptor = os.open(self._mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            os.write(self._descriptor, json.dumps(_myself(self.token)).encode())
            os.fsync(self._descriptor)
            self._acquire()
        except BaseException:
            self._end(leaving=self._made)
            raise
        self._mine.unlink(missing_ok=True)
        self._beats = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._beats.start()

    def check(self) -> None:
        """TakenError if the folder has got another owner since, or none.

        A file server that does not answer is no reason to end.
        """
        try:
            os.stat(self.path)
        except FileNotFoundError:
            why = f"{self.path} was removed while this run owned the folder"
        except OSError:
            return
        else:
            if self._is_mine():
                return
            owner = _told(_read(self.path))
            why = f"{self.path.parent} was taken over by {owner} while this run stood still"
        raise TakenError(f"{why}: it ends here, and has written nothing since")

    def release(self) -> None:
        """Give the folder up; one that is empty, and was made for the run, goes too."""
        if self._is_mine():
            with suppress(OSError):
                self.path.unlink()
        self._end(leaving=self._made)
        self._beats.join()
        os.close(self._descriptor)

    def _acquire(self) -> None:
        limit = monotonic() + 2 * SILENCE
        while not self._link(self.path):
            owner = _read(self.path)
            if owner is None:
                continue  # it has just gone
            if self._shows_life(owner) or monotonic() > limit:
                raise TakenError(
                    f"{self.path.parent} is in use by {_told(owner)}: wait for its end or choose "
                    f"another --out; if that run is gone for certain, remove {self.path}"
                )
            self._take_over(str(owner.get("token")))

    def _shows_life(self, owner: dict[str, Any]) -> bool:
        """Whether the owner lives; where only its silence tells, it is waited for."""
        alive, seen = _lives(owner), _touched(self.path)
        if alive is None and (silent := self._silence()) < SILENCE:
            tell(
                f"hybrid: {self.path.parent} belongs to {_told(owner)}, silent for "
                f"{max(0.0, silent):.0f} s: waiting for a sign of life"
            )
            # by this clock: a file's time may lie days ahead, and what counts is that it moves
            end = monotonic() + SILENCE - max(0.0, silent)
            while _touched(self.path) == seen and monotonic() < end:
                sleep(min(0.5, max(0.0, end - monotonic())))
            return _touched(self.path) != seen
        return bool(alive)

    def _take_over(self, dead: str) -> None:
        """Follow a dead owner, unless somebody else does; `_link` then tells who has."""
        turn = self.path.with_name(f"{_NAME}.after-{printable(dead, 16).replace('/', '')}")
        if self._link(turn):
            owner = _read(self.path)
            if owner is not None and str(owner.get("token")) == dead:
                with suppress(FileNotFoundError):
                    os.replace(turn, self.path)
            else:
                turn.unlink(missing_ok=True)
            return
        other = _read(turn)
        if other is not None and (_lives(other) is False or self._silence(turn) > SILENCE):
            turn.unlink(missing_ok=True)  # it ended in the middle
        sleep(0.1)

    def _link(self, name: Path) -> bool:
        """Whether this process's file now has that name, too."""
        try:
            os.link(self._mine, name)
        except FileExistsError:
            return self._is_mine(name)  # over a network the answer to a first try may be lost
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            return self._make(name)
        return True

    def _make(self, name: Path) -> bool:
        """As `_link`, where the file system has no links: a file of its own."""
        try:
            made = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return self._is_mine(name)
        os.write(made, self._mine.read_bytes())
        os.dup2(made, self._descriptor)
        os.close(made)
        return True

    def _silence(self, name: Path | None = None) -> float:
        """Seconds since the owner's last sign of life, by the clock of the file system."""
        os.utime(self._descriptor)
        return os.fstat(self._descriptor).st_mtime - _touched(name or self.path)

    def _is_mine(self, name: Path | None = None) -> bool:
        try:
            return os.path.samestat(os.stat(name or self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with suppress(OSError):
                os.utime(self._descriptor)

    def _end(self, leaving: list[Path]) -> None:
        self._ended.set()
        with suppress(OSError):
            self._mine.unlink(missing_ok=True)
        for folder in leaving:
            with suppress(OSError):
                folder.rmdir()


def _touched(path: Path) -> float:
    """When a file was touched last; opened, because what is cached of one may be old."""
    with suppress(OSError), open(path, "rb", opener=_quickly) as file:
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def _quickly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _made(folder: Path) -> list[Path]:
    """Make the folder; gives those that were not there, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _myself(token: str) -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID", "")
    return {
        "token": token,
        "job": job,
        "host": socket.gethostname(),
        "since": datetime.now().isoformat(" ", "seconds"),
        "pid": os.getpid(),
        "born": _born(os.getpid()),
        "machine": _machine(),
    }


def _told(owner: dict[str, Any] | None) -> str:
    """An owner in words; whatever the file says is printable."""
    found = {name: printable(str(value), 60) for name, value in (owner or {}).items()}
    job = f"job {found['job']}, " if found.get("job") else ""
    return (
        f"the run of {job}process {found.get('pid', '?')} on {found.get('host', '?')}, since "
        f"{found.get('since', '?')}"
    )


def _read(path: Path) -> dict[str, Any] | None:
    """What a lock says of its owner; None if it is gone, nothing of one that cannot be read."""
    try:
        found = json.loads(read_whole(path, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _lives(owner: dict[str, Any]) -> bool | None:
    """Whether the owner's process is there; None where that cannot be seen from here."""
    pid = owner.get("pid")
    if not _machine() or owner.get("machine") != _machine() or type(pid) is not int:
        return None
    return bool(_born(pid)) and _born(pid) == owner.get("born")


def _machine() -> str:
    """The boot of this host, and the process numbers that count here; empty where none is told."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _born(pid: int) -> str:
    """When a process began, in ticks since the boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, OverflowError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]
