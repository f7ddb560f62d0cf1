"""A checkpoint is written by all ranks together: it is whole, or it is not there."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from hybrid.files import remove, sync, write_durably
from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import MANIFEST
from hybrid.links import AgreedError, RankLinks

Files = Mapping[str, Mapping[str, Tensor]]
"""File name -> name -> tensor."""
Entries = dict[str, dict[str, Any]]
"""The manifest's entries of the files that a rank has written: "units" and "states" by name."""


class Writer:
    """One rank's part in writing checkpoints.

        every rank   writes its files into .STEP.TOKEN.partial
        rank 0       writes the manifest there, once all have, and renames the folder to STEP

    The rename comes last, so a folder of that name is whole; just before, a checkpoint of the same
    step is removed, while the new one is whole under its other name. Checkpoints of later steps,
    which a roll-back has discarded, are removed.
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

    def write(self, step: int, units: Files, states: Files, manifest: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`: this rank's units, and what its run's parts keep.

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
        start, partial = perf_counter(), self.root / f".{step:08d}.{self.token or 0}.partial"
        entries: Entries = {}
        try:
            with self._agreement():
                self.check()
                for folder in (self.root, partial):  # a run folder that is gone stays so
                    folder.mkdir(exist_ok=True)
                stateful = {name: tensors for name, tensors in states.items() if tensors}
                for kind, files in ("units", units), ("states", stateful):
                    entries[kind] = {n: checkpoint.write(partial, n, t) for n, t in files.items()}
            everyone = self.links.gather(entries)
            with self._agreement():
                if everyone is not None:
                    self._commit(partial, step, everyone, manifest)
        except AgreedError:
            if self.links.place.number == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self.seconds += perf_counter() - start

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
        final = self.root / f"{step:08d}"
        body = {**manifest, "format": checkpoint.FORMAT, "step": step}
        for kind in ("units", "states"):
            body[kind] = {name: entry for rank in everyone for name, entry in rank[kind].items()}
        body = json.loads(json.dumps(body))  # as it is read: keys are texts, tuples are lists
        text = json.dumps({**body, "sha256": checkpoint.digest(body)}, indent=1)
        write_durably(partial / MANIFEST, text)
        sync(partial)
        self.check()
        if os.path.lexists(final):
            remove(final, MANIFEST)
        os.replace(partial, final)
        for later in checkpoint.complete(self.root):
            if int(later.name) > step:
                remove(later, MANIFEST)
        sync(self.root)
        self._prune()

    def _prune(self) -> None:
        """Remove all but the newest checkpoints and the best one."""
        folders = checkpoint.complete(self.root)
        spared = checkpoint.best(folders) if self.keep_best else None
        for old in folders[: -self.keep_last] if self.keep_last else []:
            if old != spared:
                remove(old, MANIFEST)
