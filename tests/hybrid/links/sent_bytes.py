"""What Open MPI itself counts of the bytes that a rank sends, in collectives, too.

It does where the variable OMPI_MCA_pml_monitoring_enable is 1.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from mpi4py import MPI

_LIBRARY = "libmpi.so.40"
_NAME, _SIZES = b"pml_monitoring_messages_size", 2
"""A variable of MPI's tool interface: bytes sent to each rank so far, of MPI_T_PVAR_CLASS_SIZE."""


def sent_bytes() -> Callable[[], int] | None:
    """What tells the bytes that this rank has sent since; None where MPI does not count them."""
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # another MPI
        return None
    number, level, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    session, counter = ctypes.c_void_p(), ctypes.c_void_p()
    world = ctypes.c_void_p.from_address(MPI._addressof(MPI.COMM_WORLD))
    if (
        library.MPI_T_init_thread(0, ctypes.byref(level))
        or library.MPI_T_pvar_get_index(_NAME, _SIZES, ctypes.byref(number))
        or library.MPI_T_pvar_session_create(ctypes.byref(session))
        or library.MPI_T_pvar_handle_alloc(
            session, number, ctypes.byref(world), ctypes.byref(counter), ctypes.byref(count)
        )
        or library.MPI_T_pvar_start(session, counter)
    ):
        return None
    sizes = (ctypes.c_size_t * count.value)()

    def sent() -> int:
        assert not library.MPI_T_pvar_read(session, counter, sizes)
        return sum(sizes)

    return sent
