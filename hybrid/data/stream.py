"""Samples that come one after the other, from an iterable that can be read again."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from hybrid.data.dataset import digest
from hybrid.data.items import Items, collate_numbers
from hybrid.data.reader import collate_items, to_tensors
from hybrid.data.sampling import restored_generators, seed_generators
from hybrid.errors import refused
from hybrid.solvers.state import State

KEPT = 8
"""How many collated shares of mini-batches stay cached."""
_END: Any = object()


class Chunk(NamedTuple):
    """What a stream gives at once: a sample, or a batch with a row for each."""

    first: int
    end: int
    content: Any


class Stream(Items):
    """An iterable of samples, or of batches of them, that every rank reads in its order.

    Torch's IterableDataset, a webdataset pipeline, Hugging Face's streaming data, any object whose
    __iter__ begins anew, or a DataLoader around one. It is read by each rank that needs inputs or
    targets, in its order; what is shuffled is the stream's own matter. What it draws from `random`,
    numpy and torch is a function of (seed, epoch, sample), and its own shuffling has to be seeded:
    another rank, and a resumed run, must read the same.

        samples=     the stream goes on from epoch to epoch, and begins again where it ends
        len(stream)  an epoch is a pass: it begins anew, with set_epoch(epoch) where there is one

    A resumed run skips the samples that it has used.
    """

    streamed = True

    def __init__(
        self,
        iterable: Any,
        samples: int | None = None,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        batched: bool | None = None,
        labels_are_inputs: bool = False,
    ) -> None:
        """Wrap an iterable for a trainer.

        samples: of an epoch; None: its len(), or that of a DataLoader's data set. batched: whether
        it gives batches, which are cut anew where they have another size than a mini-batch; None:
        whether it is a DataLoader with a batch_size. collate: as in `Mapped`, of what gives
        samples. labels_are_inputs: as in `Mapped`.
        """
        super().__init__(labels_are_inputs)
        self.iterable, self.name = iterable, type(iterable).__name__
        auto = isinstance(iterable, DataLoader) and iterable.batch_sampler is not None
        self.batched = auto if batched is None else batched
        self.batch_size = iterable.batch_size if auto else None
        if hasattr(iterable, "__next__"):
            raise ValueError(
                f"a {self.name} can be read once only: give an object whose __iter__ begins anew"
            )
        if collate is not None and self.batched:
            raise ValueError(
                f"collate makes batches of samples, but the {self.name} gives batches: leave it "
                "out, or give what gives samples"
            )
        self._whole_passes = samples is None
        self._count = self._length() if samples is None else samples
        if self._count < 1:
            raise ValueError(
                f"the stream {self.name} has {self._count} samples an epoch: give 1 or more"
            )
        self._collate = collate or collate_numbers
        self._lock = threading.RLock()
        self._iterator: Iterator[Any] | None = None
        self._course = (-1, -1)
        """The seed of the reading, and its epoch, or 0 where the stream continues."""
        self._pass = self._next = 0
        """The passes that have ended in this course, and the samples that were read."""
        self._chunks = deque[Chunk]()
        self._behind = 0
        """How far behind the newest sample others are cached."""
        self._pairs: dict[tuple[int, ...], tuple[Any, Any]] = {}
        if self.batched:
            self._read_to((0, 0), 0, 0)
        known = self._next if self.batched else self._count
        self._sample = self._pair(torch.arange(min(2, known)), 0, 0)
        self._first = digest(self._sample)
        self._batches_vary = self.batched or collate is not None
        self._learn_structure()
        self.close()

    def _length(self) -> int:
        auto = self.batch_size is not None
        counted = self.iterable.dataset if auto else self.iterable
        with suppress(TypeError):
            if not self.batched or auto:
                return len(counted)
        raise ValueError(
            f"the {type(counted).__name__} does not say how many samples an epoch has: give "
            "data.Stream(iterable, samples=50_000), or it a __len__ that counts samples"
        )

    def __len__(self) -> int:
        return self._count

    def sample(self, count: int) -> tuple[Any, Any]:
        rows = torch.arange(count) % len(tree_leaves(self._sample[0])[0])
        inputs, targets = tree_map(lambda x: x[rows], self._sample)
        return inputs, targets

    def keep(self, samples: int) -> None:
        self._behind = max(self._behind, samples)

    def some(self, one: int | None = None) -> list[Any]:
        return [self._sample] if one is None else []

    def close(self) -> None:
        """End the reading and its workers; the next request begins it again."""
        with self._lock:
            shut_down = getattr(self._iterator, "_shutdown_workers", None)
            self._iterator, self._course = None, (-1, -1)
            self._pass = self._next = 0
            self._chunks.clear()
            self._pairs.clear()
            if shut_down is not None:
                shut_down()

    def state(self) -> State:
        return State(shared={"first": self._first})

    def load_state(self, state: State) -> None:
        if state.shared.get("first", self._first) != self._first:
            raise ValueError(
                f"the stream {self.name} begins with other samples than before: seed its "
                "shuffling, or put back what it reads"
            )

    def _pair(self, ids: Tensor, seed: int, epoch: int) -> tuple[Any, Any]:
        key = (seed, epoch, *ids.tolist())
        with self._lock:
            if key not in self._pairs:
                first = 0 if self._whole_passes else epoch * self._count
                places = [first + i for i in ids.tolist()]
                course = (seed, epoch if self._whole_passes else 0)
                self._read_to(course, min(places), max(places))
                with restored_generators():
                    seed_generators(seed, epoch, int(ids[0]))
                    if self.batched:
                        batch = self._cut(places)
                    else:
                        items = [self._chunks[i - self._chunks[0].first].content for i in places]
                        batch = collate_items(self._collate, items, places[0])
                self._pairs[key] = self._split(batch, len(ids))
                while len(self._pairs) > KEPT:
                    del self._pairs[next(iter(self._pairs))]
            return self._pairs[key]

    def _cut(self, places: Sequence[int]) -> Any:
        """Cut a mini-batch from the batches that were read; a whole one is taken as it is."""
        pieces = []
        for first, end, batch in self._chunks:
            rows = [i - first for i in places if first <= i < end]
            if rows == list(range(end - first)):
                pieces.append(batch)
            elif rows:
                pieces.append(tree_map(lambda x, rows=rows: x[rows], batch))
        if len(pieces) == 1:
            return pieces[0]
        try:
            return tree_map(lambda *rows: torch.cat(rows), *pieces)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"batches of {self.name} cannot be put together to mini-batches of another size: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:160]}; let them have the "
                "size of a mini-batch (train.batch_size), and leave incomplete ones out"
            ) from None

    def _read_to(self, course: tuple[int, int], first: int, last: int) -> None:
        """Have the samples from `first` to `last`; begin a course anew if they were dropped."""
        oldest = self._chunks[0].first if self._chunks else self._next
        if course != self._course or first < oldest:
            self.close()
            self._course = course
        with restored_generators():
            while self._next <= last:
                self._read_chunk()
                # another replica of this process may ask for those before
                unused = min(first, self._next - self._behind)
                while self._chunks and self._chunks[0].end <= unused:
                    self._chunks.popleft()

    def _read_chunk(self) -> None:
        content = self._advance()
        count = 1
        if self.batched:
            leaves = tree_leaves(content)
            if not leaves or not all(isinstance(x, Tensor) and x.dim() for x in leaves):
                raise ValueError(
                    f"the stream {self.name} gives a {type(content).__name__}, not tensors with a "
                    "row a sample: let it give batches, or leave out batched"
                )
            count = len(leaves[0])
        self._chunks.append(Chunk(self._next, self._next + count, content))
        self._next += count

    def _advance(self) -> Any:
        """Take the next sample or batch, of another pass if this one has ended."""
        began = self._iterator is None
        if self._iterator is None:
            self._iterator = self._begin_pass()
        seed_generators(*self._course, self._next)
        with refused(f"sample {self._next} of the stream {self.name}"):
            if (content := next(self._iterator, _END)) is not _END:
                return to_tensors(content)
        if began:
            raise ValueError(f"the stream {self.name} is empty: training needs at least 1 sample")
        self._pass, self._iterator = self._pass + 1, None
        return self._advance()

    def _begin_pass(self) -> Iterator[Any]:
        seed_generators(*self._course, self._pass)
        number = self._course[1] + self._pass  # a stream that goes on has course 0
        with refused(f"the stream {self.name} does not begin"):
            for each in (self.iterable, getattr(self.iterable, "dataset", None)):
                if each is not None and hasattr(each, "set_epoch"):
                    each.set_epoch(number)
            return iter(self.iterable)
