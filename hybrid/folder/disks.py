"""The disks on which the ranks of a run see its folder, and files that go from one to another.

Hosts that mount one file system share a disk. Where each has its own, a folder of the same path on
every disk belongs to the run. The first rank's is the one to look at.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import NamedTuple, TypeVar

import torch

from hybrid.files import read_part, sync, write_part
from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import MANIFEST
from hybrid.folder.lock import owner_token
from hybrid.folder.runfolder import COURSE, RunFolder
from hybrid.links.communicator import Communicator, RankGroup, agreement

V = TypeVar("V")
CHUNK = 1 << 24
"""The most bytes that are under way from one rank to another."""
_TAG = 1 << 14
"""Of messages with parts of files, above the tags of links."""


class Piece(NamedTuple):
    """Bytes of a file that rank `source` reads, for the same place in a file of rank `target`."""

    source: int
    target: int
    path: Path
    to: Path
    offset: int
    size: int


def move(pieces: Collection[Piece], group: RankGroup) -> None:
    """Copy pieces of files; all ranks call it with the same pieces. AgreedError if any cannot.

    In every step each pair of ranks moves a chunk, so both directions of a link are in use.
    """
    queues: dict[tuple[int, int], deque[Piece]] = {}
    for p in pieces:
        end = p.offset + p.size
        for offset in range(p.offset, max(end, p.offset + 1), CHUNK):
            chunk = p._replace(offset=offset, size=min(CHUNK, end - offset))
            queues.setdefault((p.source, p.target), deque()).append(chunk)
    while queues:
        _move_chunks([queues[pair].popleft() for pair in sorted(queues)], group)
        queues = {pair: queue for pair, queue in queues.items() if queue}
    with agreement(group.first_of):
        for path in {p.to for p in pieces if p.target == group.rank}:
            sync(path)


def _move_chunks(chunks: Sequence[Piece], group: RankGroup) -> None:
    assert isinstance(group, Communicator)
    here = group.rank
    contents = {p: torch.empty(p.size, dtype=torch.uint8) for p in chunks if here in p[:2]}
    with agreement(group.first_of):
        for p in contents:
            if p.source == here and p.size:
                part = bytearray(read_part(p.path, p.offset, p.size))
                contents[p] = torch.frombuffer(part, dtype=torch.uint8)
    transfers = []
    # in one order on all ranks: gloo's first message between two of them blocks until both call
    for p, content in contents.items():
        if p.size:
            begin, other = (group.isend, p[1]) if p.source == here else (group.irecv, p[0])
            transfers.append(begin(content, other, _TAG))
    for transfer in transfers:
        transfer.wait()
    with agreement(group.first_of):
        for p, content in contents.items():
            if p.target == here:
                write_part(p.to, p.offset, content.numpy().tobytes())


class Disks:
    """Which ranks see the run folder on which disk. All ranks make it and call its methods.

    Making it claims the folder on every disk, until `RunFolder.release`.
    """

    def __init__(self, folder: RunFolder, group: RankGroup) -> None:
        """AgreedError if the folder has a living owner on a disk, or cannot be written to."""
        self.folder, self._group = folder, group
        self.here = -1
        """The number of this rank's disk; that of the first rank is 0."""
        self.roots: list[int] = []
        """For each disk the lowest rank that sees it, which writes what one rank alone writes."""
        self.token = ""
        """Of the first disk; it is in names that are equal on all disks."""
        while (root := group.first_of(group.rank if self.here < 0 else None)) is not None:
            with agreement(group.first_of):
                token = folder.claim() if group.rank == root else ""
            token = group.bcast(token, root)
            if self.here < 0 and (group.rank == root or owner_token(folder.path) == token):
                self.here, folder.token = len(self.roots), token
            self.roots.append(root)
            self.token = self.token or token
        self.of_ranks = group.allgather(self.here)
        self.is_root = self.roots[self.here] == group.rank
        self.apart = len(self.roots) > 1
        """Whether there are several disks."""

    def hosts(self) -> list[str]:
        """The host of each disk's first rank."""
        return self._of_disks(gethostname())

    def whole(self) -> list[str]:
        """The names of the checkpoints that are whole, if all disks are taken together, in order.

        AgreedError for checkpoints of different runs.
        """
        stored: dict[str, tuple[str, set[str]]] = {}
        for folder in checkpoint.complete(self._checkpoints) if self.is_root else ():
            stored[folder.name] = "", set()
            with suppress(ValueError, OSError):  # who reads a damaged one says so
                manifest = checkpoint.read_manifest(folder)
                missing = checkpoint.missing_files(folder, manifest)
                stored[folder.name] = manifest.get("run", ""), missing
        found, hosts = self._of_disks(stored), self.hosts()
        runs: dict[str, list[tuple[str, str]]] = {}
        for host, of in zip(hosts, found, strict=True):
            for name, (run, _) in of.items():
                runs.setdefault(run, []).append((host, name))
        runs.pop("", None)
        with agreement(self._group.first_of):
            if len(runs) > 1:
                host, name = min(runs.values(), key=len)[0]
                raise ValueError(
                    f"{self.folder.path} has checkpoints of different runs: on {host}, if "
                    f"{self._checkpoints / name} is another run's, remove it, or choose another "
                    "folder"
                )
        names = sorted({name for of in found for name in of})
        return [n for n in names if not set.intersection(*(of[n][1] for of in found if n in of))]

    def recover(self) -> list[str]:
        """Repair the folders, and bring the newest checkpoint to the first disk; give notices."""
        notices = list[str]()
        with agreement(self._group.first_of):
            if self.is_root:
                notices = checkpoint.recover(self._checkpoints)
        newest = next(reversed(self.whole()), "") if self.apart else ""
        has_it = self._of_disks(bool(newest) and (self._checkpoints / newest / MANIFEST).is_file())
        if not newest or has_it[0]:
            return notices
        source, partial = has_it.index(True), f".{newest}.{self.token}.partial"
        self.copy(COURSE, source, [0])
        names = set[str]()
        with agreement(self._group.first_of):
            if has_it[self.here]:
                manifest = checkpoint.read_manifest(self._checkpoints / newest)
                names = {*checkpoint.file_sizes(manifest)}
        for wanted in self._group.bcast(names, self.roots[source]), {MANIFEST}:
            self.bring(newest, wanted if self.here == 0 else (), partial)
        with agreement(self._group.first_of):
            if self.is_root and self.here == 0:
                checkpoint.recover(self._checkpoints)
        came = f"{self.folder.path}: step {int(newest)} comes from {self.hosts()[source]}"
        return [*notices, came]

    def bring(self, name: str, wanted: Collection[str], to: str) -> None:
        """Copy files of checkpoint `name` that this rank wants, and its disk lacks, to folder `to`.

        Each comes from the first disk that has it. Both folders are among the checkpoints; they may
        be the same.
        """
        with agreement(self._group.first_of):
            if wanted and self.is_root:
                (self._checkpoints / to).mkdir(parents=True, exist_ok=True)
        sizes = self._of_disks(checkpoint.sizes(self._checkpoints / name))
        present = self._of_disks(checkpoint.sizes(self._checkpoints / to))
        asked: dict[tuple[int, str], str] = {}
        for disk, folder, names in self._group.allgather((self.here, to, sorted(wanted))):
            asked |= {(disk, n): folder for n in names if n not in present[disk]}
        pieces = list[Piece]()
        with agreement(self._group.first_of):
            for (disk, file), folder in asked.items():
                source = next((d for d, stored in enumerate(sizes) if file in stored), None)
                if source is None:
                    raise ValueError(f"no host has {self._checkpoints / name / file}")
                paths = self._checkpoints / name / file, self._checkpoints / folder / file
                ends = self.roots[source], self.roots[disk]
                pieces.append(Piece(*ends, *paths, 0, sizes[source][file]))
        move(pieces, self._group)

    def copy(
        self, names: Iterable[str], source: int, targets: Collection[int], begin: int = 0
    ) -> dict[str, int]:
        """Copy files of one disk's run folder over those of others, from byte `begin` on.

        Give the sizes of those that exist, by name.
        """
        root, folder = self.roots[source], self.folder.path
        files = {name: folder / name for name in names}
        sizes = {name: f.stat().st_size for name, f in files.items() if f.is_file()}
        sizes = self._group.bcast(sizes, root)
        pieces = [
            Piece(root, self.roots[disk], folder / name, folder / name, begin, size - begin)
            for disk in targets
            for name, size in sizes.items()
            if size > begin or not begin
        ]
        move(pieces, self._group)
        return sizes

    @property
    def _checkpoints(self) -> Path:
        return self.folder.checkpoints

    def _of_disks(self, value: V) -> list[V]:
        """The values of the disks' first ranks."""
        everyone = self._group.allgather(value if self.is_root else None)
        return [v for root in self.roots if (v := everyone[root]) is not None]
