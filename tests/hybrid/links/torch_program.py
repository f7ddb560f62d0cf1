"""What test_processes.py runs on every rank, over each kind of links."""

import os
import threading
from contextlib import suppress
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import world
from ports import listening

from hybrid.errors import AgreedError
from hybrid.links import gpus
from hybrid.links.base import Start
from hybrid.links.gloo import GlooLinks, join_by_torch
from hybrid.links.mpi import MpiLinks
from hybrid.links.nccl import NcclLinks
from hybrid.solvers.sync.all_reduce import AllReduce
from tests.hybrid.links.mpi_program import agreed, arrivals, exchange
from tests.hybrid.links.sent_bytes import sent_bytes

LINKS = {"mpi": MpiLinks, "torch": GlooLinks, "as nccl": NcclLinks}
"""Without a GPU labels and tensors of the last travel in its groups, but by gloo."""


def facts(comm, kind):
    links = LINKS[kind](Start.of(comm))
    found = arrivals(links)
    # a megabyte each: far more than MPI sends eagerly
    found["crossed"] = exchange(links, 30, lambda i, rank: torch.full((1 << 18,), i + 100.0 * rank))
    found["pending"] = sum(len(channel.pending) for channel in links._channels.values())
    found["gathered"] = links.all_gather(10 * links.rank)
    found["agreed"] = agreed(links)
    found["sent back"] = links.traffic.bytes_sent["previous"]
    links.close()
    found["left"] = [dist.is_initialized(), messages_threads()]
    return found


def messages_threads():
    return [thread.name for thread in threading.enumerate() if "messages" in thread.name]


def ports(comm):
    """Addresses at which ranks listen that MPI has joined, once their links are torch's."""
    before = listening()
    links = GlooLinks(Start.of(comm))
    found = {address for address, _ in listening() - before}
    links.close()
    return found


class Payload:
    """Makes a file in whoever unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def attacked(comm, path):
    """What rank 0 makes of pickles that rank 1 sends in place of values."""
    joined, found = join_by_torch(comm), []
    payload = Payload(Path(path))
    for way in ("broadcast", "gather"):
        if comm.rank == 1:
            if way == "broadcast":
                dist.broadcast_object_list([payload], 1, joined._group)
            else:
                dist.gather_object(payload, None, 0, joined._group)
            continue
        try:
            joined.bcast(None, 1) if way == "broadcast" else joined.gather(None)
        except ValueError as error:
            found.append(str(error))
    comm.barrier()
    joined.close()
    return found


def threads_after_failure(comm):
    """Threads that are left where all ranks fail together, and nobody has taken a message."""

    def program(links):
        links.to_next(torch.zeros(1 << 18)) if links.rank == 0 else None
        with links.agreement():
            raise ValueError("unwell")

    with suppress(AgreedError):
        GlooLinks.start(program, Start.of(comm))
    return messages_threads()


def sums(comm, kind):
    """What the engine of links finds with every rank a replica, and what it should."""
    links, sent = LINKS[kind](Start.of(comm, comm.size)), sent_bytes() or int
    comm.barrier()
    before = sent()
    links.collective_above = 1
    each = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
    ends = [links.peers.sum(factor * each[links.place.replica]) for factor in (1, 2)]
    second, first = ends[1].finish(), ends[0].finish()
    pieces = [each[links.place.replica][: 3 + r].to(torch.bfloat16) for r in range(comm.size)]
    mine = [pieces[links.place.replica]] * comm.size
    arrived = links.peers.exchange(pieces, mine)()
    counted, small = links.traffic.bytes_sent["peers"], sent() - before
    links.peers.sum(torch.zeros(1 << 18)).finish()
    large = links.traffic.bytes_sent["peers"] - counted, sent() - before - small
    links.close()
    expected = reduce(torch.add, each)
    length = 3 + links.place.replica
    theirs = [x[:length].to(torch.bfloat16) for x in each]
    return {
        "close": torch.allclose(first, expected, atol=1e-5),
        "twice": torch.allclose(second, 2 * expected, atol=1e-5),
        "bits": first.numpy().tobytes(),
        "exchanged": all(map(torch.equal, arrived, theirs)),
        "sent": (counted, small),
        "sent of 1 MiB": large,
    }


def hybrid(comm, words):
    """The command on ranks that are joined as torchrun's are."""
    joined = join_by_torch(comm)
    try:
        return world.hybrid(joined, words, "torch")
    finally:
        joined.close()


def with_gpus(comm, words):
    """The command on ranks that MPI has joined, as if each had its own GPU."""
    gpu = mock.patch.object(gpus, "_gpu", return_value=("here", comm.rank))
    with gpu, mock.patch.object(gpus, "_fault", return_value=""):
        return world.hybrid(comm, words)


def held(comm, kind):
    """After 300 steps with every rank a replica: sums that links still hold, and MB."""
    links = LINKS[kind](Start.of(comm, comm.size))
    steps(links, 50)
    before = resident()
    steps(links, 250)
    found = len(links._collectives), (resident() - before) / 1e6
    links.close()
    return found


def steps(links, count):
    """Sums of gradients, of 256 KiB and a vector of counts each, by the links' engine."""
    module = torch.nn.Linear(256, 255)
    block = SimpleNamespace(module=module, stepping=lambda kind: [*module.parameters()])
    sync = AllReduce(order="engine").start(block, links.peers, 1.0)
    for _ in range(count):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        sync.before_step("exact", 0.1)
    assert torch.equal(module.bias.grad, torch.full((255,), float(links.place.replicas)))


def resident():
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
