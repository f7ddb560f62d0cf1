"""Messages as they come: a thread a worker, and no run like another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from threading import Condition, Thread

from hybrid_messages.executor import Executor
from hybrid_messages.graph import Graph, Letter
from hybrid_messages.node import Message


class AnyOrder(Executor):
    """The paper's own form: workers that own nodes and take what has come, backward first.

    **No run can be repeated**: the order in which a node gets messages, so what its weights are
    when it gets them, is up to the machine. What `Executor` promises holds all the same.

    `places` says which worker (0 .. workers-1) a node belongs to; those that it does not name are
    dealt out in turn. Threads of Python compute at the same time only while they are inside
    torch, so small layers gain little or lose.

    Following Gaunt et al., arXiv 1705.09786, section 4.
    """

    def __init__(
        self,
        graph: Graph,
        max_active_keys: int = 1,
        workers: int = 2,
        places: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(graph, max_active_keys)
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        self.workers = workers
        self._places = [at % workers for at in range(len(graph.nodes))]
        for name, worker in (places or {}).items():
            if not 0 <= worker < workers:
                raise ValueError(f"{name!r} is placed on worker {worker}; there are {workers}")
            self._places[graph.index(name)] = worker

    def _work(self) -> None:
        self._changed = Condition()
        self._mail = [(deque[int](), deque[int]()) for _ in range(self.workers)]
        self._error: BaseException | None = None
        self._over = False
        self._deliver(self._admit())
        self._over = not self._active
        threads = [
            Thread(target=self._serve, args=[worker], daemon=True) for worker in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._stop(None)
        if self._error:
            raise self._error

    def _serve(self, worker: int) -> None:
        try:
            while (mail := self._next(worker)) is not None:
                at, forward, messages = mail
                letters = self.graph.handle(at, forward, messages, self._learn)
                with self._changed:
                    self._account(messages, letters)
                    self._deliver([*letters, *self._admit()])
                    self._over = self._over or not self._active
                    self._changed.notify_all()
        except BaseException as error:
            self._stop(error)

    def _next(self, worker: int) -> tuple[int, bool, list[Message]] | None:
        """A node of the worker's and messages to it; None when all is over."""
        with self._changed:
            while not self._over:
                for forward, nodes in enumerate(self._mail[worker]):
                    while nodes:
                        at = nodes.popleft()
                        if messages := self._take(at, bool(forward)):
                            return at, bool(forward), messages
                self._changed.wait()
            return None

    def _deliver(self, letters: Iterable[Letter]) -> None:
        for node, forward, message in letters:
            self._inboxes[node, forward].append(message)
            self._mail[self._places[node]][forward].append(node)

    def _stop(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._over = True
            self._changed.notify_all()
