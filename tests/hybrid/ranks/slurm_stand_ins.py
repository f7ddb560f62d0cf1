"""Stand-ins for Slurm and the launchers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hybrid.ranks.slurm import SlurmJob, script

BASH = shutil.which("bash")

STAND_IN = """\
#!{python}
import json, os, signal, sys, time
with open({log!r}, "a") as log:
    print(json.dumps([{name!r}, *sys.argv[1:]]), file=log)
"""
RANKS = """\
def stop(*_):
    with open({log!r}, "a") as log:
        print(json.dumps(["USR1"]), file=log)
    time.sleep(0.2)
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
open({ready!r}, "w").close()
if os.environ["RANKS"] == "wait":
    time.sleep(30)
if os.environ["RANKS"] == "0":  # as a training that ends
    run = sys.argv[sys.argv.index("--out") + 1]
    os.makedirs(run, exist_ok=True)
    with open(run + "/summary.partial", "w") as summary:
        summary.write("{{}}")
    os.replace(run + "/summary.partial", run + "/summary.json")
    sys.exit(int(os.environ.get("LATE", 0)))
if os.environ["RANKS"] == "0 lost":  # as a training that begins
    run = sys.argv[sys.argv.index("--out") + 1]
    os.path.exists(run + "/summary.json") and os.unlink(run + "/summary.json")
sys.exit(int(os.environ["RANKS"].removesuffix(" lost")))
"""


SCONTROL = "sys.exit(int(os.environ.get('SCONTROL', 0)))"


class Cluster:
    """Stand-ins for Slurm and launchers that keep the words they are called with."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log, self.ready = folder / "bin", folder / "log", folder / "ready"
        self.bin.mkdir(parents=True)
        for name in ("mpirun", "srun"):
            self.program(name, RANKS)
        self.program("scontrol", SCONTROL)
        (self.bin / "sleep").symlink_to("/bin/true")
        squeue = self.bin / "squeue"  # only asks, so its calls are not kept
        squeue.write_text('#!/bin/sh\necho "${SQUEUE-RUNNING}"\n')
        squeue.chmod(0o755)
        self.program("sbatch", "print('17;local')")

    def program(self, name: str, body: str) -> None:
        values = {"python": sys.executable, "name": name, "log": str(self.log)}
        file = self.bin / name
        file.write_text((STAND_IN + body).format(**values, ready=str(self.ready)))
        file.chmod(0o755)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def start(self, request: SlurmJob, ranks: str, **given: str) -> subprocess.Popen[str]:
        request.file.parent.mkdir(parents=True, exist_ok=True)
        request.file.write_text(script(request))
        slurm = {"SLURM_JOB_ID": "17", "RANKS": ranks, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.Popen(
            [str(BASH), str(request.file)],
            env=os.environ | slurm | given,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, request: SlurmJob, ranks: str = "0", **given: str) -> tuple[int, str]:
        job = self.start(request, ranks, **given)
        _, err = job.communicate(timeout=60)
        return job.returncode, err

    def signaled(self, request: SlurmJob, **given: str) -> int:
        """Exit status of a job that is told its end when its ranks are at work."""
        process = self.start(request, "wait", **given)
        limit = time.monotonic() + 60
        while not self.ready.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
        return process.returncode
