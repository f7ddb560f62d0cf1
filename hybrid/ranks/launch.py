"""How this process was started: alone, by mpirun, srun or torchrun; and what it may use."""

from __future__ import annotations

import atexit
import ctypes
import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid.errors import one_line, tell
from hybrid.links.communicator import Communicator
from hybrid.ranks import launcher, stopping

if TYPE_CHECKING:
    import torch

_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)
_TORCH = ("WORLD_SIZE", "RANK")
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""What torchrun alone sets."""
LATE_SECONDS = 60.0
"""After which ranks of mpirun that wait for others say so, the first time that they meet."""
_FIRST_STEP_OF_NO_TASKS = 0xFFFFFFF0
"""Slurm numbers a batch script and an interactive shell from here on, and srun's steps from 0."""


def launched_size() -> int:
    """Number of ranks the launcher says it started; 0 without one."""
    return _launched()[0]


def launched_rank() -> int:
    """This process's rank according to the launcher; 0 without one."""
    return _launched()[1]


def screen() -> os.terminal_size | None:
    """The size of the terminal that shows what this rank prints; None where none does."""
    return launcher.screen(by_mpirun=_mpi() is not None)


def starting_words() -> str:
    """What starts as many ranks again, before the command; empty without a launcher."""
    size = launched_size()
    if not size:
        return ""
    if _is_by_torch():
        here = _number("LOCAL_WORLD_SIZE") or size
        nodes = f"--nnodes {size // here} " * (size > here)
        return f"torchrun {nodes}--nproc-per-node {here} -m "
    return f"mpirun -n {size} " if _mpi() else f"srun -n {size} "


def _launched() -> tuple[int, int]:
    """(size, rank), of an MPI launcher, of Slurm's, or of one that knows torch alone."""
    return (_torch() if _is_by_torch() else _mpi() or _slurm()) or (0, 0)


def _is_by_torch() -> bool:
    """Whether torchrun started this rank, though mpirun or srun may have started its agents."""
    if _torch() is None:
        return False
    others = _mpi() or _slurm()  # mpirun's own daemons may be tasks of Slurm's
    return others is None or others[0] == 1 or _TORCHRUN in os.environ


def _mpi() -> tuple[int, int] | None:
    return next((numbers for names in _MPI if (numbers := _numbers(*names))), None)


def _slurm() -> tuple[int, int] | None:
    """Of srun's several tasks; a batch script, which has the job's variables, is one process."""
    step, rank = _number("SLURM_STEP_ID"), _number("SLURM_PROCID") or 0
    size = _number("SLURM_NTASKS") if rank else None
    if step is not None and step < _FIRST_STEP_OF_NO_TASKS:
        size = _number("SLURM_STEP_NUM_TASKS") or _number("SLURM_NTASKS")
    return (size, rank) if size and size > 1 else None


def _torch() -> tuple[int, int] | None:
    """Of several processes, as torchrun starts them."""
    numbers = _numbers(*_TORCH)
    return numbers if numbers and numbers[0] > 1 and _TORCH[1] in os.environ else None


class Ranks(NamedTuple):
    """The ranks of a job, and this one's place among them."""

    comm: Communicator
    local_rank: int
    """Its number among the ranks of its host."""
    sharing: int
    """Ranks of its host that may use exactly the same cores; a launcher that binds leaves 1."""
    joined_by: str = "mpi"
    """The links that joined them, whose kind is what links.kind=auto means."""


@cache
def ranks() -> Ranks | None:
    """The ranks a launcher started, or None where there is no launcher. All must call it.

    mpirun's ranks and srun's are joined by MPI, torchrun's by torch.distributed. Raises ValueError
    for ranks that do not find each other: the mpirun of another MPI, and an srun without its
    plug-in, start N jobs of size one.
    """
    size = launched_size()
    if not size:
        return None
    by_torch, rank = _is_by_torch(), launched_rank()
    late = stopping.after(LATE_SECONDS, _tell_late, rank, size)
    with stopping.meeting() if by_torch else late:
        comm = _of_torchrun(rank, size) if by_torch else _of_mpi(size)
        mates = comm.host_ranks()
    launcher.end_with_launcher(speaks=comm.rank == mates[0])
    _abort_on_exceptions(comm)
    cores = comm.allgather(sorted(os.sched_getaffinity(0)))
    sharing = [cores[mate] for mate in mates].count(cores[comm.rank])
    atexit.register(_leave, comm)
    return Ranks(comm, mates.index(comm.rank), sharing, "torch" if by_torch else "mpi")


def _tell_late(rank: int, size: int) -> None:
    """Say that this rank waits for the others; two of them say so, one of which is there."""
    if rank < 2:
        tell(f"hybrid: rank {rank} of {size} waits for the others to call this package: all must")


def _leave(comm: Communicator) -> None:
    """All ranks end together, so that none takes the end of another for a loss."""
    comm.barrier()
    comm.close()


def _of_torchrun(rank: int, size: int) -> Communicator:
    from hybrid.ranks import meeting

    return meeting.of_torchrun(rank, size)


