"""What can go wrong with files: no room, no permission, damage. Each decides by its seed where."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults.kinds import Fault, Scene, moment
from tests.faults.processes import Job
from tests.faults.training import Training


@cache
def can_mount() -> bool:
    """Whether this process may mount a file system."""
    with TemporaryDirectory() as folder:
        if _run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder):
            return _run("umount", folder)
    return False


class DiskFull(Fault):
    """A small disk that something else fills: a tmpfs of its own below the run folder's parent."""

    name = "the disk is full"

    def prepare(self, scene: Scene) -> dict[str, Any] | None:
        if not can_mount():
            return FileLimit.prepare(FileLimit(), scene)
        disk = scene.out.parent / "disk"
        disk.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk))
        scene.out = disk / "run"
        return None

    def strike(self, scene: Scene, job: Job) -> None:
        if not can_mount():
            return
        when = moment(scene, job, ("train", "write"))
        left = scene.random.randrange(0, 800_000)
        room = os.statvfs(scene.out.parent)
        try:
            with (scene.out.parent / "ballast").open("wb") as file:
                file.write(bytes(max(0, room.f_bavail * room.f_frsize - left)))
        except OSError:
            pass  # the run was quicker: as full as it gets
        scene.now(f"{left} bytes left {when}")

    def mend(self, scene: Scene) -> None:
        (scene.out.parent / "ballast").unlink(missing_ok=True)

    def clean(self, scene: Scene) -> None:
        if can_mount():
            _run("umount", "-l", str(scene.out.parent))


class FileLimit(Fault):
    """RLIMIT_FSIZE: a file system that takes no large files."""

    name = "no large files"
    waits = True

    def prepare(self, scene: Scene) -> dict[str, Any]:
        allowed = scene.random.randrange(0, 100_000)
        scene.now(f"{allowed} bytes a file")
        return {"kind": "limit", "bytes": allowed}


class ReadOnly(Fault):
    """A part of the run folder that cannot be written: a read-only mount, also root's.

    A run that has written all its checkpoints by then ends well.
    """

    name = "a read-only folder"
    statuses = staticmethod(lambda status: True)

    def prepare(self, scene: Scene) -> None:
        if not can_mount():
            scene.out.mkdir(parents=True)
            (scene.out / "checkpoints").touch()

    def strike(self, scene: Scene, job: Job) -> None:
        if not can_mount():
            scene.now("a file in its place")
            return
        when = moment(scene, job, ("train",))
        self.folder = scene.out / "checkpoints"
        self.folder.mkdir(exist_ok=True)
        scene.now(when)
        _run("mount", "--bind", str(self.folder), str(self.folder))
        _run("mount", "-o", "remount,ro,bind", str(self.folder))

    def mend(self, scene: Scene) -> None:
        if can_mount():
            _run("umount", "-l", str(scene.out / "checkpoints"))
        else:
            shutil.rmtree(scene.out)


class ReadOnlyResume(Fault):
    """The whole run folder is read-only when the run is resumed."""

    name = "resumed in a read-only folder"
    waits = True
    resumes = True

    def prepare(self, scene: Scene) -> None:
        scene.references.stopped(scene.training, scene.out, scene.random.randrange(1, 3))
        if can_mount():
            _run("mount", "--bind", str(scene.out), str(scene.out))
            _run("mount", "-o", "remount,ro,bind", str(scene.out))
        else:
            (scene.out / "config.toml").rename(scene.out / "config.kept")
            (scene.out / "config.toml").mkdir()
        scene.now("")

    def mend(self, scene: Scene) -> None:
        if can_mount():
            _run("umount", "-l", str(scene.out))
        else:
            (scene.out / "config.toml").rmdir()
            (scene.out / "config.kept").rename(scene.out / "config.toml")


class FileForFolder(Fault):
    """A file where the run folder, its parent or its checkpoints belong."""

    name = "a file where a folder belongs"
    waits = True

    def prepare(self, scene: Scene) -> None:
        chosen = ("parent", "run", "checkpoints", "events")
        which = scene.random.choice(chosen)
        if which == "parent":
            scene.out = scene.out / "run"
        self.file = {"parent": scene.out.parent, "run": scene.out}.get(which, scene.out / which)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("not a folder")
        scene.now(which)

    def mend(self, scene: Scene) -> None:
        assert self.file.read_text() == "not a folder", "the file that was there"
        self.file.unlink()
        if scene.out.exists():
            shutil.rmtree(scene.out)


class Damage(Fault):
    """A file of the newest checkpoint is not what was written when the run is resumed."""

    name = "a damaged checkpoint"
    waits = True
    resumes = True
    statuses = staticmethod(lambda status: True)

    def prepare(self, scene: Scene) -> None:
        random = scene.random
        found = scene.references.stopped(scene.training, scene.out, random.randrange(1, 3))
        files = sorted(found[-1].iterdir())
        file = random.choice([found[-1] / "manifest.json", random.choice(files)])
        how = random.choice((self._truncate, self._flip, self._remove, self._replace))
        self.step = found[-1].name
        self.before = found[:-1]
        how(scene, file)
        scene.now(f"{how.__name__[1:]} {file.name} of {len(found)}")

    def damaged(self, scene: Scene) -> set[str]:
        return {self.step}

    def _truncate(self, scene: Scene, file: Path) -> None:
        os.truncate(file, scene.random.randrange(file.stat().st_size))

    def _flip(self, scene: Scene, file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[scene.random.randrange(len(content))] ^= 1 << scene.random.randrange(8)
        file.write_bytes(content)

    def _remove(self, scene: Scene, file: Path) -> None:
        file.unlink()

    def _replace(self, scene: Scene, file: Path) -> None:
        """By the file of that name of another run."""
        other = Training(scene.training.way, "threads", scene.training.ranks, seed=1)
        file.write_bytes((scene.references.folder(other) / _below(file)).read_bytes())


class Foreign(Fault):
    """The newest checkpoint is another run's, whole and sound."""

    name = "another run's checkpoint"
    waits = True
    resumes = True
    statuses = staticmethod(lambda status: status == 1)

    def prepare(self, scene: Scene) -> None:
        found = scene.references.stopped(scene.training, scene.out, 2)
        changed = scene.random.choice([{"seed": 1}, {"model": "resnet14"}])
        other = Training("serial", "threads", scene.training.ranks, **changed)  # type: ignore[arg-type]
        self.folder = found[-1]
        shutil.rmtree(self.folder)
        shutil.copytree(
            scene.references.folder(other) / "checkpoints" / self.folder.name, self.folder
        )
        scene.now(str(changed))

    def mend(self, scene: Scene) -> None:
        shutil.rmtree(self.folder)

    def damaged(self, scene: Scene) -> set[str]:
        return {self.folder.name}


class CutMetrics(Fault):
    """`metrics.jsonl` has lost its end, or all of it, when the run is resumed."""

    name = "metrics cut off"
    waits = True
    resumes = True
    survived = True
    statuses = staticmethod(lambda status: status == 0)
    same_metrics = False

    def prepare(self, scene: Scene) -> None:
        scene.references.stopped(scene.training, scene.out, 2)
        file = scene.out / "metrics.jsonl"
        left = scene.random.randrange(file.stat().st_size)
        os.truncate(file, left)
        scene.now(f"{left} bytes left")


def _below(file: Path) -> Path:
    return Path(*file.parts[-3:])


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
