"""What test_processes.py runs on every rank, over MPI alone."""

import itertools
from contextlib import suppress
from time import sleep
from unittest import mock

import torch
from mpi4py import MPI

from hybrid.links import AgreedError
from hybrid.links.base import Start
from hybrid.links.mpi import MpiLinks
from hybrid.links.staging import Outgoing, Staging

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
SHAPES = ((), (1,), (5,), (0,), (3, 0), (0, 3), (1, 4), (4, 1), (2, 3), (2, 1, 3), (2, 3, 4, 5))


def tensors():
    """Every dtype with every shape and memory order, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
        yield tensor
        if tensor.ndim > 1:
            yield tensor.transpose(0, -1)
        if tensor.ndim == 4:
            yield tensor.contiguous(memory_format=torch.channels_last)
            yield tensor.contiguous(memory_format=torch.channels_last)[1:]


def slices():
    """Tensors with gaps or overlaps in memory."""
    x = torch.arange(24.0).view(4, 6)
    return [x[:, ::2], x[1:, 2:4], x[:1].expand(3, 6)]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def arrivals(links):
    """Pass everything down the chain; name what arrives otherwise than it was made."""
    first, last = links.rank == 0, links.rank == links.size - 1
    wrong, checked = [], 0
    for made in tensors():
        arrived = made if first else links.from_previous()
        if not (same(arrived, made) and arrived.stride() == made.stride()):
            wrong.append(f"{made.dtype} {tuple(made.shape)} {made.stride()}")
        checked += 1
        if not last:
            links.to_next(arrived)
    gaps = []
    for made in slices():
        if not last:
            links.to_next(made)
        if not first:
            arrived = links.from_previous()
            gaps.append(same(arrived, made) and arrived.is_contiguous())
    return {"wrong": wrong, "checked": checked, "slices": gaps}


def exchange(links, turns, make, late=False):
    """Send `turns` tensors to both neighbors, then receive theirs; whether all is right."""
    first, last = links.rank == 0, links.rank == links.size - 1
    for i in range(turns):
        if not last:
            links.to_next(make(i, links.rank))
        if not first:
            links.to_previous(make(i, links.rank))
    right = True
    for i in range(turns):
        if not first:
            right &= torch.equal(links.from_previous(), make(i, links.rank - 1))
        if not last:
            right &= torch.equal(links.from_next(), make(i, links.rank + 1))
    links.flush()
    return right


def copying(comm):
    """Links that stage as from a GPU: what is sent is there only after some looks at it."""

    class Event:
        looks = 0

        def query(self):
            self.looks += 1
            return self.looks > 3

        def synchronize(self):
            while not self.query():
                pass

    class Copying(Staging):
        def outgoing(self, tensor):
            return Copy(torch.zeros_like(tensor), tensor, Event())

    class Copy(Outgoing):
        def __init__(self, memory, tensor, event):
            super().__init__(memory, event)
            self.tensor = tensor

        def wait(self):
            super().wait()
            self.memory.copy_(self.tensor)

    links = MpiLinks(Start.of(comm))
    links._staging = Copying(torch.device("cpu"))
    return links


def messages(comm):
    """Messages sent while two formats of five tensors each go both ways."""

    links = MpiLinks(Start.of(comm))
    with mock.patch.object(links._whole, "isend", side_effect=links._whole.isend) as sent:
        exchange(links, 10, lambda i, rank: torch.full((3, 2 + i % 2), float(rank)))
    return sum(call.args[2] > 0 for call in sent.call_args_list)  # not of labels


def counted(comm):
    """Bytes over both links; rank 0 makes the others wait for it."""
    links = MpiLinks(Start.of(comm))
    comm.barrier()
    if links.rank == 0:
        sleep(0.3)
    else:
        links.from_previous()
        links.from_previous()
    if links.rank < links.size - 1:
        links.to_next(torch.zeros(3, dtype=torch.float64))
        links.to_next(torch.zeros((), dtype=torch.float32))
    links.flush()
    waited = links.traffic.total_waiting
    if links.rank > 0:
        links.to_previous(torch.zeros(3, dtype=torch.bool))
    if links.rank < links.size - 1:
        links.from_next()
    links.flush()
    return {"bytes": links.traffic.bytes_sent, "waited": waited}


def agreed(links):
    try:
        with links.agreement():
            if links.rank > 0:
                raise ValueError(f"rank {links.rank} is unwell")
    except AgreedError as error:
        return str(error)
    return "passed"


def facts(comm):
    found = {"messages": messages(comm), "freed": freed(comm)}
    found["copied late"] = exchange(copying(comm), 10, lambda i, rank: torch.full((9,), i + rank))
    found["many lengths"] = receives_ahead(comm)
    return found | counted(comm)


def receives_ahead(comm):
    """The most tensors that a rank makes room for ahead, while 300 lengths come twice in a row."""
    links, most = MpiLinks(Start.of(comm)), 0
    for i in range(600):
        exchange(links, 1, lambda _, rank, i=i: torch.full((1 + i // 2,), float(rank)))
        channels = links._channels.values()
        waiting = [len(posted) for channel in channels for posted in channel.posted.values()]
        most = max(most, sum(waiting) // len(channels))
    links.close()
    return most


def freed(comm):
    """Whether the communicators made for a grid of three replicas are given back, failed or not."""
    made = []

    def program(links):
        made.append(links)
        assert links.place.replicas == 3
        if len(made) == 2:
            with links.agreement():
                raise ValueError("unwell")

    start = Start.of(comm, 3)
    MpiLinks.start(program, start)
    with suppress(AgreedError):
        MpiLinks.start(program, start)
    return [c == MPI.COMM_NULL for links in made for c in (links._chain.mpi, links._grid.mpi)]