def _of_mpi(size: int) -> Communicator:
    for name in _EAGER:
        os.environ.setdefault(name, str(EAGER_BYTES))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"{size} ranks were started but MPI cannot be used ({one_line(error)}): "
            "pip install mpi4py and an MPI library, or start them by torchrun"
        ) from None
    if MPI.COMM_WORLD.size != size:
        raise ValueError(
            f"the launcher started {size} ranks but MPI sees {MPI.COMM_WORLD.size}: use mpirun of "
            "the MPI library that mpi4py is built for, srun --mpi=pmix, or torchrun"
        )
    wait_for_all()
    from hybrid.links.mpi import MpiCommunicator

    return MpiCommunicator(MPI.COMM_WORLD.Dup())


_PMIX = "libpmix.so.2"
_COLLECT, _BOOL = b"pmix.collect", ctypes.c_uint16(1)
_INFO_BYTES = 1024
"""More than a pmix_info_t has: a key of 512 bytes, flags and a value."""


def wait_for_all() -> None:
    """Return once every rank of the job has called this; at once where MPI does without PMIx.

    Called between MPI_Init and the first message. Open MPI 5 takes messages while it waits in
    MPI_Init's last fence, and one that meets a rank there ends it with a segmentation fault
    (open-mpi/ompi, issue 12495). Ranks leave that fence one after another, and under srun it does
    not hold them at all: a fence that collects no data passes Slurm's plug-in at once, whatever
    its PMIxFenceBarrier says (22.05). This one collects.
    """
    try:
        library = ctypes.CDLL(_PMIX, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        load, fence = library.PMIx_Info_load, library.PMIx_Fence
    except (OSError, AttributeError):  # another MPI, or a PMIx without these
        return
    info, yes = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_bool(True)
    load(info, _COLLECT, ctypes.byref(yes), _BOOL)
    fence(None, ctypes.c_size_t(0), info, ctypes.c_size_t(1))


EAGER_BYTES = 2**22
"""Of a message between hosts that Open MPI hands to the system at once, over TCP.

Its own limit is 2**16: a longer message waits until both ranks are inside MPI, which they are not
while they compute. At 1 Gb/s pipelined rows of docs/benchmarks/no-bubble were up to twice as slow.
"""
_EAGER = (
    "OMPI_MCA_btl_tcp_eager_limit",
    "OMPI_MCA_btl_tcp_rndv_eager_limit",
    "OMPI_MCA_btl_tcp_max_send_size",
)


def communicator() -> Communicator | None:
    """The communicator of all ranks, or None where there is no launcher."""
    here = ranks()
    return None if here is None else here.comm


def joined_by() -> str:
    """The links that joined the ranks at their start; threads where no launcher started any."""
    here = ranks()
    return "threads" if here is None else here.joined_by


def threads_per_rank(blocks: int) -> int:
    """OMP_NUM_THREADS, or the cores this process may use, shared among those who use the same.

    Those are its `blocks` threads where there is no launcher, else the ranks with its cores.
    """
    here = ranks()
    sharing = blocks if here is None else here.sharing
    return _number("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // sharing)


def device(setting: str) -> torch.device:
    """Where this rank's block lives; the local rank chooses among the visible GPUs."""
    import torch

    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device is 'cuda' but torch sees no GPU; use auto or cpu")
    here = ranks()
    gpu = torch.device("cuda", (here.local_rank if here else 0) % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    return gpu


def keep_memory() -> None:
    """Let glibc keep freed memory: a training step frees and asks for the same sizes.

    Without it large buffers go back to the system and are cleared by it again at every step.
    Other C libraries have no such settings, and none is needed.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
        libc.mallopt(m_top_pad, 1 << 26)


_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUPY_CACHE_DIR": "cupy",
}
"""The caches of compilers, whose content is executed when it is found again."""


def keep_caches_private() -> None:
    """Let torch.compile and CuPy store code in folders that only this user can write to.

    The folders are in `hybrid-UID` of TMPDIR: on the node, not in the home. Variables that are set
    already stay. Raises ValueError if that folder belongs to, or can be written by, another user.
    """
    folder = Path(tempfile.gettempdir(), f"hybrid-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_private or status.st_mode & 0o077:
        raise ValueError(
            f"{folder} is not a folder that you alone can write to, and compiled code would be run "
            "from it: remove it, or set TMPDIR to a folder of your own"
        )
    for variable, name in _CACHES.items():
        os.environ.setdefault(variable, str(folder / name))


def _abort_on_exceptions(comm: Communicator) -> None:
    """An exception that leaves a rank's script ends the job: the others may wait for it."""
    show = stopping.in_one_line(sys.excepthook, speaks=comm.rank == 0)

    def hook(*exception: Any) -> None:
        try:
            show(*exception)
            sys.stderr.flush()
        finally:  # nobody may be left to read it
            comm.abort(1)

    sys.excepthook = hook


def _numbers(size: str, rank: str) -> tuple[int, int] | None:
    """Of a launcher's two variables; None unless it says how many it started."""
    count = _number(size)
    return None if count is None else (count, _number(rank) or 0)


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None
