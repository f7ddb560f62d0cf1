"""A training as a Slurm batch script, requeued after its time limit."""

import re
import shutil
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote

from hybrid.files import write_atomically
from hybrid.links.grid import Grid
from hybrid.settings.config import SplitSettings

SIGNAL_SECONDS = 120
"""Seconds before its time limit at which a job gets a signal; Slurm may be a minute early."""

TEMPLATE = Path(__file__).parents[1] / "jobs" / "train.sbatch"
LAUNCHERS = {
    # pe: the cores of a rank; the hosts come from Slurm
    "mpirun": "mpirun --map-by ppr:{ranks}:node:pe={cpus} --bind-to core",
    # since 22.05 srun does not take --cpus-per-task from the job; with --kill-on-bad-exit=1, the
    # default of some sites, the first rank to exit with 75 would kill the others
    # block: consecutive ranks, such as a chain's, share a node
    "srun": "srun --mpi=pmix --distribution=block --cpus-per-task={cpus} --cpu-bind=cores "
    "--kill-on-bad-exit=0",
}
PORTS = "PMIX_MCA_ptl_base_if_include=127.0.0.0/8"
ONE_HOST = " OMPI_MCA_btl=^tcp"
"""Keeps ranks that share memory from listening on all interfaces."""


@dataclass(frozen=True)
class SlurmJob:
    """A training as a job; ValueError names an invalid field and the allowed values."""

    config: Path
    """Settings, read when the job starts."""
    out: Path
    """Run folder."""
    nodes: int
    ranks_per_node: int
    gpus_per_rank: int = 0
    cpus_per_rank: int = 8
    time: str = "04:00:00"
    max_requeues: int = 20
    partition: str = ""
    account: str = ""
    launcher: str = "mpirun"
    setup: str = ""
    """Shell commands that make hybrid and MPI available."""
    settings: tuple[str, ...] = ()
    """Values of --set, "section.key=value"."""
    replicas: int | None = None
    """Chains of blocks; None: split.replicas of the settings."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not "".join(value if isinstance(value, tuple) else str(value)).isprintable():
                raise ValueError(f"{field.name} is {value!r}; it must be UTF-8 without line breaks")
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"--launcher is {self.launcher!r}; choose {' or '.join(LAUNCHERS)}")
        if self.setup.endswith("\\") or "\\" in str(self.out):
            raise ValueError("--setup must not end in \\, and --out must not have one")

    @property
    def ranks(self) -> int:
        """The number of MPI ranks, one block of one replica each."""
        return self.nodes * self.ranks_per_node

    @property
    def file(self) -> Path:
        """The script's path, beside the run folder: only the run writes into that."""
        return self.out.with_name(f"{self.out.name}.sbatch")


def script(job: SlurmJob) -> str:
    """Fill in the batch script."""
    parts = {
        "directives": _directives(job),
        "setup": job.setup or ":  # no --setup: hybrid and MPI are those of the shell that submits",
        "cpus": str(job.cpus_per_rank),
        "ports": PORTS + ONE_HOST * (job.nodes == 1),
        "job": _variables(job),
        "max_requeues": str(job.max_requeues),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda part: parts[part[1]], TEMPLATE.read_text())


def submit(job: SlurmJob) -> str:
    """Write the script and submit it; return the job's number. ValueError if sbatch refuses it."""
    if shutil.which("sbatch") is None:
        raise ValueError("there is no sbatch here: submit on a login node, or try --dry-run")
    job.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(job.file, script(job))
    command = ["sbatch", "--parsable", str(job.file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        answer = " ".join((done.stderr or done.stdout).split()) or f"exit {done.returncode}"
        raise ValueError(f"sbatch refused {job.file}: {answer}")
    return done.stdout.strip().partition(";")[0]


def check_grid(split: SplitSettings, job: SlurmJob) -> None:
    """Reject a rank count that is not the settings' blocks times replicas."""
    Grid(split.count, split.replicas).on(job.ranks, "--nodes times --ranks-per-node =")


def _directives(job: SlurmJob) -> str:
    log = str(job.out).replace("%", "%%") + "-%j.out"
    options = {
        "job-name": job.out.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.cpus_per_rank,
        # not per task: mpirun's daemon, one per node, would get the GPUs of a single rank
        "gpus-per-node": job.ranks_per_node * job.gpus_per_rank or "",
        "hint": "nomultithread",
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": log,
        "open-mode": "append",
        "signal": f"B:USR1@{SIGNAL_SECONDS}",
    }
    lines = [f"#SBATCH --{key}={_word(str(text))}" for key, text in options.items() if text]
    return "\n".join([*lines, "#SBATCH --requeue"])


def _word(text: str) -> str:
    """Quote a word of an #SBATCH line by sbatch's rules, in which # may end even a quoted word."""
    if re.fullmatch(r"[\w%+,./:=@-]*", text, re.ASCII):
        return text
    return '"' + re.sub(r"([\"'\\#])", r"\\\1", text) + '"'


def _variables(job: SlurmJob) -> str:
    start = LAUNCHERS[job.launcher].format(ranks=job.ranks_per_node, cpus=job.cpus_per_rank)
    words = ["train", str(job.config)]
    if job.replicas is not None:
        words += ["--replicas", str(job.replicas)]
    for text in job.settings:
        words += ["--set", text]
    run, train = quote(str(job.out)), " ".join(quote(word) for word in words)
    return "\n".join([f"run={run}", f"train=({train})", f"launch=({start})"])
