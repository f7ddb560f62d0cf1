"""What can go wrong with files: no room, no permission, damage. Each decides by its seed where."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.kinds import ANY, Acts, Fault, Scene, moment


@cache
def can_mount() -> bool:
    """Whether this process may mount a file system."""
    with TemporaryDirectory() as folder:
        mounted = run_quietly("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder)
        return mounted and run_quietly("umount", folder)


def disk_full(scene: Scene) -> Acts:
    """A small disk that something else fills: a tmpfs of its own below the run folder's parent."""
    disk = scene.out.parent / "disk"
    disk.mkdir()
    run_quietly("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk))
    scene.clean.callback(run_quietly, "umount", "-l", str(disk))
    scene.out = disk / "run"
    job = yield {}
    when = moment(scene, job, ("train", "write"))
    left, room = scene.random.randrange(0, 800_000), os.statvfs(disk)
    # where the run was quicker it is as full as it gets
    with suppress(OSError), (disk / "ballast").open("wb") as file:
        file.write(bytes(max(0, room.f_bavail * room.f_frsize - left)))
    scene.now(f"{left} bytes left {when}")
    yield {}
    (disk / "ballast").unlink(missing_ok=True)


def file_limit(scene: Scene) -> Acts:
    """RLIMIT_FSIZE: a file system that takes no large files."""
    allowed = scene.random.randrange(0, 100_000)
    scene.now(f"{allowed} bytes a file")
    yield {"kind": "limit", "bytes": allowed}


def read_only(scene: Scene) -> Acts:
    """A part of the run folder that cannot be written: a read-only mount, also root's.

    A run that has written all its checkpoints by then ends well.
    """
    folder = scene.out / "checkpoints"
    job = yield {}
    when = moment(scene, job, ("train",))
    folder.mkdir(exist_ok=True)
    scene.now(when)
    close(folder)
    yield {}
    run_quietly("umount", "-l", str(folder))


def read_only_resume(scene: Scene) -> Acts:
    """The whole run folder is read-only when the run is resumed."""
    scene.stopped()
    close(scene.out)
    scene.now("")
    yield {}
    yield {}
    run_quietly("umount", "-l", str(scene.out))


def damage(scene: Scene) -> Acts:
    """A file of the newest checkpoint is not what was written when the run is resumed."""
    random, found = scene.random, scene.stopped()
    files = sorted(found[-1].iterdir())
    file = random.choice([found[-1] / "manifest.json", random.choice(files)])
    how = random.choice(("truncate", "flip", "remove", "replace"))
    content = bytearray(file.read_bytes())
    place = random.randrange(len(content))
    if how == "truncate":
        del content[place:]
    elif how == "flip":
        content[place] ^= 1 << random.randrange(8)
    elif how == "replace":  # by the file of that name of another run
        other = replace(scene.training, launcher="threads", seed=1)
        folder = scene.references.folder(other)
        content[:] = (folder / file.relative_to(scene.out)).read_bytes()
    file.write_bytes(content)
    if how == "remove":
        file.unlink()
    scene.damaged = {found[-1].name}
    scene.now(f"{how} {file.name} of {len(found)}")
    yield {}


def foreign(scene: Scene) -> Acts:
    """The newest checkpoint is another run's, whole and sound."""
    folder = scene.stopped(2)[-1]
    changed = scene.random.choice([{"seed": 1}, {"model": "resnet14"}])
    other = replace(scene.training, way="serial", launcher="threads", **changed)  # type: ignore[arg-type]
    shutil.rmtree(folder)
    shutil.copytree(scene.references.folder(other) / folder.relative_to(scene.out), folder)
    scene.damaged = {folder.name}
    scene.now(str(changed))
    yield {}
    yield {}
    shutil.rmtree(folder)


def close(folder: Path) -> None:
    run_quietly("mount", "--bind", str(folder), str(folder))
    run_quietly("mount", "-o", "remount,ro,bind", str(folder))


def run_quietly(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


_RESUMED = {"timed": False, "resumes": True}
KINDS = (
    Fault("the disk is full", disk_full, mounts=True),
    Fault("no large files", file_limit, timed=False),
    Fault("a read-only folder", read_only, ANY, mounts=True),
    Fault("resumed in a read-only folder", read_only_resume, mounts=True, **_RESUMED),
    Fault("a damaged checkpoint", damage, ANY, **_RESUMED),
    Fault("another run's checkpoint", foreign, (1,), **_RESUMED),
)
