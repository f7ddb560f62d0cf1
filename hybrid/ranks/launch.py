"""How this process was started (alone, by mpirun, srun or torchrun), its cores and its device."""

import atexit
import ctypes
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
"""A variable that only torchrun sets."""
LATE_SECONDS = 60.0
"""The wait in the first meeting of mpirun's ranks after which they print a line."""
_FIRST_STEP_OF_NO_TASKS = 0xFFFFFFF0
"""Slurm numbers a batch script and an interactive shell from here on, and srun's steps from 0."""


def launched_size() -> int:
    """Return the number of ranks according to the launcher; 0 without one."""
    return _launched()[0]


def launched_rank() -> int:
    """Return this process's rank according to the launcher; 0 without one."""
    return _launched()[1]


def may_restart() -> bool:
    """Whether torchrun starts the ranks again when one is lost, perhaps as another number."""
    return bool(_number("TORCHELASTIC_MAX_RESTARTS"))


def screen() -> os.terminal_size | None:
    """Return the size of the terminal that shows this rank's output, if there is one."""
    return launcher.screen(by_mpirun=_mpi() is not None)


def starting_words() -> str:
    """Return the launcher's part of a command that starts as many ranks; empty without one."""
    size = launched_size()
    if not size:
        return ""
    if _is_by_torch():
        here = _number("LOCAL_WORLD_SIZE") or size
        nodes = f"--nnodes {size // here} " * (size > here)
        return f"torchrun {nodes}--nproc-per-node {here} -m "
    return f"mpirun -n {size} " if _mpi() else f"srun -n {size} "


def _launched() -> tuple[int, int]:
    """Return (size, rank) as set by torchrun, an MPI launcher or Slurm; (0, 0) without one."""
    return (_torch() if _is_by_torch() else _mpi() or _slurm()) or (0, 0)


def _is_by_torch() -> bool:
    """Whether torchrun started this rank, even if mpirun or srun started its agents."""
    if _torch() is None:
        return False
    others = _mpi() or _slurm()  # mpirun's daemons may be tasks of Slurm
    return others is None or others[0] == 1 or _TORCHRUN in os.environ


def _mpi() -> tuple[int, int] | None:
    return next((numbers for names in _MPI if (numbers := _numbers(*names))), None)


def _slurm() -> tuple[int, int] | None:
    """Return (size, rank) under srun with several tasks; a batch script is a single process."""
    step, rank = _number("SLURM_STEP_ID"), _number("SLURM_PROCID") or 0
    size = _number("SLURM_NTASKS") if rank else None
    if step is not None and step < _FIRST_STEP_OF_NO_TASKS:
        size = _number("SLURM_STEP_NUM_TASKS") or _number("SLURM_NTASKS")
    return (size, rank) if size and size > 1 else None


def _torch() -> tuple[int, int] | None:
    """Return (size, rank) of several processes started by torchrun."""
    numbers = _numbers(*_TORCH)
    return numbers if numbers and numbers[0] > 1 and _TORCH[1] in os.environ else None


class Ranks(NamedTuple):
    """The ranks of a job, and this one's place among them."""

    comm: Communicator
    local_rank: int
    """This rank's number among the ranks of its host."""
    sharing: int
    """Ranks of this host that use exactly the same cores; 1 if the launcher binds ranks."""
    joined_by: str = "mpi"
    """The links that connected the ranks, which links.kind=auto chooses."""


@cache
def ranks() -> Ranks | None:
    """Connect the ranks that a launcher started; None without a launcher. All ranks call it.

    MPI connects the ranks of mpirun and srun, torch.distributed those of torchrun. Raises
    ValueError for ranks that do not find each other: the mpirun of another MPI, and an srun without
    its plug-in, start N jobs of size one.
    """
    size = launched_size()
    if not size:
        return None
    from hybrid.ranks import meeting

    by_torch, rank = _is_by_torch(), launched_rank()
    late = stopping.after(LATE_SECONDS, _tell_late, rank, size)
    with stopping.meeting() if by_torch else late:
        comm: Communicator = meeting.of_torchrun(rank, size) if by_torch else _of_mpi(size)
        mates = comm.host_ranks()
    launcher.end_with_launcher(speaks=comm.rank == mates[0])
    _abort_on_exceptions(comm)
    cores = comm.allgather(sorted(os.sched_getaffinity(0)))
    sharing = [cores[mate] for mate in mates].count(cores[comm.rank])
    atexit.register(_leave, comm)
    return Ranks(comm, mates.index(comm.rank), sharing, "torch" if by_torch else "mpi")


