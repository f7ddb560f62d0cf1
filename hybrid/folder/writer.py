"""Checkpoints are written during training: copied at once, and on the disk a little later."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, Literal, TypeVar

from torch import Tensor

from hybrid.errors import reason
from hybrid.files import remove, sync, write_durably
from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import MANIFEST
from hybrid.links import AgreedError, RankLinks

T = TypeVar("T")
Files = Mapping[str, Mapping[str, Tensor]]
"""File name -> name -> tensor."""
_SETTLE_SECONDS = 10.0


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


class Writer:
    """One rank's part in writing checkpoints.

        begin     every rank copies its tensors to host memory; its thread writes
                  .STEP.TOKEN.partial/*
        merge     rank 0 takes what the ranks report next; once all have written, its thread
                  completes the checkpoint: it writes the manifest and renames the folder to STEP
        hear      every rank learns what rank 0 makes of the reports
        finish    waits until the checkpoint is whole

    The rename comes last, so a folder of that name is whole; just before, a checkpoint of the same
    step is removed, while the new one is whole under its other name. Checkpoints of later steps,
    which a roll-back has discarded, are removed. At most one checkpoint is written at a time, and
    the next one waits for it. A failure is raised on all ranks, as AgreedError, by the next `hear`
    or `finish`, and leaves no partial folder.
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
        self._reported = False
        """Whether the first rank may know that this one has written its part."""
        self._thread: Thread | None = None
        self._manifest: dict[str, Any] = {}
        self._step = 0

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
        self._reported = False
        self._step, self._manifest = step, json.loads(json.dumps(manifest))
        copies = {n: checkpoint.copied(tensors) for n, tensors in units.items()}
        beside = {n: checkpoint.copied(tensors) for n, tensors in states.items() if tensors}

        def write() -> Share:
            self.check()
            for folder in (self.root, self._partial):  # a run folder that is gone stays so
                folder.mkdir(exist_ok=True)
            return Share("written", self._written(copies), self._written(beside))

        self._start(write)
        self.blocked_seconds += perf_counter() - start

    def _written(self, files: Files) -> dict[str, Any]:
        return {n: checkpoint.write(self._partial, n, dict(t)) for n, t in files.items()}

    def report(self) -> Share:
        """This rank's share, for the first rank to merge."""
        share = self.share
        self._reported = share.state == "written"
        return share

    def merge(self, everyone: list[Share]) -> Progress:
        """Take the shares that all ranks had at the same moment; rank 0 calls it."""
        if all(share.state == "written" for share in (self.share, *everyone)):
            self._start(lambda: self._commit(everyone))
        failed = next((share.reason for share in everyone if share.state == "failed"), None)
        return Progress(failed, everyone[0].state == "idle")

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
        """Wait for a limited time for what this rank writes; other ranks need not call it.

        A checkpoint that is not whole by then goes. The first rank may still complete it where this
        one has reported its part, and nothing where it has not.
        """
        if self._thread is not None:
            self._thread.join(_SETTLE_SECONDS)
        ended = self.share.state in ("written", "failed")
        if ended and not (self._number and self._reported):
            shutil.rmtree(self._partial, ignore_errors=True)

    def finish(self) -> None:
        """Wait until the checkpoint begun last is whole; all ranks call it."""
        start = perf_counter()
        self._join()
        while not self._exchange().ended:
            self._join()  # rank 0 completes it
        self.blocked_seconds += perf_counter() - start

    def _exchange(self) -> Progress:
        everyone = self.links.gather(self.report())
        progress = self.links.broadcast(None if everyone is None else self.merge(everyone))
        assert progress is not None
        self.hear(progress)
        return progress

    def _commit(self, everyone: list[Share]) -> Share:
        """Complete the folder, rename it and remove older checkpoints."""
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
        if os.path.lexists(final):
            remove(final, MANIFEST)
        os.replace(self._partial, final)
        for later in checkpoint.complete(self.root):
            if int(later.name) > self._step:
                remove(later, MANIFEST)
        sync(self.root)
        self._prune()
        return Share()

    def _prune(self) -> None:
        """Remove all but the newest checkpoints and the best one."""
        folders = checkpoint.complete(self.root)
        spared = checkpoint.best(folders) if self.keep_best else None
        for old in folders[: -self.keep_last] if self.keep_last else []:
            if old != spared:
                remove(old, MANIFEST)

    def _abandon(self) -> None:
        self._join()
        self.share = Share()
        self.links.gather(None)  # nobody writes any more
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


def _joined(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {key: value for part in parts for key, value in part.items()}
