"""Faults of a real Slurm while it preempts or stops a training, which must end all the same."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from atexit import register
from functools import cache
from pathlib import Path
from time import monotonic, sleep

from tests.faults.kinds import Acts, Fault, Scene, lines_of
from tests.support.slurm_cluster import Slurm, why_not
from tests.support.world import FOLDER

_ROOT = Path(__file__).parents[2]


@cache
def slurm() -> Slurm | None:
    """A cluster for the whole campaign; None where there can be none."""
    if why_not():
        return None
    folder = tempfile.TemporaryDirectory(prefix="hybrid-slurm-")
    made = Slurm(Path(folder.name))
    made.environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(_ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        FOLDER: folder.name,
    }
    register(folder.cleanup)
    register(made.stop)
    made.start()
    return made


def preempted(scene: Scene) -> Acts:
    """An urgent job takes the nodes while one of them does not answer for some seconds."""
    yield from _under_slurm(scene, "slow")


def controller_away(scene: Scene) -> Acts:
    """The job is asked to stop while slurmctld is away."""
    yield from _under_slurm(scene, "away")


def _under_slurm(scene: Scene, fault: str) -> Acts:
    """A training as a job, to its end; the run that is struck then finds it ended."""
    cluster = slurm()
    if cluster is None:
        scene.stopped()
    else:
        cluster.wait_until_idle()
        config = scene.references.folder(scene.training) / "config.toml"
        words = ("--ranks-per-node", 1, "--cpus-per-rank", 1, "--gpus-per-rank", 0)
        nodes = ("--nodes", scene.training.ranks)
        job = cluster("hybrid", "submit", config, *words, *nodes, "--out", scene.out).strip()
        limit, wanted = monotonic() + 60, scene.random.randrange(1, 5)
        while lines_of(scene.out) < wanted and monotonic() < limit:
            sleep(0.02)
        seconds = scene.random.uniform(2, 10)
        if fault == "slow":
            with cluster.slow(scene.random.choice(cluster.names)):
                urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null")
                cluster("sbatch", *urgent, "--wrap=true")
                sleep(seconds)
        else:
            shells = cluster.named("slurm_script")
            with cluster.without_controller():
                for shell in shells:
                    os.kill(shell, signal.SIGUSR1)
                sleep(seconds)
        try:
            ended = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", seconds=90)
        except RuntimeError as error:
            ended = {"JobState": str(error).splitlines()[0]}
        scene.now(f"for {seconds:.1f} s, {ended.get('Restarts')} restarts")
        if ended["JobState"] != "COMPLETED":
            cluster("scancel", job, fails=True)
            log = scene.out.with_name(f"{scene.out.name}-{job}.out")
            said = log.read_text()[-200:] if log.exists() else ""
            scene.broken.append(f"lost: the job is {ended['JobState']}: {said}")
    yield {}


_SLURM = {"launchers": ("threads",), "timed": False, "resumes": True}
KINDS = (
    Fault("preempted with a slow slurmd", preempted, (0,), **_SLURM),  # type: ignore[arg-type]
    Fault("stopped without slurmctld", controller_away, (0,), **_SLURM),  # type: ignore[arg-type]
)