def _tell_late(rank: int, size: int) -> None:
    """Print that this rank waits for the others; ranks 0 and 1 do, as one of them is waiting."""
    if rank < 2:
        tell(f"hybrid: rank {rank} of {size} waits for the others to call this package: all must")


def _leave(comm: Communicator) -> None:
    """End all ranks together, so that none mistakes the end of another for a crash."""
    comm.barrier()
    comm.close()


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
"""An upper bound of sizeof(pmix_info_t): a key of 512 bytes, flags and a value."""


def wait_for_all() -> None:
    """Wait until every rank of the job has called this; return at once if MPI runs without PMIx.

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
"""The largest message between hosts that Open MPI hands to the system at once, over TCP.

With the default of 2**16 a longer message waits until both ranks are inside MPI, which they are not
while they compute. At 1 Gb/s pipelined rows of docs/benchmarks/no-bubble were up to twice as slow.
"""
_EAGER = (
    "OMPI_MCA_btl_tcp_eager_limit",
    "OMPI_MCA_btl_tcp_rndv_eager_limit",
    "OMPI_MCA_btl_tcp_max_send_size",
)


def communicator() -> Communicator | None:
    """Return the communicator of all ranks; None without a launcher."""
    here = ranks()
    return None if here is None else here.comm


def joined_by() -> str:
    """Return the kind of the links that connected the ranks; threads without a launcher."""
    here = ranks()
    return "threads" if here is None else here.joined_by


def threads_per_rank(blocks: int) -> int:
    """Return OMP_NUM_THREADS, or this process's cores divided among the ranks that share them.

    Without a launcher, its `blocks` threads share them.
    """
    here = ranks()
    sharing = blocks if here is None else here.sharing
    return _number("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // sharing)


def device(setting: str) -> "torch.device":
    """Choose the device of this rank's block: of the visible GPUs, the local rank's or thread's."""
    import torch

    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device is 'cuda' but torch sees no GPU; use auto or cpu")
    # before the first use of the GPU: NCCL's two ways spin side by side, and cuBLAS may be asked
    # for the same bits
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if (here := ranks()) is not None:
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def numerics(deterministic: bool) -> Iterator[None]:
    """Let torch and cuDNN use deterministic algorithms alone for a while, if that is wanted.

    Otherwise torch's flags stay as they are: cudnn.benchmark is off unless the caller's code turns
    it on, since it chooses algorithms by timing them, and others in every process.
    """
    if not deterministic:
        yield
        return
    import torch

    memory: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    flags = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = flags
        memory.fill_uninitialized_memory = fills


def keep_memory() -> None:
    """Let glibc keep freed memory: every training step frees and allocates the same sizes.

    Otherwise large buffers go back to the system, which clears them again at every step. What was
    freed before goes back, since it is of other sizes. A MALLOC_MMAP_THRESHOLD_ of the user's
    stands. Other C libraries have no such settings.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.malloc_trim(0)
        if "MALLOC_MMAP_THRESHOLD_" in os.environ:
            return
        m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
        libc.mallopt(m_top_pad, 1 << 26)


_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUPY_CACHE_DIR": "cupy",
}
"""Compiler caches: code found there is executed."""


def keep_caches_private() -> None:
    """Let torch.compile and CuPy store code in folders that only this user can write to.

    The folders are in TMPDIR/hybrid-UID, on the node and not in the home. Variables that are
    already set stay. Raises ValueError if another user owns that folder or can write to it.
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
    """End the job if an exception ends a rank's script: other ranks may wait for this one."""
    show = stopping.in_one_line(sys.excepthook, speaks=comm.rank == 0)

    def hook(*exception: Any) -> None:
        try:
            show(*exception)
            sys.stderr.flush()
        finally:  # even if stderr is closed
            comm.abort(1)

    sys.excepthook = hook


def _numbers(size: str, rank: str) -> tuple[int, int] | None:
    """Read (size, rank) from a launcher's variables; None if the size is not set."""
    count = _number(size)
    return None if count is None else (count, _number(rank) or 0)


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None
