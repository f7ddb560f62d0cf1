"""How tensors travel between the GPUs of ranks: by NCCL, by MPI, or through host memory."""

import os
import re
import socket
import subprocess
import sys
from functools import cache
from typing import Any

import torch

from hybrid.errors import AgreedError
from hybrid.links.base import RankLinks, Start
from hybrid.registries import AUTO

PROBE_SECONDS = 60.0
PROBE = """
import torch
from mpi4py import MPI
for size in (1 << 10, 1 << 24):  # eager and rendezvous
    sent = torch.randint(256, (size,), dtype=torch.uint8, device=DEVICE)
    received = torch.zeros_like(sent)
    torch.cuda.synchronize()
    request = MPI.COMM_SELF.Irecv([received, MPI.BYTE], 0)
    MPI.COMM_SELF.Isend([sent, MPI.BYTE], 0).Wait()
    request.Wait()
    assert torch.equal(sent, received), "other bytes arrived"
"""
"""Sends a GPU's memory through MPI; without support for it a library ends the process."""
_OF_LAUNCHERS = re.compile(
    "(OMPI_(?!MCA_)|OMPI_MCA_(ess|orte|prte|pmix|initial)|PMIX_|PMI_|PRTE_|MV2_|SLURM_|MPI_LOCAL)"
)
"""Beginnings of variables that would make the probe a rank of this job."""


def links_between(links: type[RankLinks], begin: Start, failed: bool = False) -> type[RankLinks]:
    """Return the class of the links between these ranks: `links`, or NCCL's. All ranks call it.

    NCCL carries tensors under any launcher if every rank has its own GPU, unless links.kind or
    links.device says otherwise. Raises AgreedError on all ranks if links.device cannot be had.
    `failed`: this rank has another reason not to begin, which it tells over `links`.
    """
    wanted, kind = begin.settings.device, begin.settings.kind
    if links.in_one_process or begin.comm is None:
        return links
    fault = "" if failed else _fault(begin.device, wanted)
    answers = begin.comm.allgather((_gpu(begin.device), fault, failed))
    if any(failed for _, _, failed in answers):
        return links
    fault = next((f"rank {r} {fault}" for r, (_, fault, _) in enumerate(answers) if fault), "")
    gpus = [gpu for gpu, _, _ in answers]
    if not fault and wanted != "mpi" and len({*gpus}) < len(gpus):
        fault = "two ranks share a GPU"
    if fault and wanted in ("nccl", "mpi"):
        raise AgreedError(f"links.device is {wanted!r}, but {fault}: choose auto or host")
    if fault or not (wanted == "nccl" or (wanted == "auto" and kind in (AUTO, "torch"))):
        return links
    from hybrid.links.nccl import NcclLinks

    return NcclLinks


def _gpu(device: torch.device | None) -> tuple[str, str] | None:
    """Identify a GPU among those of all hosts; None: there is none."""
    if device is None or device.type != "cuda":
        return None
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


def _fault(device: torch.device | None, wanted: str) -> str:
    """Say why a rank's tensors cannot travel from GPU to GPU; empty if they can."""
    if device is None or device.type != "cuda":
        return "has no GPU"
    if wanted == "mpi":
        return probe(PROBE.replace("DEVICE", repr(str(device))))
    distributed: Any = torch.distributed
    return "" if distributed.is_nccl_available() else "has a torch without NCCL"


@cache
def probe(program: str, seconds: float = PROBE_SECONDS) -> str:
    """Run a program in a child process; say how it failed, or return an empty string.

    No MPI library says reliably whether it reads a GPU's memory: some crash when they do.
    """
    mine = {k: v for k, v in os.environ.items() if not _OF_LAUNCHERS.match(k)}
    command = [sys.executable, "-c", program]
    try:
        subprocess.run(command, env=mine, check=True, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"has an MPI that does not send a GPU's memory within {seconds:g} s"
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        why = f"signal {-error.returncode}" if error.returncode < 0 else (said or ["no reason"])[-1]
        return f"has an MPI that cannot send a GPU's memory ({why[:200]})"
    return ""
