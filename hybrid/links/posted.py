"""Links between processes: labeled messages of tensors, and receives posted ahead."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from hybrid.errors import AgreedError, PeerError, StoppedError, given_by
from hybrid.links.base import Program, RankLinks, Start
from hybrid.links.communicator import Communicator, Transfer, abort, start_limited, waits_limited
from hybrid.links.staging import (
    Format,
    Outgoing,
    Staging,
    as_dense,
    format_of,
    joined_bytes,
    memory_of,
    split_bytes,
)
from hybrid.solvers.peers import Sum

T = TypeVar("T")
AHEAD = 2
"""Receives posted for a neighbor's next messages: one arrives while the other is used."""
MOST_AHEAD = 8
"""Most formats with posted receives: varying lengths give many, and each receive takes memory."""
_LABEL, _DESCRIPTION, _FIRST_FORMAT = 0, 1, 2


class Channel:
    """Tensors to and from one rank, in order; a tensor travels as the bytes of its memory.

        tag 0       label         (format number, length of its description: 0 if described already)
        tag 1       description   dtype, shape, strides of a format, before its first tensor
        tag 2 + i   the bytes of a tensor of format i

    There are two lanes between ranks; on lane l tag t is sent as 2 t + l.

    A tensor keeps its stride order, so channels_last needs no copy. The label of 16 bytes says
    which receive the tensor is for. Receives are posted ahead: labels always, a neighbor's tensors
    of a format that has come lately, a peer's if the format is known beforehand. So a message moves
    while the block computes, straight into its destination.
    """

    def __init__(
        self,
        comm: Communicator,
        number: int,
        staging: Staging,
        wait: Callable[[Transfer], None],
        neighbor: bool = False,
    ) -> None:
        self._comm, self._staging, self._neighbor, self._wait = comm, staging, neighbor, wait
        self._lane, self._rank = divmod(number, comm.size)
        self._described: dict[Format, int] = {}
        """The numbers of the formats that this rank has described to the other."""
        self._formats: list[Format] = []
        """The formats that the other rank has described."""
        self._labels: deque[tuple[Transfer, Tensor]] = deque()
        self.posted: dict[int, deque[tuple[Transfer, Tensor]]] = defaultdict(deque)
        """Posted receives of tensors by format number, in order."""
        self._recent = deque[int](maxlen=MOST_AHEAD)
        """The format numbers of the last tensors received: a message may be several tensors."""
        self.pending: deque[tuple[Transfer, Tensor]] = deque()
        """Sends under way, in order, and their memory."""

    def outgoing(self, tensor: Tensor) -> Outgoing:
        """Begin to stage a tensor; pass it to `send` when it is ready."""
        return self._staging.outgoing(as_dense(tensor))

    def send(self, tensor: Tensor) -> None:
        """Begin to send a dense tensor, in the order of the calls."""
        layout = format_of(tensor)
        is_new = layout not in self._described
        index = self._described.setdefault(layout, len(self._described))
        self._begin_send(torch.tensor([index, len(layout) * is_new]), _LABEL)
        if is_new:
            self._begin_send(torch.tensor(layout), _DESCRIPTION)
        if tensor.numel():
            self._send_data(tensor, index)

    def receive(self) -> Tensor:
        self._listen()
        transfer, label = self._labels.popleft()
        self._wait(transfer)
        self._listen()
        index, described = label.tolist()
        if described:
            layout = torch.empty(described, dtype=torch.int64)
            self._begin_receive(layout, _DESCRIPTION).wait()
            self._formats.append(tuple(layout.tolist()))
        tensor = self._receive_data(index)
        self._recent.append(index)
        return tensor

    def expect(self, like: Tensor) -> None:
        """Post a receive for the next tensor of a format that has been described."""
        self._listen()
        layout = format_of(as_dense(like))
        if layout in self._formats:
            self._post(self._formats.index(layout))

    def drop_sent(self) -> None:
        """Free the memory of completed sends, and let the library make progress."""
        while self.pending and self.pending[0][0].done():
            self.pending.popleft()

    def flush(self) -> None:
        while self.pending:
            self.pending.popleft()[0].wait()

    def close(self) -> None:
        """Finish all sends and cancel posted receives."""
        self.flush()
        for queue in (self._labels, *self.posted.values()):
            while queue:
                queue.popleft()[0].cancel()

    def _send_data(self, tensor: Tensor, index: int) -> None:
        self._begin_send(tensor, _FIRST_FORMAT + index)

    def _receive_data(self, index: int) -> Tensor:
        posted = self.posted[index]
        if not posted:
            self._post(index)
        if not posted:  # an empty tensor is not sent
            return self._staging.arrived(self._staging.room(self._formats[index]))
        transfer, tensor = posted.popleft()
        ahead = sum(map(bool, self.posted.values())) < MOST_AHEAD or bool(posted)
        if ahead and index in self._recent and self._neighbor:
            while len(posted) < AHEAD:
                self._post(index)
        self._wait(transfer)
        return self._staging.arrived(tensor)

    def _post(self, index: int) -> None:
        tensor = self._staging.room(self._formats[index])
        if tensor.numel():
            transfer = self._begin_receive(tensor, _FIRST_FORMAT + index)
            self.posted[index].append((transfer, tensor))

    def _listen(self) -> None:
        """Post the receives of the next labels."""
        while len(self._labels) < AHEAD:
            label = torch.empty(2, dtype=torch.int64)
            self._labels.append((self._begin_receive(label, _LABEL), label))

    def _begin_send(self, tensor: Tensor, tag: int) -> None:
        memory = memory_of(tensor)
        transfer = self._comm.isend(memory, self._rank, 2 * tag + self._lane)
        self.pending.append((transfer, memory))

    def _begin_receive(self, tensor: Tensor, tag: int) -> Transfer:
        return self._comm.irecv(memory_of(tensor), self._rank, 2 * tag + self._lane)


