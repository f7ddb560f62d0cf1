"""Samples that come one after the other, from an iterable that can be read again."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from hybrid.data.dataset import digest
from hybrid.data.fetching import collate_items, own_draws, plain, seed_draws
from hybrid.data.items import Items, collate_numbers
from hybrid.errors import format_error, refused
from hybrid.solvers.state import State

PAIRS = 8
"""Collated shares of mini-batches that are kept."""
SKIPPED = 256
"""Samples that are read at once where they are skipped."""
MOST_STATE = 1 << 20
"""Characters of a stream's own state that a checkpoint keeps; a longer one is of no use to it."""


@dataclass(frozen=True)
class Line:
    """What is read from one beginning on: an epoch, or all of them; `seed` is of its draws."""

    seed: int
    number: int


@dataclass(frozen=True)
class Place:
    """Where reading is: before sample `next` of a line, in the line's pass number `turn`."""

    line: Line
    next: int
    turn: int
    state: str = ""
    """The stream's own state there, as JSON; empty: it has none, or has just begun a pass."""


@dataclass(frozen=True)
class Part:
    """Samples read together: a list of items, or a batch with a row for each."""

    place: Place
    samples: Any
    count: int

    @property
    def end(self) -> int:
        return self.place.next + self.count


class Stream(Items):
    """An iterable of samples, or of batches of them, that every rank reads in its order.

    Torch's IterableDataset, a webdataset pipeline, Hugging Face's streaming data, any object whose
    __iter__ begins anew, or a DataLoader around one. It is read by each rank that needs inputs or
    targets, in its order; what is shuffled is the stream's own matter. What it draws from `random`,
    numpy and torch is a function of (seed, epoch, sample), and its own shuffling has to be seeded:
    another rank, and a resumed run, must read the same.

        samples=     the stream goes on from epoch to epoch, and begins again where it ends
        len(stream)  an epoch is a pass: it begins anew, with set_epoch(epoch) where there is one
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
        loader = isinstance(iterable, DataLoader)
        auto = loader and iterable.batch_sampler is not None
        self.batched = auto if batched is None else batched
        self.batch_size = iterable.batch_size if auto else None
        self._check_arguments(collate)
        self._passes = samples is None
        self._count = self._length() if samples is None else samples
        if self._count < 1:
            raise ValueError(
                f"the stream {self.name} has {self._count} samples an epoch: give 1 or more"
            )
        self._collate = collate or collate_numbers
        self._stateful = _with_state(iterable)
        self._lock = threading.RLock()
        self._behind = 0
        self._iterator: Iterator[Any] | None = None
        self._given = 0
        """Samples that the iterator has given."""
        self._at = Place(Line(-1, -1), 0, 0)
        self._parts = deque[Part]()
        self._pairs: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._loaded = False
        """Whether the stream may go on from a state that it was given."""
        self._fresh = self._state_text()
        """Its own state before it is read."""
        self._resumed: dict[str, Any] = {}
        """What a checkpoint says of where to begin."""
        self._sample = self._read_sample()
        self._first = digest(self._sample)
        self._batches_vary = self.batched or collate is not None
        self._learn_structure()
        self.close()

    def _check_arguments(self, collate: Any) -> None:
        if hasattr(self.iterable, "__next__"):
            raise ValueError(
                f"a {self.name} can be read once only: give an object whose __iter__ begins anew"
            )
        if collate is not None and self.batched:
            raise ValueError(
                f"collate makes batches of samples, but the {self.name} gives batches: leave it "
                "out, or give what gives samples"
            )

    def _length(self) -> int:
        auto = isinstance(self.iterable, DataLoader) and self.batch_size is not None
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
        """End the reading, and worker processes; what is asked for next begins it again."""
        with self._lock:
            shut_down = getattr(self._iterator, "_shutdown_workers", None)
            self._iterator, self._at = None, Place(Line(-1, -1), 0, 0)
            self._parts.clear()
            self._pairs.clear()
            if shut_down is not None:
                shut_down()

    def _read_sample(self) -> tuple[Any, Any]:
        """Inputs and targets of the first samples, two if they can be had."""
        line, ids = self._find(0, 0, range(min(2, self._count)))
        self._read_to(line, ids[0], ids[0])
        part = self._parts[0]
        count = min(2, part.count) if self.batched else len(ids)
        return self._pair(torch.arange(count), 0, 0)

    def _pair(self, ids: Tensor, seed: int, epoch: int) -> tuple[Any, Any]:
        key = (seed, epoch, *ids.tolist())
        with self._lock:
            if key not in self._pairs:
                line, places = self._find(seed, epoch, ids.tolist())
                self._read_to(line, min(places), max(places))
                with own_draws():
                    seed_draws(seed, epoch, int(ids[0]))
                    batch = self._cut(places) if self.batched else self._collated(places)
                self._pairs[key] = self._split(batch, len(ids))
                self._forget()
            return self._pairs[key]

    def _find(self, seed: int, epoch: int, ids: Any) -> tuple[Line, list[int]]:
        """The line of samples of an epoch, and their places in it."""
        if self._passes:
            return Line(seed, epoch), list(ids)
        return Line(seed, 0), [epoch * self._count + i for i in ids]

    def _collated(self, places: list[int]) -> Any:
        items = dict[int, Any]()
        for part in self._parts:
            items |= dict(enumerate(part.samples, part.place.next))
        return collate_items(self._collate, [items[i] for i in places], places[0])

    def _cut(self, places: list[int]) -> Any:
        """The rows of batches that have been read: of a whole batch, that batch."""
        pieces = []
        for part in self._parts:
            rows = [i - part.place.next for i in places if part.place.next <= i < part.end]
            if rows == list(range(part.count)):
                pieces.append(part.samples)
            elif rows:
                pieces.append(tree_map(lambda x, rows=rows: x[rows], part.samples))
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

    def _read_to(self, line: Line, first: int, last: int) -> None:
        """Read on to a sample of a line; from its beginning where it has been read too far."""
        oldest = self._parts[0].place.next if self._parts else self._at.next
        if self._at.line != line or first < oldest:
            self._begin(line, first)
        with own_draws():
            while self._at.next < first:  # another replica of this process may want it yet
                self._read(min(first, self._at.next + SKIPPED))
                self._forget()
            while self._at.next <= last:
                self._read(last + 1)

    def _begin(self, line: Line, first: int) -> None:
        """Begin a line, at the checkpoint's place if that is of use."""
        self.close()
        self._at = Place(line, 0, 0)
        saved = self._resumed
        if not saved or [line.seed, line.number] != saved["line"] or first < saved["next"]:
            return
        place = Place(line, saved["next"], saved["turn"], saved["state"])
        with own_draws():
            self._open(place)
            self._at = place
            self._read(place.next + saved["count"])
        if digest(self._parts[-1].samples) != saved["digest"]:
            # its state leaves something out, such as a buffer of samples to shuffle
            self._resumed = {}
            self.close()
            self._at = Place(line, 0, 0)

    def _open(self, place: Place) -> None:
        """Begin a pass, or go on within it where the stream's own state says how."""
        seed_draws(place.line.seed, place.line.number, place.turn)
        number = place.line.number + place.turn if self._passes else place.turn
        with refused(f"the stream {self.name} does not begin"):
            if place.state or (self._loaded and not place.next):
                self._stateful.load_state_dict(json.loads(place.state or self._fresh))
                self._loaded = bool(place.state)
            for each in (self.iterable, getattr(self.iterable, "dataset", None)):
                if each is not None and hasattr(each, "set_epoch"):
                    each.set_epoch(number)
            self._iterator, self._given = iter(self.iterable), 0

    def _read(self, end: int) -> None:
        """Read a part: items up to a place, or a batch."""
        place, items = self._here(), list[Any]()
        while not items or (not self.batched and self._at.next < end):
            item = self._next()
            items.append(item)
            count = len(tree_leaves(item)[0]) if self.batched else 1
            self._at = Place(self._at.line, self._at.next + count, self._at.turn)
        samples = items[0] if self.batched else items
        self._parts.append(Part(place, samples, self._at.next - place.next))

    def _here(self) -> Place:
        """This place, with the stream's own state if it has one that JSON can hold."""
        at = self._at
        if at.state or self._iterator is None or not self._given:
            return at
        return Place(at.line, at.next, at.turn, self._state_text())

    def _state_text(self) -> str:
        """The stream's own state; empty, then and later, unless JSON can hold it."""
        if self._stateful is not None:
            state = None
            failed = f"state_dict() of the stream {self.name} fails"
            with refused(failed), suppress(NotImplementedError):
                state = self._stateful.state_dict()
            with suppress(Exception):  # what JSON cannot hold, or its own == cannot compare
                text = json.dumps(state, allow_nan=False)
                if len(text) <= MOST_STATE and json.loads(text) == state:
                    return text
        self._stateful = None
        return ""

    def _next(self) -> Any:
        """The next item or batch, of another pass if this one has ended."""
        at = self._at
        if self._iterator is None:
            self._open(at)
        assert self._iterator is not None
        while True:
            seed_draws(at.line.seed, at.line.number, at.next)
            try:
                item = plain(next(self._iterator))
                break
            except StopIteration:
                if not self._given and not at.state:
                    raise ValueError(
                        f"the stream {self.name} is empty: training needs at least 1 sample"
                    ) from None
            except (Exception, SystemExit) as error:  # whatever a user's code raises
                raise ValueError(
                    f"sample {at.next} of the stream {self.name}: {format_error(error)}"
                ) from None
            at = self._at = Place(at.line, at.next, at.turn + 1)
            self._open(at)
        self._given += 1
        if self.batched:
            leaves = tree_leaves(item)
            if not leaves or not all(isinstance(x, Tensor) and x.dim() for x in leaves):
                raise ValueError(
                    f"the stream {self.name} gives a {type(item).__name__}, not tensors with a row "
                    "a sample: let it give batches, or leave out batched"
                )
        return item

    def _forget(self) -> None:
        """Drop what lies farther behind the newest sample than anyone asks for."""
        while len(self._parts) > 1 and self._parts[0].end <= self._at.next - self._behind:
            self._parts.popleft()
        while len(self._pairs) > PAIRS:
            self._pairs.pop(next(iter(self._pairs)))

    def state(self) -> State:
        with self._lock:
            if not self._parts:
                return State()
            part = self._parts[0]
            place = part.place
            return State(
                shared={
                    "line": [place.line.seed, place.line.number],
                    "next": place.next,
                    "turn": place.turn,
                    "state": place.state,
                    "count": part.count,
                    "digest": digest(part.samples),
                    "first": self._first,
                }
            )

    def load_state(self, state: State) -> None:
        with self._lock:
            saved = state.shared
            if not saved:
                self._resumed = {}
                return
            if saved["first"] != self._first:
                raise ValueError(
                    f"the stream {self.name} begins with other samples than before: seed its "
                    "shuffling, or put back what it reads"
                )
            self._resumed = saved if saved["state"] and self._stateful else {}
            self.close()


def _with_state(iterable: Any) -> Any:
    """What has a state of its own: the iterable, or a DataLoader's data set in this process."""
    within = getattr(iterable, "dataset", None)
    alone = isinstance(iterable, DataLoader) and not iterable.num_workers
    for each in (iterable, within if alone else None):
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            return each
    return None
