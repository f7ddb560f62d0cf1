"""Checkpoints are written during training: copied at once, and on the disk a little later."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any, Literal, TypeVar

from torch import Tensor

from hybrid.errors import reason
from hybrid.folder import checkpoint
from hybrid.folder.best import best
from hybrid.folder.checkpoint import MANIFEST
from hybrid.folder.files import free_name, move, remove, rename, sync, write_durably
from hybrid.folder.manifest import MOST_BYTES
from hybrid.links import AgreedError, RankLinks
from hybrid.reading import read_whole

T = TypeVar("T")
Files = Mapping[str, Mapping[str, Tensor]]
"""File name -> name -> tensor."""
_POLL_SECONDS, _SETTLE_SECONDS = 0.02, 10.0


@dataclass(frozen=True)
class Share:
    """The progress of one rank with its part of the checkpoint that is being written."""

    state: Literal["idle", "writing", "written", "failed"] = "idle"
    units: dict[str, Any] = field(default_factory=dict)
    """Manifest entries of the unit files it wrote."""
    states: dict[str, Any] = field(default_factory=dict)
    """Manifest entries of the states of the run's parts that it wrote."""
    reason: str = ""
    """Why it failed."""


class Writer:
    """One rank's part in writing checkpoints.

        begin     every rank copies its tensors to host memory; its thread writes
                  .STEP.TOKEN.partial/* and then its share, a file beside them
        commit    once all shares are there, the thread of rank 0 writes the manifest, renames to
                  STEP; it sees them in the folder or, where that is slow, gets them by `hear`
        hear      takes the shares that ranks exchange when they report next
        finish    waits until the checkpoint is whole

    The rename comes last, so a folder of that name is whole. A checkpoint that is replaced is
    renamed before and removed afterwards, so that one is whole at every moment. A checkpoint of a
    later step, which a roll-back has discarded, then gets another name. At most one checkpoint is
    written at a time, and the next one waits for it. A failure is raised on all ranks, as
    AgreedError, by the next `hear` or `finish`, and leaves no partial folder.
    """

    def __init__(
        self,
        root: Path,
        links: RankLinks,
        keep_last: int,
        token: str = "",
        check: Callable[[], None] = lambda: None,
        keep_best: bool = False,
    ) -> None:
        self.root, self.links, self.keep_last, self.token = root, links, keep_last, token
        self.check = check
        """Raises ValueError if this run no longer owns the folder; every rank calls it."""
        self.keep_best = keep_best
        self.made: list[Path] = []
        """The checkpoints that have become whole, on rank 0; callers remove those they take."""
        self.share = Share()
        self.blocked_seconds = 0.0
        """How long training has waited for checkpoints, copies included."""
        self._thread: Thread | None = None
        self._manifest: dict[str, Any] = {}
        self._step = 0
        self._received: list[Share] = []
        self._given_up = Event()

    @property
    def _number(self) -> int:
        return self.links.place.number

    @property
    def _partial(self) -> Path:
        return self.root / f".{self._step:08d}.{self.token or 0}.partial"

    def begin(self, step: int, units: Files, states: Files, manifest: Mapping[str, Any]) -> None:
        """Start the checkpoint of `step`: this rank's units, and what its run's parts keep."""
        self.finish()
        start = perf_counter()
        # as text, since training changes the objects that it refers to
        self._step, self._manifest = step, json.loads(json.dumps(manifest))
        self._received = []
        mine = {n: checkpoint.copied(tensors) for n, tensors in units.items()}
        beside = {n: checkpoint.copied(tensors) for n, tensors in states.items() if tensors}

        def write() -> Share:
            self.check()
            folder = self._partial
            for made in (self.root, folder):  # and none above: a run folder that is gone stays so
                made.mkdir(exist_ok=True)
            written = {n: checkpoint.write(folder, n, tensors) for n, tensors in mine.items()}
            others = {n: checkpoint.write(folder, n, tensors) for n, tensors in beside.items()}
            share = Share("written", written, others)
            if self._number:
                part = folder / f".{_share_name(self._number)}.partial"
                write_durably(part, json.dumps(asdict(share)))
                # the last act: once the file has its name, rank 0 may rename the folder
                os.replace(part, folder / _share_name(self._number))
                return share
            return self._commit(share)

        self._start(write)
        self.blocked_seconds += perf_counter() - start

    def hear(self, everyone: list[Share]) -> None:
        """Take the shares that all ranks had at the same moment; all ranks call it."""
        failed = next((s.reason for s in everyone if s.state == "failed"), None)
        if failed is not None:
            self._abandon()
            raise AgreedError(failed)
        if self.share.state == "written" and everyone[0].state == "idle":
            self.share = Share()
        if all(share.state == "written" for share in everyone[1:]):
            self._received = everyone[1:]

    def settle(self) -> None:
        """Wait for a limited time for what this rank writes; other ranks need not call it."""
        if self._thread is not None:
            self._thread.join(_SETTLE_SECONDS)
            self._given_up.set()

    def finish(self) -> None:
        """Wait until the checkpoint begun last is whole; all ranks call it."""
        start = perf_counter()
        if self._number:
            self._join()
        # rank 0 hears that the others have written, and completes it
        everyone = self.links.everyone(self.share)
        self.hear(everyone)
        self._join()
        if any(share.state != "idle" for share in everyone):
            self.hear(self.links.everyone(self.share))
        self.blocked_seconds += perf_counter() - start

    def _others(self) -> list[Share]:
        """The shares of the other ranks, as soon as all of them have written."""
        files = [self._partial / _share_name(rank) for rank in range(1, self.links.place.count)]
        while not self._received and not all(file.exists() for file in files):
            if self._given_up.wait(_POLL_SECONDS):
                return []
        shares = self._received or [
            Share(**json.loads(read_whole(file, MOST_BYTES))) for file in files
        ]
        for file in files:
            file.unlink(missing_ok=True)
        return shares

    def _commit(self, mine: Share) -> Share:
        """Complete the folder, rename it and remove older checkpoints."""
        everyone = [mine, *self._others()]
        if self._given_up.is_set():
            return Share()
        final = self.root / f"{self._step:08d}"
        body = {
            **self._manifest,
            "format": checkpoint.FORMAT,
            "step": self._step,
            "units": _joined(share.units for share in everyone),
            "states": _joined(share.states for share in everyone),
        }
        text = json.dumps({**body, "sha256": checkpoint.digest(body)}, indent=1)
        write_durably(self._partial / MANIFEST, text)
        sync(self._partial)
        self.check()
        replaced = self._partial.with_suffix(".replaced")
        if os.path.lexists(final):
            move(final, replaced, MANIFEST)
        os.replace(self._partial, final)
        for left in checkpoint.complete(self.root):
            if int(left.name) > self._step:
                move(left, free_name(left.with_name(f"{left.name}.left")), MANIFEST)
        sync(self.root)
        remove(replaced, MANIFEST)
        self._prune()
        self.made.append(final)
        return Share()

    def _prune(self) -> None:
        """Remove all but the newest checkpoints and the best one."""
        found = checkpoint.complete(self.root)
        spared = best(found) if self.keep_best else None
        for old in found[: -self.keep_last] if self.keep_last else []:
            if old != spared:
                dropped = old.with_name(f".{old.name}.{self.token}.dropped")
                remove(dropped if rename(old, dropped) else old, MANIFEST)

    def _abandon(self) -> None:
        self._given_up.set()
        self._join()
        self._given_up.clear()
        self.share = Share()
        self.links.everyone(None)  # nobody writes any more
        if self._number == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _start(self, work: Callable[[], Share]) -> None:
        def run() -> None:
            try:
                self.share = work()
            except Exception as error:
                self.share = Share("failed", reason=reason(self._loss() or error))

        self.share = Share("writing")
        self._thread = Thread(target=run, name=f"checkpoint-{self._number}", daemon=True)
        self._thread.start()

    def _loss(self) -> ValueError | None:
        """That of the folder, which is why nothing can be written there; None if it is not lost."""
        try:
            self.check()
        except ValueError as lost:
            return lost
        return None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _share_name(rank: int) -> str:
    return f"share-{rank}.json"


def _joined(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {key: value for part in parts for key, value in part.items()}
