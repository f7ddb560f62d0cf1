"""The lock of a run folder, which one run owns at a time."""

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
"""Seconds without one after which an owner on another host counts as dead; network file systems may
show a change a minute late."""
_NAME = "run.lock"
_MOST_BYTES = 1 << 16


class TakenError(ValueError):
    """Another run owns the folder."""


class Lock:
    """`run.lock` in a run folder: the process that makes it owns the folder until it removes it.

        .run.lock.TOKEN                a process that wants the folder describes itself here,
        -> run.lock                    and links the file to this name, which only one can do;
        -> run.lock.after-DEAD         or, if the owner DEAD has ended without removing its lock,
        -> run.lock                    to this name, which it then renames over the dead lock.

    On the same boot of the same host an owner is alive while its process is. Elsewhere it is alive
    while its file is touched, which a thread does every `BEAT` seconds; times are those of the file
    system's clock, which is the same for all hosts. An owner that was suspended for `SILENCE`
    seconds finds that it has lost the folder. Raises TakenError (a ValueError) if the folder has an
    owner, OSError if nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _NAME
        self.token = token_hex(4)
        self._made = _make_folder(folder)
        self._mine = folder / f".{_NAME}.{self.token}"
        self._ended = threading.Event()
        try:
            self._descriptor = os.open(self._mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            os.write(self._descriptor, json.dumps(_this_process(self.token)).encode())
            os.fsync(self._descriptor)
            self._acquire()
        except BaseException:
            self._end(leaving=self._made)
            raise
        self._mine.unlink(missing_ok=True)
        self._beats = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._beats.start()

    def release(self) -> None:
        """Give the folder up; remove it if this made it and it is empty."""
        mine = self._is_mine()
        if mine:
            with suppress(OSError):
                self.path.unlink()
        self._end(leaving=self._made if mine else [])
        self._beats.join()
        os.close(self._descriptor)

    def _acquire(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            raise ValueError(f"{self.path} is a folder where a run's lock belongs: remove it")
        limit = monotonic() + 2 * SILENCE
        while not self._link(self.path):
            owner = _read(self.path)
            if owner is None:
                continue  # it has just gone
            if self._shows_life(owner) or monotonic() > limit:
                raise TakenError(
                    f"{self.path.parent} is in use by {_described(owner)}: wait for its end or "
                    f"choose another --out; if that run is gone for certain, remove {self.path}"
                )
            self._take_over(str(owner.get("token")))

    def _shows_life(self, owner: dict[str, Any]) -> bool:
        """Whether the owner is alive; for one on another host this waits out its silence."""
        alive, seen = _is_alive(owner), _touched_at(self.path)
        if alive is None and (silent := self._silence()) < SILENCE:
            tell(
                f"hybrid: {self.path.parent} belongs to {_described(owner)}, silent for "
                f"{max(0.0, silent):.0f} s: waiting for a sign of life"
            )
            # by this clock: a file's time may be days ahead, and only its change counts
            end = monotonic() + SILENCE - max(0.0, silent)
            while _touched_at(self.path) == seen and monotonic() < end:
                sleep(min(0.5, max(0.0, end - monotonic())))
            return _touched_at(self.path) != seen
        return bool(alive)

    def _take_over(self, dead: str) -> None:
        """Replace a dead owner's lock, unless another process does; `_link` then shows who has."""
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
        if other is not None and (_is_alive(other) is False or self._silence(turn) > SILENCE):
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
            return self._copy(name)
        return True

    def _copy(self, name: Path) -> bool:
        """The same as `_link` by a new file, on a file system without links."""
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
        return os.fstat(self._descriptor).st_mtime - _touched_at(name or self.path)

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


def check_owner(folder: Path, token: str) -> None:
    """TakenError if a folder is not that of the run with this token any more; any rank may ask.

    A file server that does not answer is no reason to end the run.
    """
    path = folder / _NAME
    try:
        owner = _read(path)
    except NotADirectoryError:
        owner = None
    except OSError:
        return
    if owner and owner.get("token") == token:
        return
    why = f"{path} was removed or replaced while this run owned the folder"
    if owner:
        why = f"{folder} was taken over by {_described(owner)}"
    raise TakenError(f"{why}: this run ends here, and writes nothing more to it")


def _touched_at(path: Path) -> float:
    """When a file was touched last; it is opened, since cached attributes may be old."""
    with suppress(OSError), open(path, "rb", opener=_without_waiting) as file:
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _make_folder(folder: Path) -> list[Path]:
    """Make the folder; give the folders that were missing, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _this_process(token: str) -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID", "")
    return {
        "token": token,
        "job": job,
        "host": socket.gethostname(),
        "since": datetime.now().isoformat(" ", "seconds"),
        "pid": os.getpid(),
        "born": _started_at(os.getpid()),
        "machine": _boot(),
    }


def _described(owner: dict[str, Any] | None) -> str:
    """An owner in printable words, whatever the file says."""
    found = {name: printable(str(value), 60) for name, value in (owner or {}).items()}
    job = f"job {found['job']}, " if found.get("job") else ""
    return (
        f"the run of {job}process {found.get('pid', '?')} on {found.get('host', '?')}, since "
        f"{found.get('since', '?')}"
    )


def _read(path: Path) -> dict[str, Any] | None:
    """The owner that a lock describes: None if it is gone, empty if it cannot be read."""
    try:
        found = json.loads(read_whole(path, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner's process exists; None if that cannot be seen from this host."""
    pid = owner.get("pid")
    if not _boot() or owner.get("machine") != _boot() or type(pid) is not int:
        return None
    return bool(_started_at(pid)) and _started_at(pid) == owner.get("born")


def _boot() -> str:
    """The boot of this host and the namespace of process numbers; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _started_at(pid: int) -> str:
    """When a process began, in ticks since the boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, OverflowError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]