class PostedLinks(RankLinks):
    """Links of a process with one block: a channel to each rank it exchanges messages with.

    A tensor on a GPU is copied by `Staging` while the block computes on. MPI and gloo send what is
    in host memory, and do so when the host calls them: the next call of these links sends it, or a
    wait for a neighbor as soon as the copy is complete. If MPI has the neighbor's message first,
    the host goes on to launch what needs it, and does not wait for the copy.
    """

    in_one_process = False
    library: ClassVar[str]
    """What carries messages."""
    polls = True
    """Whether a receive tells that its message is there, before anyone waits for it."""
    collective_above = 8
    on_device = False
    """Whether the peers' collectives read a GPU's memory."""

    def __init__(self, start: Start) -> None:
        comm, grid, timeout = self._transport(start.comm), start.grid, start.settings.timeout
        places = range(grid.ranks)
        ranks = torch.tensor([grid.rank(n, start.side_by_side) for n in places])
        chains = ranks.view(grid.replicas, grid.blocks)
        whole = comm.split([ranks.tolist()], timeout)
        chain = comm.split(chains.tolist(), timeout) if grid.replicas > 1 else whole
        super().__init__(grid.place(comm.rank, start.side_by_side), whole, chain)
        self.tensors_by = self.way(start)
        self._device = start.device or torch.device("cpu")
        self._whole, self._replicas = whole, comm.split(chains.T.tolist(), timeout, self.on_device)
        self._groups = dict.fromkeys((whole, chain, self._replicas))
        self._staging = Staging(self._device)
        self._peers_staging = Staging(self._device, self.on_device)
        self._channels: dict[int, Channel] = {}
        self._staged: deque[tuple[Outgoing, Callable[[Tensor], None]]] = deque()
        """Tensors being staged, in order, each with the function that sends it."""
        self._collectives: deque[tuple[Transfer, Tensor]] = deque()
        """Collectives of the peers under way, and their memory."""

    @classmethod
    def way(cls, start: Start) -> str:
        on_gpu = start.device is not None and start.device.type == "cuda"
        return f"{cls.library}{' through host memory' * on_gpu}"

    def _transport(self, comm: Communicator) -> Communicator:
        """Return the communicator that carries messages, from that of the launched ranks."""
        return comm

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run `program` on this rank.

        A failure that the ranks have not agreed on ends the whole job at once: others may be
        waiting for a message that never comes. So does a wait longer than `links.timeout`.
        """
        comm, timeout = start.comm, start.settings.timeout
        with start_limited(comm, timeout):
            links = cls(start)
        again = given_by("--resume", "resume=True")
        remedy = f"find out why that rank is stuck, then go on with {again}"
        try:
            with waits_limited(comm, timeout, lambda: links.wait, remedy):
                result = links.run(program)
                links.close()
                return result
        except (AgreedError, StoppedError):
            with suppress(PeerError):  # a rank may have ended in the meantime
                links.close()
            raise
        except BaseException as error:
            abort(comm, error)
            raise

    def close(self) -> None:
        self.drop()
        for channel in self._channels.values():
            channel.close()
        self._whole.barrier()
        for group in self._groups:
            group.close()

    def flush(self) -> None:
        with self.waiting("everyone"):
            for number, channel in self._channels.items():
                if self.place.in_chain(number):
                    channel.flush()

    def _channel(self, number: int) -> Channel:
        if number not in self._channels:
            self._channels[number] = self._new_channel(number)
        return self._channels[number]

    def _new_channel(self, number: int) -> Channel:
        near = self.place.in_chain(number)
        return Channel(self._whole, number, self._staging, self._wait_for, near)

    def _send(self, number: int, tensor: Tensor) -> None:
        self._drop_sent()
        channel = self._channel(number)
        self._staged.append((channel.outgoing(tensor), channel.send))
        self._send_staged(wait=False)

    def _receive(self, number: int) -> Tensor:
        self._drop_sent()
        return self._channel(number).receive()

    def expect(self, number: int, like: Tensor) -> None:
        self._channel(number).expect(like)

    def _before_wait(self, side: str) -> None:
        if side not in ("next", "previous"):
            self._send_staged(wait=True)

    def _wait_for(self, transfer: Transfer) -> None:
        """Wait for a message; meanwhile send staged tensors as they get ready."""
        while self._staged and not (self.polls and transfer.done()):
            self._send_staged(wait=not self.polls)
        transfer.wait()

    def _send_staged(self, wait: bool) -> None:
        """Send staged tensors that are ready, in order; with `wait`, all of them."""
        while self._staged and (wait or self._staged[0][0].ready()):
            outgoing, begin = self._staged.popleft()
            outgoing.wait()
            begin(outgoing.memory)

    def _drop_sent(self) -> None:
        for channel in self._channels.values():
            channel.drop_sent()
        while self._collectives and self._collectives[0][0].done():
            self._collectives.popleft()

    def sum_of_peers(self, vector: Tensor) -> Sum:
        return self._collective(vector, self._replicas.all_reduce)

    def exchange_of_peers(
        self, pieces: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        sent, received = ([tensor.nbytes for tensor in each] for each in (pieces, expected))
        begun = self._collective(
            joined_bytes(pieces), lambda memory: self._replicas.all_to_all(memory, sent, received)
        )
        return lambda: split_bytes(begun.finish(), expected)

    def _collective(
        self, tensor: Tensor, begin: Callable[[Tensor], tuple[Tensor, Transfer]]
    ) -> Sum:
        """Begin a collective of the peers once its data is staged."""
        posted = list[tuple[Tensor, Transfer]]()

        def post(memory: Tensor) -> None:
            posted.append(begin(memory))
            self._collectives.append((posted[0][1], memory))  # to let it progress

        def finish() -> Tensor:
            ((memory, transfer),) = posted
            transfer.wait()
            self._drop_sent()  # a grid of single blocks sends no messages that would do it
            return self._peers_staging.arrived(memory)

        def ready() -> bool:
            self._send_staged(wait=False)
            return bool(posted) and posted[0][1].done()

        self._drop_sent()
        self._staged.append((self._peers_staging.outgoing(tensor), post))
        self._send_staged(wait=False)
        return Sum(finish, ready)
