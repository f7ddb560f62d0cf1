"""A run folder of a container's image, whose folders cannot be renamed, is trained on like others.

On an overlay file system where one can be mounted, and by pretending everywhere.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import layered
import pytest
from checkpoints import save, trained
from safetensors.torch import load_file
from trainings import assert_same

from hybrid.folder import checkpoint
from hybrid.folder.files import move
from hybrid.folder.runfolder import RunFolder
from hybrid.links import run_threads


@pytest.fixture(params=["mounted", "pretended"])
def below(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Path]]:
    """`below(folder)` is where the folder is from then on, in a lower layer."""
    with ExitStack() as stack:

        def put(folder: Path) -> Path:
            try:
                found = stack.enter_context(getattr(layered, request.param)(folder))
            except OSError as error:
                pytest.skip(f"no overlay can be mounted here: {error}")
            with pytest.raises(OSError, match="cross-device"):
                os.replace(next(p for p in found.rglob("*") if p.is_dir()), found / "elsewhere")
            return Path(found)

        yield put


def written(root: Path, step: int, keep_last: int = 0, seed: int = 0) -> None:
    root.parent.mkdir(exist_ok=True)
    cut, optimizers = trained(1, seed)
    run_threads(1, lambda links: save(root, step, links, cut, optimizers, keep_last))


def read(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint and its manifest."""
    return folder, checkpoint.read_manifest(folder)


def test_checkpoints_are_replaced_renamed_and_removed(below, tmp_path) -> None:
    """One of its step gives way, that of a course that was left gets a name, an old one goes."""
    for step in (7, 9):
        written(tmp_path / "image" / "checkpoints", step)
    root = below(tmp_path / "image") / "checkpoints"
    before = load_file(root / "00000007" / "stem.safetensors")
    left = load_file(root / "00000009" / "head.safetensors")
    written(root, 7, seed=1)
    assert sorted(folder.name for folder in root.iterdir()) == ["00000007", "00000009.left-1"]
    found = checkpoint.load_unit(*read(root / "00000007"), "stem")
    assert any(not found[name].equal(before[name]) for name in before)
    assert_same(checkpoint.load_unit(*read(root / "00000009.left-1"), "head"), left)
    written(root, 8, keep_last=1)
    assert [folder.name for folder in checkpoint.complete(root)] == ["00000008"]
    assert not (root / "00000007").exists()


@pytest.mark.parametrize("left", ["nothing", "what was being removed"])
def test_a_whole_checkpoint_under_another_name_gets_its_own(left: str, below, tmp_path) -> None:
    image = tmp_path / "image" / "checkpoints"
    written(image, 7)
    shutil.copytree(image / "00000007", image / ".00000007.beef.replaced")
    (image / "00000007" / "manifest.json").unlink()
    if left == "nothing":
        shutil.rmtree(image / "00000007")
    root = below(tmp_path / "image") / "checkpoints"
    assert len(checkpoint.recover(root)) == 1
    assert [folder.name for folder in root.iterdir()] == ["00000007"]
    checkpoint.load_model(*read(root / "00000007"))


def test_what_a_run_without_a_checkpoint_has_left_is_set_aside(below, tmp_path) -> None:
    image = tmp_path / "image"
    (image / "events").mkdir(parents=True)
    (image / "events" / "some").write_text("curves")
    (image / "events" / "link").symlink_to("some")
    (image / "metrics.jsonl").write_text("{}\n")
    run = below(image)
    aside = RunFolder(run).set_aside()
    assert aside == run / "without-checkpoint-1"
    assert [path.name for path in run.iterdir()] == [aside.name]
    assert sorted(path.name for path in aside.iterdir()) == ["events", "metrics.jsonl"]
    assert (aside / "events" / "some").read_text() == "curves"
    assert os.readlink(aside / "events" / "link") == "some"


def test_a_pipe_in_a_folder_that_is_moved_is_not_waited_for(below, tmp_path) -> None:
    (tmp_path / "image" / "folder").mkdir(parents=True)
    os.mkfifo(tmp_path / "image" / "folder" / "pipe")
    place = below(tmp_path / "image")
    move(place / "folder", place / "other")
    assert [*place.rglob("*")] == [place / "other"]
