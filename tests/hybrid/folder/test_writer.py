"""Writing checkpoints: whole or not there, and failures agreed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid.folder import checkpoint
from hybrid.folder.writer import Writer
from hybrid.links import AgreedError, RankLinks, run_threads
from tests.hybrid.folder.small_checkpoints import MANIFEST, save, trained, units_of


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [1, 2, 3]), (1, [3]), (2, [2, 3])])
def test_the_newest_checkpoints_are_kept(tmp_path, keep_last: int, kept: list[int]) -> None:
    cut, optimizers = trained(1, 0)
    for step in (1, 2, 3):
        run_threads(1, lambda links, n=step: save(tmp_path, n, links, cut, optimizers, keep_last))
    assert [int(folder.name) for folder in checkpoint.complete(tmp_path)] == kept


@pytest.mark.parametrize("failing", ["head.safetensors", "manifest.json"])
def test_one_rank_that_cannot_write_stops_all_and_leaves_nothing(
    tmp_path, monkeypatch, failing: str
) -> None:
    import hybrid.folder.writer
    import hybrid.weights

    write = hybrid.weights.write_durably

    def full(path: Path, content: Any) -> None:
        if path.name == failing:
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    for module in (hybrid.weights, hybrid.folder.writer):
        monkeypatch.setattr(module, "write_durably", full)
    cut, optimizers = trained(2, 0)

    def program(links: RankLinks) -> str:
        with pytest.raises(AgreedError) as error:
            save(tmp_path, 7, links, cut, optimizers)
        return str(error.value)

    reasons = run_threads(2, program)
    assert reasons[0] == reasons[1]
    assert f"{failing}: No space left on device" in reasons[0]
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_beside_the_units_stands_in_the_manifest(tmp_path) -> None:
    cut, optimizers = trained(2, 0)
    states: list[dict[str, Any]] = [{"nothing": {}}, {"cut before x/y": {"lam": torch.ones(3)}}]

    def program(links: RankLinks) -> None:
        units = units_of(links.rank, cut, optimizers)
        Writer(tmp_path, links, 0).write(7, units, states[links.rank], MANIFEST)

    run_threads(2, program)
    manifest = checkpoint.read_manifest(tmp_path / "00000007")
    assert list(manifest["states"]) == ["cut before x/y"]
    assert checkpoint.load_state(tmp_path / "00000007", manifest, "nothing") == {}
    (lam,) = checkpoint.load_state(tmp_path / "00000007", manifest, "cut before x/y").values()
    assert torch.equal(lam, torch.ones(3))


def test_later_checkpoints_of_a_course_that_was_left_are_removed(tmp_path) -> None:
    cut, optimizers = trained(1, 0)
    for step in (1, 5, 9, 3, 5, 2):
        run_threads(1, lambda links, n=step: save(tmp_path, n, links, cut, optimizers))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000002"]
