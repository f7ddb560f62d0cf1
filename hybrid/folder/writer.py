"""Checkpoints are written beside the training: copied at once, on the disk a little later."""

from __future__ import annotations

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

from hybrid.errors import one_line, reason
from hybrid.folder import checkpoint
from hybrid.folder.files import sync, write_durably
from hybrid.links import AgreedError, RankLinks

T = TypeVar("T")
Files = Mapping[str, Mapping[str, Tensor]]
"""The tensors of each file, by the file's name."""


@dataclass(frozen=True)
class Share:
    """How far one rank is with its part of the checkpoint that is being written."""

    state: Literal["idle", "writing", "written", "failed"] = "idle"
    units: dict[str, Any] = field(default_factory=dict)
    """Manifest entries of the unit files it wrote."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Likewise, of what the solvers keep."""
    reason: str = ""
    """Why it failed."""


class Writer:
    """One rank's part in writing checkpoints.

        begin     every rank copies its tensors to host memory; its thread writes .STEP.partial/*
        share     what the ranks tell each other when they report next
        settle    once everyone has written, a thread of rank 0 writes the manifest, renames to STEP
        finish    waits for all of it

    The rename is the last act, so a folder of that name is whole. A checkpoint of a later step,
    which a run that went back has left, then gets another name. At most one checkpoint is being
    written; the next one waits for it. A failure is raised on all ranks, as AgreedError, by the
    `settle` or `finish` that learns of it, and leaves no partial folder.
    """

    def __init__(self, root: Path, links: RankLinks, keep_last: int) -> None:
        self.root, self.links, self.keep_last = root, links, keep_last
        self.share = Share()
        self.blocked_seconds = 0.0
        """How long training has waited for checkpoints, copies included."""
        self._thread: Thread | None = None
        self._manifest: dict[str, Any] = {}
        self._step = 0

    @property
    def _partial(self) -> Path:
        return self.root / f".{self._step:08d}.partial"

    def begin(self, step: int, units: Files, kept: Files, manifest: Mapping[str, Any]) -> None:
        """Start the checkpoint of `step`: this rank's units, and what its solvers keep."""
        self.finish()
        start = perf_counter()
        # as text: what it refers to goes on changing, as the tensors do
        self._step, self._manifest = step, json.loads(json.dumps(manifest))
        mine = {n: checkpoint.copied(tensors) for n, tensors in units.items()}
        beside = {n: checkpoint.copied(tensors) for n, tensors in kept.items() if tensors}

        def write() -> Share:
            folder = self._partial
            folder.mkdir(parents=True, exist_ok=True)
            written = {n: checkpoint.write(folder, n, tensors) for n, tensors in mine.items()}
            others = {n: checkpoint.write(folder, n, tensors) for n, tensors in beside.items()}
            return Share("written", written, others)

        self._start(write)
        self.blocked_seconds += perf_counter() - start

    def settle(self, everyone: list[Share]) -> None:
        """Go on by the shares of all ranks, told at the same moment; all ranks call it."""
        failed = next((s.reason for s in everyone if s.state == "failed"), None)
        if failed is not None:
            self._abandon()
            raise AgreedError(failed)
        if all(share.state == "written" for share in everyone):
            self.share = Share()
            if self.links.rank == 0:
                self._start(lambda: self._commit(everyone))

    def finish(self) -> None:
        """Wait until the checkpoint begun last is whole; all ranks call it."""
        start = perf_counter()
        while True:
            self._join()
            everyone = self.links.all_gather(self.share)
            if all(share.state == "idle" for share in everyone):
                break
            self.settle(everyone)
        self.blocked_seconds += perf_counter() - start

    def _commit(self, everyone: list[Share]) -> Share:
        """Make the folder whole; give it its name; remove what is older than the newest."""
        final = self.root / f"{self._step:08d}"
        body = {
            **self._manifest,
            "format": checkpoint.FORMAT,
            "step": self._step,
            "units": _joined(share.units for share in everyone),
            "kept": _joined(share.kept for share in everyone),
        }
        text = json.dumps({**body, "sha256": checkpoint.digest(body)}, indent=1)
        write_durably(self._partial / "manifest.json", text)
        sync(self._partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(self._partial, final)
        for left in checkpoint.complete(self.root):
            if int(left.name) > self._step:
                os.replace(left, _set_aside(left))
        sync(self.root)
        for old in checkpoint.complete(self.root)[: -self.keep_last] if self.keep_last else []:
            shutil.rmtree(old)
        return Share()

    def _abandon(self) -> None:
        self._join()
        self.share = Share()
        self.links.all_gather(None)  # nobody writes any more
        if self.links.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _start(self, work: Callable[[], Share]) -> None:
        def run() -> None:
            try:
                self.share = work()
            except Exception as error:
                known = isinstance(error, OSError)
                self.share = Share("failed", reason=(one_line if known else reason)(error))

        self.share = Share("writing")
        self._thread = Thread(target=run, name=f"checkpoint-{self.links.rank}", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _set_aside(folder: Path) -> Path:
    """A free name for a checkpoint of a course that the run has left."""
    number = 1
    while (free := folder.with_name(f"{folder.name}.left-{number}")).exists():
        number += 1
    return free


def _joined(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {key: value for part in parts for key, value in part.items()}
