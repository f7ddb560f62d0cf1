"""Whether MPI reads and writes GPU memory: tried in a child, since one that does not may crash.

python -m hybrid.links.mpi.probe
"""

import os
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import torch

SECONDS = 60.0
_OF_A_JOB = (
    *("OMPI_COMM_WORLD", "OMPI_MCA_orte_", "OMPI_MCA_ess", "PMIX_", "PMI_", "PRTE_"),
    *("SLURM_", "MPI_LOCAL"),
)
"""Variables that make a process a rank; a child without them is a job by itself."""


class Answer(NamedTuple):
    """Whether links hand GPU memory to MPI, and why."""

    direct: bool
    why: str


def agreed(asked: str, device: torch.device | None, comm: Any, local_rank: int) -> Answer:
    """What all ranks do; every rank calls it. `auto` makes one trial on each host."""
    if device is None or device.type != "cuda":
        mine = Answer(False, "no GPU")
    elif asked != "auto":
        mine = Answer(asked == "mpi", f"links.device is {asked}")
    else:
        mine = try_in_child() if local_rank == 0 else Answer(True, "")
    answers: list[Answer] = comm.allgather(mine)
    return next((a for a in answers if not a.direct), answers[0])


def try_in_child(command: list[str] | None = None, seconds: float = SECONDS) -> Answer:
    """Send a tensor on the GPU to oneself, in a process that is no rank."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_JOB)}
    try:
        done = subprocess.run(
            command or [sys.executable, "-m", "hybrid.links.mpi.probe"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Answer(False, f"a trial gave no answer in {seconds:g} s")
    if done.returncode < 0:
        return Answer(False, f"a trial was ended by {signal.Signals(-done.returncode).name}")
    said = done.stdout.strip().splitlines()
    if done.returncode:
        return Answer(False, said[-1] if said else f"a trial ended with {done.returncode}")
    return Answer(True, "a trial on this host came back whole")


def main() -> int:
    """Exit status 0 if GPU memory came back whole."""
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        return 1
    torch.cuda.set_device(0)  # before MPI looks for a GPU
    from mpi4py import MPI

    sent = torch.arange(1 << 20, device="cuda").to(torch.uint8)
    received = torch.zeros_like(sent)
    torch.cuda.synchronize()
    request = MPI.COMM_SELF.Isend([sent, MPI.BYTE], dest=0, tag=1)
    MPI.COMM_SELF.Recv([received, MPI.BYTE], source=0, tag=1)
    request.Wait()
    if not torch.equal(sent, received):
        print("what a trial sent did not come back")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
