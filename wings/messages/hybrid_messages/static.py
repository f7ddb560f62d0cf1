"""Messages by the tick: the same bits every time, on any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from hybrid_messages.controller import Executor
from hybrid_messages.graph import Graph, Letter
from hybrid_messages.message import Message

Mail = tuple[int, bool, list[Message]]
"""A node, a direction and messages of that direction to the node."""


class Static(Executor):
    r"""A simulation in which every node has a processor of its own and a message takes a tick.

        each tick   instances are admitted, as many as may be
                    each node that has mail takes some: backward first; one message, or `Node.most`
                    when all have done, what they send is delivered, in the order of the nodes

    Nothing depends on how fast anything is, so the result has the same bits run after run, and a
    tick's nodes may be spread over `workers` threads without changing it: no node touches what is
    another's. (What one operation of torch returns may depend on torch.set_num_threads.)
    """

    def __init__(self, graph: Graph, max_active_keys: int = 1, workers: int = 1) -> None:
        super().__init__(graph, max_active_keys)
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        self.workers = workers
        self.ticks = 0
        """So far."""

    def _work(self) -> None:
        if self.workers == 1:
            self._ticks(map)
        else:
            with ThreadPoolExecutor(self.workers) as pool:
                self._ticks(pool.map)

    def _ticks(self, spread: Callable[..., Iterable[list[Letter]]]) -> None:
        self._deliver(self._admit())
        while mail := self._mail():
            self.ticks += 1
            sent = list(spread(self._handle, mail))
            for (_, _, handled), letters in zip(mail, sent, strict=True):
                self._account(handled, letters)
                self._deliver(letters)
            self._deliver(self._admit())

    def _mail(self) -> list[Mail]:
        """What each node takes in a tick, by node."""
        mail = []
        for at in range(len(self.graph.nodes)):
            forward = not self._inboxes[at, False]
            if self._inboxes[at, forward]:
                mail.append((at, forward, self._take(at, forward)))
        return mail

    def _handle(self, mail: Mail) -> list[Letter]:
        return self.graph.handle(*mail, self._learn)

    def _deliver(self, letters: Iterable[Letter]) -> None:
        for node, forward, message in letters:
            self._inboxes[node, forward].append(message)
