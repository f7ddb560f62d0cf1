"""The `hybrid` command with a fault inside, as HYBRID_FAULT describes it."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import time
from itertools import count
from pathlib import Path
from typing import Any


def main() -> None:
    """Arm the fault and run the command."""
    fault = json.loads(os.environ.get("HYBRID_FAULT", "{}"))
    number = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "0")
    if int(number) and (disk := fault.get("disk")):
        _on_another_disk(Path(disk), int(number))
    mine = fault.get("rank") in (int(number), None)
    kind = fault.get("kind")
    if kind == "late" and mine:
        time.sleep(fault["seconds"])
    elif kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], fault["bytes"]))
    elif kind == "poison":
        _poison(fault["rank"], fault["call"])
    from hybrid.__main__ import main

    main()


def _on_another_disk(folder: Path, number: int) -> None:
    """Lay a folder of this rank's over one that the first rank sees, as another host's disk."""
    new_mounts = 0x20000
    if ctypes.CDLL(None, use_errno=True).unshare(new_mounts):
        raise OSError(ctypes.get_errno(), "no mount namespace can be made")
    disk = folder / f"disk-{number}"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", str(disk), str(folder)], check=True)


def _poison(number: int, call: int) -> None:
    """Once, before the n-th rounds, make weights of one rank's block not a number."""
    from hybrid.rounds.base import Rounds

    run, calls = Rounds.run, count(1)

    def poisoned(self: Rounds, *arguments: Any) -> Any:
        if self.links.place.number == number and next(calls) == call:
            next(iter(self.exact.block.module.parameters())).data.fill_(float("nan"))
        return run(self, *arguments)

    Rounds.run = poisoned  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
