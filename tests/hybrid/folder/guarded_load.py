"""Reads hostile files within bounds: `guarded_load.py CHECKPOINT...`, a JSON object a line.

The process may take 512 MB beyond what its imports took, and tells of everything that a file made
it start, import, compile, look up or open for writing.
"""

import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any

WATCHED = ("pickle.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.")
WATCHED_TOO = ("import", "compile", "exec", "ctypes.dlopen", "marshal.loads", "code.__new__")


def read(path: Path) -> Any:
    """Read a checkpoint; what reads it is imported alone, to be quick."""
    from hybrid.folder import checkpoint

    return checkpoint.load_model(path, checkpoint.read_manifest(path))


def main() -> None:
    """Read the files one by one."""
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
    for name in sys.argv[1:]:
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
