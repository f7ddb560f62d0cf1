"""Ranks of one mpirun that run programs one after another, each on as many as it wants.

    test process                      rank 0..3 of `mpirun -n 4`
    run(2, "module:function", 5)  ->  function(communicator of ranks 0 and 1, 5)
    [result of 0, result of 1]    <-

A waiting rank reads from a socket, so it takes no core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any
from unittest import mock

ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    # ranks that wait leave the cores to others
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
COUNTING = {"OMPI_MCA_pml_monitoring_enable": "1"}
"""Lets Open MPI count the bytes it sends, see `sent_bytes`."""
FOLDER = "PRTE_MCA_prte_tmpdir_base"
RANKS = 4
_ROOT = Path(__file__).parents[3]


@cache
def _files() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hybrid-mpirun-")


def for_mpirun() -> dict[str, str]:
    """The variables that an mpirun is started with here, a new folder for its files among them.

    One that is killed leaves them, and they end every later mpirun in the same folder that happens
    to get its process number: "The PMIx server's listener thread failed to start".
    """
    return ALLOWED | {FOLDER: tempfile.mkdtemp(dir=_files().name)}


class World:
    """The test's end: starts the ranks when they are first wanted, and anew after a failure."""

    def __init__(self) -> None:
        self._job: subprocess.Popen[bytes] | None = None
        self._ranks: list[Connection] = []

    def run(self, size: int, program: str, *arguments: Any, limit: float = 100) -> list[Any]:
        """What `module:function` gives on the first `size` ranks, called with their communicator.

        A rank that raises, or none that answers within `limit` seconds, is an AssertionError.
        """
        if self._job is None or self._job.poll() is not None:
            self._start()
        for rank in self._ranks[:size]:
            rank.send((size, program, arguments))
        answers = [self._answer(rank, limit) for rank in self._ranks[:size]]
        if failures := [text for failed, text in answers if failed]:
            self.close()
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def train(self, size: int, program: str, *arguments: Any) -> list[Any]:
        """What `module:function` gives where it trains, or else acts, on ranks of a launcher."""
        return self.run(size, "world:train", program, *arguments)

    def hybrid(self, size: int, *words: object, limit: float = 100) -> tuple[int, str, str]:
        """The command on `size` ranks: (worst exit status, stdout, stderr of all)."""
        found = self.run(size, "world:hybrid", [str(word) for word in words], limit=limit)
        statuses, out, err = zip(*found, strict=True)
        return max(statuses), "".join(out), "".join(err)

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        if self._job is not None:
            with suppress(subprocess.TimeoutExpired):
                self._job.wait(5)
            self._job.terminate()
            self._job.wait(20)
            self._job = None

    def _start(self) -> None:
        self.close()
        folders = [_ROOT, *_ROOT.glob("tests/support/*"), *_ROOT.glob("wings/*/tests")]
        path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
        with tempfile.TemporaryDirectory() as folder:
            address = str(Path(folder, "world"))
            with Listener(address, "AF_UNIX") as listener:
                # each rank may use all cores, as with more ranks than cores
                words = [Path(sys.executable).with_name("mpirun"), "-n", RANKS, "--bind-to", "none"]
                words += [sys.executable, __file__, address]
                self._job = subprocess.Popen(
                    [str(word) for word in words],
                    env=os.environ | for_mpirun() | COUNTING | {"PYTHONPATH": path},
                    stdout=subprocess.DEVNULL,
                )
                # accept() itself would wait for ever for ranks that do not start
                listener._listener._socket.settimeout(100)  # type: ignore[attr-defined]
                found = [listener.accept() for _ in range(RANKS)]
        numbered = [(connection.recv(), connection) for connection in found]
        self._ranks = [connection for _, connection in sorted(numbered, key=lambda one: one[0])]

    def _answer(self, rank: Connection, limit: float) -> tuple[bool, Any]:
        try:
            if rank.poll(limit):
                return rank.recv()  # type: ignore[no-any-return]
        except EOFError:
            return True, "a rank has ended"
        return True, f"no answer within {limit:g} seconds"


def function(program: str) -> Callable[..., Any]:
    """What `module:function` names."""
    module, _, name = program.partition(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


def train(comm: Any, program: str, *arguments: Any) -> Any:
    """Call a function that trains as on a rank of a launcher."""
    with launched(comm):
        return function(program)(*arguments)


def hybrid(comm: Any, words: list[str], joined_by: str = "mpi") -> tuple[int, str, str]:
    """The command on the ranks of a communicator: (exit status, stdout, stderr)."""
    from commands import command

    with launched(comm, joined_by), mock.patch.object(sys, "argv", ["hybrid", *words]):
        return command(*words)


@contextmanager
def launched(comm: Any, joined_by: str = "mpi") -> Iterator[None]:
    """What is trained meanwhile is so on the ranks of a communicator, as a launcher's."""
    from hybrid.ranks import launch

    here = launch.Ranks(comm, comm.rank, comm.size, joined_by)
    with mock.patch.object(launch, "ranks", return_value=here):
        yield


def serve(address: str) -> None:
    """A rank's end."""
    from mpi4py import MPI

    import hybrid.cli.app  # noqa: F401  what most programs want
    from hybrid.links.mpi import MpiCommunicator

    world = MPI.COMM_WORLD
    teams = [
        world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        for size in range(1, RANKS + 1)
    ]
    tests = Client(address, "AF_UNIX")
    tests.send(world.rank)
    with suppress(EOFError):
        while True:
            size, program, arguments = tests.recv()
            # of its own: no message of a program that failed reaches another
            comm = MpiCommunicator(teams[size - 1].Dup())
            try:
                tests.send((False, function(program)(comm, *arguments)))
            except BaseException:
                tests.send((True, f"rank {world.rank}:\n{traceback.format_exc()}"))
            comm.mpi.Free()


if __name__ == "__main__":
    serve(sys.argv[1])
