"""What links between processes share: messages that have a label, and receives posted ahead."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hybrid.errors import AgreedError, PeerError, StoppedError
from hybrid.links.base import Program, RankLinks, Start, num_bytes
from hybrid.links.communicator import Communicator, abort, start_limited, waits_limited
from hybrid.links.staging import Outgoing, Staging, as_dense, format_of, memory_of, room_for

T = TypeVar("T")
Format = tuple[int, ...]

AHEAD = 2
"""Receives that wait for a neighbor's next messages: one moves while the other is used."""
MOST_AHEAD = 8
"""Formats of which receives wait at once: lengths may give many, each with memory of its own."""
_LABEL, _DESCRIPTION, _FIRST_FORMAT = 0, 1, 2


class Request(Protocol):
    """A message that has begun to move."""

    def wait(self) -> None:
        """Wait until its memory may be used; PeerError if the other rank has ended."""
        ...

    def done(self) -> bool:
        """Whether `wait` would not wait."""
        ...


@dataclass
class Outbox:
    """What goes to one rank."""

    formats: dict[Format, int] = field(default_factory=dict)
    """The number of every format that this rank has described to the other."""
    pending: deque[tuple[Request, Tensor]] = field(default_factory=deque)
    """Messages on their way, in order, and their memory."""
    sent: int = 0


