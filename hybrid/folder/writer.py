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
_SETTLE_SECONDS = 10.0
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.02, 2.0
"""Until the first look for the other ranks' shares, which doubles, and at most between two."""


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


@dataclass(frozen=True)
class Progress:
    """What all ranks learn of the checkpoint that is being written."""

    failure: str | None
    """Why a rank could not write its part; None: none has failed."""
    ended: bool
    """Whether the first rank has completed it, or has not begun one."""
    resting: bool
    """Whether no rank writes anything."""


class Writer:
    """One rank's part in writing checkpoints.

        begin     every rank copies its tensors to host memory; its thread writes
                  .STEP.TOKEN.partial/* and then its share, a file beside them
        commit    once all shares are there, the thread of rank 0 writes the manifest, renames to
                  STEP; it lists the folder ever more seldom, or gets them by `merge`
        merge     rank 0 takes the shares that ranks report next
        hear      every rank learns what rank 0 makes of them
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
        self.share = Share()
        self.blocked_seconds = 0.0
        """How long training has waited for checkpoints, copies included."""
        self._thread: Thread | None = None
        self._manifest: dict[str, Any] = {}
        self._step = 0
        self._received: list[Share] = []
        self._given_up = False
        self._woken = Event()
        """Set where the thread of rank 0 need not wait for files: it has shares, or gives up."""

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
        self._woken.clear()
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

    def merge(self, everyone: list[Share]) -> Progress:
        """Take the shares that all ranks had at the same moment; rank 0 calls it."""
        if all(share.state == "written" for share in everyone[1:]):
            self._received = everyone[1:]
            self._woken.set()
        failed = next((s.reason for s in everyone if s.state == "failed"), None)
        states = {share.state for share in everyone}
        return Progress(failed, everyone[0].state == "idle", states == {"idle"})

    def hear(self, progress: Progress) -> None:
        """Learn what rank 0 has made of all shares; all ranks call it.

        This rank's share may have gone on since, but not from written to anything else.
        """
        if progress.failure is not None:
            self._abandon()
            raise AgreedError(progress.failure)
        if self.share.state == "written" and progress.ended:
            self.share = Share()

    def settle(self) -> None:
        """Wait for a limited time for what this rank writes; other ranks need not call it."""
        if self._thread is not None:
            self._thread.join(_SETTLE_SECONDS)
            self._give_up()

    def finish(self) -> None:
        """Wait until the checkpoint begun last is whole; all ranks call it."""
        start = perf_counter()
        if self._number:
            self._join()
        # rank 0 hears that the others have written, and completes it
        progress = self._exchange()
        self._join()
        if not progress.resting:
            self._exchange()
        self.blocked_seconds += perf_counter() - start

    def _exchange(self) -> Progress:
        everyone = self.links.gather(self.share)
        progress = self.links.broadcast(None if everyone is None else self.merge(everyone))
        assert progress is not None
        self.hear(progress)
        return progress

    def _others(self) -> list[Share]:
        """The shares of the other ranks, as soon as all of them have written."""
        names = {_share_name(rank) for rank in range(1, self.links.place.count)}
        wait = _FIRST_LOOK_SECONDS
        while not self._received and not names <= set(os.listdir(self._partial)):
            self._woken.wait(wait)
            wait = min(2 * wait, _LAST_LOOK_SECONDS)
            if self._given_up:
                return []
        files = [self._partial / name for name in names]
        shares = self._received or [
            Share(**json.loads(read_whole(file, MOST_BYTES))) for file in files
        ]
        for file in files:
            file.unlink(missing_ok=True)
        return shares

    def _commit(self, mine: Share) -> Share:
        """Complete the folder, rename it and remove older checkpoints."""
        everyone = [mine, *self._others()]
        if self._given_up:
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
        self._give_up()
        self._join()
        self._given_up = False
        self.share = Share()
        self.links.gather(None)  # nobody writes any more
        if self._number == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _give_up(self) -> None:
        """Let the thread of rank 0 wait for the others no longer."""
        self._given_up = True
        self._woken.set()

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
