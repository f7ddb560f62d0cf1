"""A barrier through the launcher, without a message of MPI's."""

from __future__ import annotations

import ctypes
import os

_LIBRARY = "libpmix.so.2"
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
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        load, fence = library.PMIx_Info_load, library.PMIx_Fence
    except (OSError, AttributeError):  # another MPI, or a PMIx without these
        return
    info, yes = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_bool(True)
    load(info, _COLLECT, ctypes.byref(yes), _BOOL)
    fence(None, ctypes.c_size_t(0), info, ctypes.c_size_t(1))