@dataclass
class Inbox:
    """What comes from one rank."""

    formats: list[Format] = field(default_factory=list)
    labels: deque[tuple[Request, Tensor]] = field(default_factory=deque)
    posted: dict[int, deque[tuple[Request, Tensor]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """Receives that have begun, by the number of their format, in order."""
    last: int = -1
    """The number of the last message's format."""
    received: int = 0


class PostedLinks(RankLinks):
    """One block for each rank, which is a process; a tensor travels as the bytes of its memory.

        tag 0       label         (number of the format, numbers that describe it: 0 if it is known)
        tag 1       description   dtype, shape, strides of a format, before its first tensor
        tag 2 + i   the bytes of a tensor of format i

    A message beside those of neighbors and peers has twice such a tag plus one, others twice it.

    A tensor keeps its own stride order, so channels_last needs no copy. The label of 16 bytes says
    which receive the tensor is for. Receives are posted before anybody asks: of labels always, of a
    neighbor's tensors once two of one format have followed each other, of a peer's where the format
    is known beforehand. So a message moves while the block computes, straight into its place.

    A tensor on a GPU goes through the memory that `Staging` says; the block computes on while it is
    copied, and the next call of these links sends it.
    """

    in_one_process = False

    def __init__(self, start: Start, staging: Staging) -> None:
        comm: Communicator = start.comm
        super().__init__(start.grid.place(comm.rank, start.side_by_side))
        self._comm, self._staging = comm, staging
        self._ranks = [start.grid.rank(n, start.side_by_side) for n in range(comm.size)]
        """The launcher's rank at each place of the grid."""
        self._outboxes: dict[int, Outbox] = defaultdict(Outbox)
        self._inboxes: dict[int, Inbox] = {}
        self._staged: deque[tuple[Outgoing, Callable[[Tensor], None]]] = deque()
        """What is on its way into messages, in order, and how each begins."""

    @classmethod
    def start(cls, program: Program[T], start: Start) -> T:
        """Run `program` on this rank.

        A failure that the ranks have not agreed on ends the whole job at once: the others may be
        waiting for a message that will never come. So does a wait longer than `links.timeout`.
        """
        with start_limited(start.comm, start.settings.timeout):
            links = cls(start)  # type: ignore[call-arg]
        try:
            with waits_limited(links, start.comm, start.settings.timeout):
                result = links.run(program)
                links.close()
                return result
        except (AgreedError, StoppedError):
            with suppress(PeerError):  # a rank may have ended meanwhile
                links.close()
            raise
        except BaseException as error:
            abort(start.comm, error)
            raise

    @abstractmethod
    def _isend(self, memory: Tensor, number: int, tag: int) -> Request:
        """Begin to send bytes (n,) to the rank at the place of that number."""

    @abstractmethod
    def _irecv(self, memory: Tensor, number: int, tag: int) -> Request:
        """Begin to receive bytes (n,) from the rank at the place of that number."""

    def _gather(self, value: T, at: int) -> list[T] | None:
        self._send_staged(wait=True)
        everyone = self._comm.gather(value, self._ranks[at])
        return None if everyone is None else [everyone[rank] for rank in self._ranks]

    def _broadcast(self, value: T, at: int) -> T:
        self._send_staged(wait=True)
        return self._comm.bcast(value, self._ranks[at])

    @abstractmethod
    def _release(self) -> None:
        """Give back what belongs to these links alone; no message is under way on any rank."""

    def close(self) -> None:
        """All ranks call it. What nobody has taken by then is received, and dropped."""
        own = self.place.number
        sent = self._all_gather({n: box.sent for n, box in self._outboxes.items()}, True)
        lanes = [0, self.place.count]
        for number, theirs in enumerate(sent):
            for lane in lanes:
                box = self._inboxes.get(number + lane)
                received = box.received if box is not None else 0
                for _ in range(theirs.get(own + lane, 0) - received):
                    self._receive(number + lane)
        # what waits for a message gets one: not every library takes a receive back
        waiting = {n: [*_posted_bytes(box)] for n, box in self._inboxes.items()}
        for number, receives in enumerate(self._all_gather(waiting, True)):
            for lane in lanes:
                for tag, size in receives.get(own + lane, ()):
                    self._post(number + lane, torch.zeros(size, dtype=torch.uint8), tag)
        for box in self._inboxes.values():
            for queue in (box.labels, *box.posted.values()):
                while queue:
                    queue.popleft()[0].wait()
        self._wait_for_sent(list(self._outboxes))
        self._comm.barrier()
        self._release()

    def flush(self) -> None:
        with self.waiting("everyone"):
            self._wait_for_sent([n for n in self._outboxes if self.place.in_chain(n)])

    def _wait_for_sent(self, numbers: list[int]) -> None:
        self._send_staged(wait=True)
        for number in numbers:
            pending = self._outboxes[number].pending
            while pending:
                pending.popleft()[0].wait()

    def _send(self, number: int, tensor: Tensor) -> None:
        self._drop_sent()
        outgoing = self._staging.outgoing(as_dense(tensor))
        self._staged.append((outgoing, partial(self._send_memory, number)))
        self._send_staged(wait=False)

    def _send_staged(self, wait: bool) -> None:
        """Send what has been copied, in order; all of it if asked to wait."""
        while self._staged and (wait or self._staged[0][0].ready()):
            outgoing, begin = self._staged.popleft()
            outgoing.wait()
            begin(outgoing.memory)

    def _send_memory(self, number: int, tensor: Tensor) -> None:
        box, layout = self._outboxes[number], format_of(tensor)
        is_new = layout not in box.formats
        index = box.formats.setdefault(layout, len(box.formats))
        label = torch.tensor([index, len(layout) * is_new])
        self._post(number, memory_of(label), _LABEL)
        if is_new:
            self._post(number, memory_of(torch.tensor(layout)), _DESCRIPTION)
        if tensor.numel():
            self._send_data(number, tensor, _FIRST_FORMAT + index)
        box.sent += 1

    def _send_data(self, number: int, tensor: Tensor, tag: int) -> None:
        self._post(number, memory_of(tensor), tag)

    def _post(self, number: int, memory: Tensor, tag: int) -> None:
        request = self._isend(memory, *self._route(number, tag))
        self._outboxes[number].pending.append((request, memory))

    def _route(self, number: int, tag: int) -> tuple[int, int]:
        """The place and the tag of a message: those to places beyond the grid have odd tags."""
        lane, place = divmod(number, self.place.count)
        return place, 2 * tag + lane

    def _drop_sent(self) -> None:
        """Free the memory of what has left, and let the library make progress."""
        for box in self._outboxes.values():
            while box.pending and box.pending[0][0].done():
                box.pending.popleft()

    def _receive(self, number: int) -> Tensor:
        self._drop_sent()
        # the other rank may need these before it sends the tensor that is waited for here
        self._send_staged(wait=True)
        box = self._inbox(number)
        request, label = box.labels.popleft()
        request.wait()
        self._post_label(number, box)
        index, described = label.tolist()
        if described:
            layout = torch.empty(described, dtype=torch.int64)
            self._irecv(memory_of(layout), *self._route(number, _DESCRIPTION)).wait()
            box.formats.append(tuple(layout.tolist()))
        box.received += 1
        tensor = self._receive_data(number, box, index)
        box.last = index
        return tensor

    def _receive_data(self, number: int, box: Inbox, index: int) -> Tensor:
        posted = box.posted[index]
        if not posted:
            self._post_receive(number, box, index)
        if not posted:  # a tensor without an element is no message
            return self._staging.arrived(room_for(box.formats[index], self._staging.buffer))
        request, tensor = posted.popleft()
        ahead = sum(map(bool, box.posted.values())) < MOST_AHEAD or bool(posted)
        if ahead and index == box.last and self.place.in_chain(number):
            while len(posted) < AHEAD:
                self._post_receive(number, box, index)
        request.wait()
        return self._staging.arrived(tensor)

    def _post_receive(self, number: int, box: Inbox, index: int) -> None:
        tensor = room_for(box.formats[index], self._staging.buffer)
        if tensor.numel():
            route = self._route(number, _FIRST_FORMAT + index)
            request = self._irecv(memory_of(tensor), *route)
            box.posted[index].append((request, tensor))

    def _expect(self, number: int, like: Tensor) -> None:
        box, layout = self._inbox(number), format_of(as_dense(like))
        if layout in box.formats:
            self._post_receive(number, box, box.formats.index(layout))

    def _inbox(self, number: int) -> Inbox:
        """What comes from a rank; the receives of its labels begin at the first use."""
        if number not in self._inboxes:
            box = self._inboxes[number] = Inbox()
            for _ in range(AHEAD):
                self._post_label(number, box)
        return self._inboxes[number]

    def _post_label(self, number: int, box: Inbox) -> None:
        label = torch.empty(2, dtype=torch.int64)
        box.labels.append((self._irecv(memory_of(label), *self._route(number, _LABEL)), label))


def _posted_bytes(box: Inbox) -> Iterator[tuple[int, int]]:
    """The tag and the bytes of every receive that waits for a message."""
    for _, label in box.labels:
        yield _LABEL, num_bytes(label)
    for index, posted in box.posted.items():
        for _, tensor in posted:
            yield _FIRST_FORMAT + index, num_bytes(tensor)
