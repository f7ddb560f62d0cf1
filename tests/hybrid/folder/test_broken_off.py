"""Whatever moment a checkpoint's writing is broken off at, a whole one is there and is found."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
from trainings import digits, refused, trainer

from hybrid import Callback
from hybrid.folder import checkpoint
from hybrid.folder.writer import Writer
from hybrid.links import run_threads
from hybrid.solvers import Backprop
from tests.hybrid.folder.small_checkpoints import MANIFEST, save, trained, units_of


class KilledError(BaseException):
    """As a SIGKILL: what handles errors must not run."""


@contextmanager
def killed_at(operation: int) -> Iterator[list[str]]:
    """Let no further operation on files happen after so many; gives their names."""
    seen: list[str] = []

    def guarded(real):
        def act(*arguments, **more):
            if len(seen) >= operation:
                raise KilledError
            seen.append(f"{real.__name__} {Path(arguments[0]).name}")
            return real(*arguments, **more)

        return act

    names = ("os.replace", "os.unlink", "os.rmdir", "shutil.rmtree", "os.mkdir")
    patches = [mock.patch(name, guarded(eval(name))) for name in names]
    for patch in patches:
        patch.start()
    try:
        yield seen
    finally:
        for patch in patches:
            patch.stop()


def test_replacing_a_checkpoint_leaves_a_whole_one_at_every_moment(tmp_path) -> None:
    """The write of a step that is there already, as after a resume from one before it."""
    cut, optimizers = trained(1, 0)
    first = tmp_path / "first"
    run_threads(1, lambda links: save(first, 7, links, cut, optimizers))
    for operation in range(100):
        root = Path(shutil.copytree(first, tmp_path / str(operation)))

        def write(links, root=root) -> None:
            Writer(root, links, 1).write(7, units_of(0, cut, optimizers), {}, MANIFEST)

        with killed_at(operation) as seen, suppress(KilledError):
            run_threads(1, write)
        done = len(seen) < operation
        notices = checkpoint.recover(root)
        (found,) = checkpoint.complete(root)
        checkpoint.load_model(found, checkpoint.read_manifest(found))
        assert all(f"{found} was whole under another name" in line for line in notices)
        if done:
            assert [path.name for path in root.iterdir()] == ["00000007"]
            break
    assert operation > 3


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A run of two epochs of four steps."""
    out = tmp_path_factory.mktemp("runs") / "run"
    trainer(Backprop(), out, model="plain").fit(*digits(4))
    return out


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ended, tmp_path / "run"))


@pytest.mark.parametrize("fault", ["cut off", "no manifest", "a file less"])
def test_what_is_not_whole_is_not_recovered(fault: str, tmp_path) -> None:
    cut, optimizers = trained(1, 0)
    run_threads(1, lambda links: save(tmp_path, 7, links, cut, optimizers))
    left = (tmp_path / "00000007").rename(tmp_path / ".00000007.beef.partial")
    unit = next(left.glob("*.safetensors"))
    if fault == "cut off":
        os.truncate(unit, 100)
    else:
        (unit if fault == "a file less" else left / "manifest.json").unlink()
    assert checkpoint.recover(tmp_path) == []
    assert checkpoint.complete(tmp_path) == []


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


class Thief(Callback):
    """Takes the run's folder from it before it writes its second checkpoint."""

    def __init__(self, run: Path, how: str) -> None:
        self.run, self.how = run, how
        self.left: dict[Path, bytes] = {}

    def on_epoch(self, epoch, results) -> None:
        if self.how == "removed":
            shutil.rmtree(self.run)
        elif self.how == "moved":
            self.run.rename(self.run.with_name("elsewhere"))
        else:
            other = self.run.with_name("lock")
            other.write_text('{"token": "beef", "host": "another"}')
            other.rename(self.run / "run.lock")
        self.left = contents(self.run.parent)


@pytest.mark.parametrize("how", ["removed", "moved", "taken over by another run"])
def test_no_rank_of_a_run_that_lost_its_folder_writes_anything(how, tmp_path) -> None:
    run = tmp_path / "run"
    thief = Thief(run, how)
    made = trainer(Backprop(), run, 3, model="plain", callbacks=[thief], train={"epochs": 1})
    said = refused(made, digits(2))
    assert how in said or "run.lock was removed or replaced while" in said
    assert "this run ends here, and writes nothing more to it" in said
    assert contents(tmp_path) == thief.left
