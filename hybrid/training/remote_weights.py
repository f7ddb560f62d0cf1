"""Weights in files of the first rank's host alone: other ranks get those of their blocks."""

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hybrid.folder.disks import Piece, move
from hybrid.links.communicator import RankGroup, agreement
from hybrid.networks.blocks import Blocks
from hybrid.networks.local_init import unread_tensors
from hybrid.weights import Weights, read_head


class RemoteWeights:
    """`model.weights` as this rank sees them: the files themselves, or files like them.

    Those have the sizes and headers of the first rank's, and holes until `fetch` fills in what a
    rank reads.
    """

    def __init__(self, path: Path, place: Path, group: RankGroup) -> None:
        """All ranks call it; `place` is an empty folder of this rank.

        AgreedError if the ranks have different files.
        """
        self.path, self._place, self._group = path, place, group
        with agreement(group.first_of):
            files = Weights(path).all_files if group.rank == 0 else []
            heads = [(f, *_head(f)) for f in files]
        self._heads = heads = group.bcast(heads)
        self._lacks = group.allgather(not path.exists())
        with agreement(group.first_of):
            if not self._lacks[group.rank]:
                self._check_same()
        if self._lacks[group.rank]:
            self.path = place / path.name if len(heads) == 1 and heads[0][0] == path else place
        move([p for f, _, size, _ in heads for p in self._pieces(f, [(0, size)])], group)
        with agreement(group.first_of):
            for file, size, *_ in heads if self._lacks[group.rank] else ():
                os.truncate(self._place / file.name, size)

    def fetch(self, blocks: Blocks, local: Collection[int]) -> None:
        """Bring the tensors of these blocks to this rank; all ranks call it."""
        names = unread_tensors(blocks, local) if self._lacks[self._group.rank] else {}
        for rank, wanted in enumerate(self._group.allgather(sorted(names))):
            spans: dict[Path, list[tuple[int, int]]] = {}
            if self._group.rank == 0:
                there = Weights(self.path)
                for name in wanted:
                    spans.setdefault(there.files[name], []).append(there.span(name))
            for file, parts in self._group.bcast(spans).items():
                move([p for p in self._pieces(file, parts) if p.target == rank], self._group)

    def _pieces(self, file: Path, spans: Collection[tuple[int, int]]) -> Iterator[Piece]:
        """Spans of the first rank's file, for every rank that lacks it."""
        for rank, lacks in enumerate(self._lacks):
            for offset, size in spans if lacks else ():
                yield Piece(0, rank, file, self._place / file.name, offset, size)

    def _check_same(self) -> None:
        for file, *head in self._heads:
            there = self.path if file == self.path else self.path / file.name
            if [*_head(there)] != head:
                raise ValueError(
                    f"weights {there}: it is another file than the first rank's: copy that, or "
                    "remove it"
                )


def _head(file: Path) -> tuple[int, int, str]:
    """The bytes of a file and of its header, and the header's checksum."""
    head = read_head(file)
    return file.stat().st_size, len(head), hashlib.sha256(head).hexdigest()


@contextmanager
def weights_of_all(path: str, group: RankGroup) -> Iterator[RemoteWeights | None]:
    """The weights of `path`; None without any, or where every rank has them."""
    if not path or group.size == 1:
        yield None
        return
    with TemporaryDirectory(prefix="hybrid-weights-") as place:
        yield RemoteWeights(Path(path), Path(place), group)
