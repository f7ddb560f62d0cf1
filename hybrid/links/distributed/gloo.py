"""Links between processes by gloo, which carries tensors in host memory over TCP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybrid.errors import AgreedError, PeerError, StoppedError
from hybrid.links.base import Program, RankLinks, Start
from hybrid.links.distributed.communicator import c10d, gloo_group, new_store
from hybrid.links.distributed.mailbox import Receiver, Sender
from hybrid.links.ending import abort, waits_limited
from hybrid.links.layout import as_dense, joined_bytes, sizes_in_bytes, split_bytes
from hybrid.links.staging import staging
from hybrid.ranks.grid import Grid, arranged

T = TypeVar("T")


class GlooLinks(RankLinks):
    """One block for each rank; tensors travel by gloo, whatever launcher started the ranks.

        to_next -> queue -> thread: header, bytes ==TCP==> thread: header, bytes -> queue -> receive

    Each pair of ranks that exchange tensors has a thread at both ends, which waits inside gloo for
    the next message before anybody asks for it: a message moves while the block computes. A tensor
    on a GPU goes through pinned memory, see `Staging`.
    """

    name, in_one_process = "torch", False
    settings = frozenset({"timeout"})

    def __init__(self, comm: Any, device: torch.device | None = None, replicas: int = 1) -> None:
        super().__init__(Grid(comm.size // replicas, replicas).place(comm.rank))
        self._comm, self._device = comm, device or torch.device("cpu")
        self._chain = comm if replicas == 1 else comm.Split(self.place.replica, self.rank)
        self._staging = staging(self._device, gpu_aware=False)
        self._store = new_store(comm)
        self._group = gloo_group(c10d.PrefixStore("all", self._store), comm.rank, comm.size)
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._peers_group = self._group_of_peers()

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run `program` on this rank.

        A failure that the ranks have not agreed on ends this rank at once, and with it the job.
        """
        replicas = start.grid.replicas
        comm = arranged(start.comm, replicas, start.side_by_side)
        links = cls(comm, start.device, replicas)
        try:
            with waits_limited(links, comm, start.settings.timeout):
                result = links.run(program)
                links.close()
                return result
        except (AgreedError, StoppedError):
            with suppress(PeerError, RuntimeError):  # a rank may have ended meanwhile
                links.close()
            raise
        except BaseException as error:
            abort(comm, error)
            raise

    def flush(self) -> None:
        for number, sender in self._senders.items():
            if self.place.in_chain(number):
                sender.flush()

    def close(self) -> None:
        """End the threads, which would abort a process that ends; all ranks call it.

        What nobody has taken by then is received, and dropped.
        """
        for number, others in enumerate(self._comm.allgather(list(self._senders))):
            if self.place.number in others:
                self._receiver(number)
        for sender in self._senders.values():
            sender.put(None)
            sender.flush()
        self._comm.Barrier()

    def _send(self, number: int, tensor: Tensor) -> None:
        self._sender(number).put(self._staging.outgoing(as_dense(tensor)))

    def _receive(self, number: int) -> Tensor:
        return self._staging.arrived(self._receiver(number).take())

    def _arrived(self, number: int) -> bool:
        return self._receiver(number).has_message()

    def _all_gather(self, value: T, grid: bool) -> list[T]:
        everyone: list[T] = (self._comm if grid else self._chain).allgather(value)
        return everyone

    def _sum_of_peers(self, vector: Tensor) -> Callable[[], Tensor]:
        outgoing = self._to_engine(vector)
        work = self._peers_group.allreduce([outgoing])

        def finish() -> Tensor:
            work.wait()
            return self._from_engine(outgoing)

        return finish

    def _exchange_with_peers(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        sent = self._to_engine(joined_bytes(pieces))
        sizes = sizes_in_bytes(expected)
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=sent.device)
        work = self._peers_group.alltoall_base(received, sent, sizes, sizes_in_bytes(pieces))

        def finish() -> list[Tensor]:
            work.wait()
            return split_bytes(self._from_engine(received), expected)

        return finish

    def _to_engine(self, tensor: Tensor) -> Tensor:
        """A tensor where the group of peers reads it."""
        outgoing = self._staging.outgoing(tensor)
        outgoing.wait()
        return outgoing.memory

    def _from_engine(self, tensor: Tensor) -> Tensor:
        """The tensor on the block's device."""
        return self._staging.arrived(tensor)

    def _group_of_peers(self) -> Any:
        return self._peers_of(gloo_group)

    def _peers_of(self, make: Callable[[Any, int, int], Any]) -> Any:
        place = self.place
        if place.replicas == 1:
            return None
        store = c10d.PrefixStore(f"block {place.block}", self._store)
        return make(store, place.replica, place.replicas)

    def _sender(self, number: int) -> Sender:
        if number not in self._senders:
            self._senders[number] = Sender(self._group, number)
        return self._senders[number]

    def _receiver(self, number: int) -> Receiver:
        if number not in self._receivers:
            self._receivers[number] = Receiver(self._group, number, self._staging.buffer)
        return self._receivers[number]
