"""A process with two workers of a fork server: `python orphans_program.py FOLDER KIND`.

KIND: idle, both wait; stuck, one holds Python's lock for ever; forked, another process has what the
first one was forked with; late, both look for the first process when it is gone.
"""

import ctypes
import os
import sys
from multiprocessing import get_context, parent_process
from pathlib import Path
from time import sleep


def work(folder, kind):
    from hybrid.data.reader import end_with_parent

    place = Path(folder, str(os.getpid()))
    if kind == "late":
        place.touch()
        parent_process().join()
    end_with_parent()
    place.with_suffix(".watched").touch()
    place.touch()
    if kind == "stuck":
        ctypes.PyDLL(None).sleep(1000)  # Python's lock is kept meanwhile
    sleep(1000)


def main(folder, kind):
    workers = [
        get_context("forkserver").Process(target=work, args=(folder, own))
        for own in (kind, "idle" if kind == "stuck" else kind)
    ]
    for worker in workers:
        worker.start()
    if kind == "forked" and not os.fork():
        Path(folder, "forked").write_text(str(os.getpid()))
        sleep(1000)
    sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
