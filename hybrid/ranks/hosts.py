"""Connections between the hosts of a job, beside MPI, that fail when a host no longer answers."""

import fcntl
import hmac
import secrets
import socket
import struct
from contextlib import suppress
from time import monotonic

from hybrid.links.communicator import Communicator

MEETING_SECONDS = 5.0
_HALF = 16
_MOST_PROBES = 127
"""That Linux sends before it gives a connection up."""
_SIOCGIFADDR = 0x8915

Connections = dict[int, socket.socket]


def connect(comm: Communicator, lead: bool, silence: int) -> tuple[Connections, dict[int, str]]:
    """Connect the lead of every host, its lowest rank, with rank 0. All ranks must call it.

    Gives this rank's connections by the rank at their other end, and the name of every lead's
    host. A connection fails when nothing has been heard through it for `silence` seconds; 0 makes
    none. Where none can be made, as behind a firewall, there is none.
    """
    names = comm.allgather(socket.gethostname() if lead else "")
    leads = {rank: name for rank, name in enumerate(names) if name}
    if len(leads) == 1 or not silence:
        return {}, leads
    listener = _listen() if comm.rank == 0 else None
    port = listener.getsockname()[1] if listener is not None else 0
    addresses, port, secret = comm.bcast((_addresses(), port, secrets.token_bytes(2 * _HALF)))
    found: Connections = {}
    if listener is not None:
        found = _accept(listener, secret, set(leads) - {0})
    elif lead and port:
        found = _reach(addresses, port, secret, comm.rank)
    if comm.rank not in comm.bcast({0, *found}):
        found = {}
    for connection in found.values():
        _keep_alive(connection, silence)
    return found, leads


def _listen() -> socket.socket | None:
    with suppress(OSError):
        return socket.create_server(("", 0))
    return None


def interfaces() -> dict[str, str]:
    """The IPv4 address of every network interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _addresses() -> list[str]:
    return [address for address in interfaces().values() if not address.startswith("127.")]


def _accept(listener: socket.socket, secret: bytes, leads: set[int]) -> Connections:
    """The connections of those leads that come in time and know the secret's first half."""
    found: Connections = {}
    end = monotonic() + MEETING_SECONDS
    with listener, suppress(TimeoutError):
        # strangers may knock all the time: the time is that of all of them together
        while leads - set(found) and (left := end - monotonic()) > 0:
            listener.settimeout(left)
            connection, _ = listener.accept()
            with suppress(OSError):
                connection.settimeout(min(1, max(0.001, end - monotonic())))
                said = _receive(connection, _HALF + 4)
                if hmac.compare_digest(said[:_HALF], secret[:_HALF]):
                    connection.sendall(secret[_HALF:])
                    found[int.from_bytes(said[_HALF:], "big")] = connection
    return found


def _reach(addresses: list[str], port: int, secret: bytes, rank: int) -> Connections:
    """The connection with rank 0 by the first address that leads there.

    An address such as a container bridge's may belong to another machine here: only rank 0 knows
    the secret's second half.
    """
    for address in addresses:
        with suppress(OSError):
            connection = socket.create_connection((address, port), timeout=1)
            connection.sendall(secret[:_HALF] + rank.to_bytes(4, "big"))
            if hmac.compare_digest(_receive(connection, _HALF), secret[_HALF:]):
                return {0: connection}
    return {}


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    with connection.makefile("rb") as file:
        return file.read(num_bytes)


def _keep_alive(connection: socket.socket, silence: int) -> None:
    """Let the kernel ask about once a second, and fail after `silence` seconds without answer."""
    tcp = socket.IPPROTO_TCP
    interval = -(-silence // _MOST_PROBES)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, -(-silence // interval))
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 1000 * silence)
