"""Reads hostile files within bounds: `guarded_load.py READER FILE...`, a JSON object a line.

The process may take 512 MB beyond what its imports took, and tells of everything that a file made
it start, import, compile, look up or open for writing.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any

WATCHED = ("pickle.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.")
WATCHED_TOO = ("import", "compile", "exec", "ctypes.dlopen", "marshal.loads", "code.__new__")


def reader(kind: str) -> Callable[[Path], Any]:
    """What reads files of a kind; imported alone, to be quick."""
    if kind == "cifar":
        from hybrid.data.files.pickled import read_cifar_python

        return read_cifar_python
    if kind == "tar":
        from hybrid.data.files import download

        download.MOST_BYTES = 1 << 26  # quicker to reach
        return lambda path: download.extract(path, ["a.bin"], path.with_suffix(".out"))
    from hybrid.folder import checkpoint

    return lambda path: checkpoint.load_model(path, checkpoint.read_manifest(path))


def main() -> None:
    """Read the files one by one."""
    read = reader(sys.argv[1])
    seen: list[str] = []
    watching = False

    def hook(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
        if watching and (writes or event in WATCHED_TOO or event.startswith(WATCHED)):
            seen.append(f"{event} {str(arguments[0])[:80]}")

    with suppress(ValueError, OSError):
        read(Path(os.devnull))  # imports what the reader needs
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20),) * 2)
    sys.addaudithook(hook)
    for name in sys.argv[2:]:
        seen.clear()
        begun, error = process_time(), ""
        watching = True
        try:
            read(Path(name))
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
        watching = False
        seconds = process_time() - begun
        row = {"file": name, "error": error, "seconds": seconds, "seen": list(seen)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
