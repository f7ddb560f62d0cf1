"""The lock of a run folder, which one run owns at a time."""

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

from hybrid.errors import printable, tell
from hybrid.files import check_file, naming, read_whole

PATIENCE = 100.0
"""Seconds for which a run waits for an owner on another host to go: if that host is lost, the file
server takes its lock away after as many as 90."""
_NAME = "run.lock"
_MOST_BYTES = 1 << 16
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class TakenError(ValueError):
    """Another run owns the folder."""


class Lock:
    """`run.lock` in a run folder: the run that holds its flock owns the folder.

    The lock ends with the process, however that ends. The file says who owns the folder; its token
    is what every rank looks for before it writes (`check_owner`). So where a file system keeps no
    locks, or each host keeps its own, the run that started last owns the folder, and the one before
    it ends. Raises TakenError (a ValueError) if the folder has an owner, OSError if nothing can be
    written there.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.token = folder / _NAME, token_hex(4)
        self._missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._descriptor = self._acquire()
        except BaseException:
            self._remove_empty_folders()
            raise

    def release(self) -> None:
        """Give the folder up; remove it if this made it and it is empty."""
        if _is_at(self._descriptor, self.path):
            with suppress(OSError):
                self.path.unlink()
            self._remove_empty_folders()
        os.close(self._descriptor)

    def _acquire(self) -> int:
        begin, patience = monotonic(), 0.0
        while (descriptor := self._locked_file()) is None:
            owner = _owner(self.path)
            run = printable(str(owner.get("run", "another run")), 200)
            if not patience:
                elsewhere = owner.get("host", socket.gethostname()) != socket.gethostname()
                patience = PATIENCE if elsewhere else 1.0  # it may be about to go
                if elsewhere:
                    notice = f"waiting {PATIENCE:g} s in case that host is lost"
                    tell(f"hybrid: {self.path.parent} belongs to {run}: {notice}")
            if monotonic() - begin > patience:
                raise TakenError(
                    f"{self.path.parent} is in use by {run}: wait for its end or choose another "
                    "folder"
                )
            sleep(0.1)
        return descriptor

    def _locked_file(self) -> int | None:
        """The file, locked, with a description of this process; None if another has locked it."""
        check_file(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o666)
        try:
            if os.fstat(descriptor).st_nlink > 1:
                raise ValueError(
                    f"{self.path} has another name, too, and is not written: remove it"
                )
            if _lock(descriptor, self.path) and _is_at(descriptor, self.path):
                with naming(self.path):
                    os.truncate(descriptor, 0)
                    os.write(descriptor, json.dumps(_this_process(self.token)).encode())
                    os.fsync(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _remove_empty_folders(self) -> None:
        for folder in self._missing:
            with suppress(OSError):
                folder.rmdir()


def check_owner(folder: Path, token: str) -> None:
    """TakenError if a folder is not that of the run with this token any more; any rank may ask.

    A file server that does not answer is no reason to end the run.
    """
    path = folder / _NAME
    try:
        owner = _owner(path)
    except OSError:
        return
    if owner.get("token") == token:
        return
    why = (
        f"{path} was removed or replaced while this run owned the folder, or {socket.gethostname()}"
        " does not share the folder's file system, which all hosts of a run must"
    )
    if owner:
        run = printable(str(owner.get("run", "another run")), 200)
        why = f"{folder} was taken over by {run}"
    raise TakenError(f"{why}: this run ends here, and writes nothing more to it")


def owner_token(folder: Path) -> str:
    """The token of a folder's owner, as this host sees it; empty without one."""
    with suppress(OSError):
        os.listdir(folder)  # a client of NFS then looks for new files
        return str(_owner(folder / _NAME).get("token", ""))
    return ""


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the file unless another process has; a file system without locks is told of."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        tell(f"hybrid: {path.parent} is on a file system without locks: start no second run there")
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a file still has its name: an owner removes it when it gives the folder up."""
    with suppress(OSError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    return False


def _this_process(token: str) -> dict[str, str]:
    host, since = socket.gethostname(), datetime.now().isoformat(" ", "seconds")
    job = f"job {name}, " if (name := os.environ.get("SLURM_JOB_ID")) else ""
    run = f"the run of {job}process {os.getpid()} on {host}, since {since}"
    return {"token": token, "host": host, "run": run}


def _owner(path: Path) -> dict[str, Any]:
    """What a lock tells of its owner; nothing if it is gone or cannot be read."""
    try:
        owner = json.loads(read_whole(path, _MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}
