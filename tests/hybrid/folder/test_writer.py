"""Writing checkpoints beside the training: whole or not there, and failures agreed on."""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from checkpoints import MANIFEST, save, saved, trained, units_of
from trainings import assert_same

from hybrid.folder import checkpoint
from hybrid.folder.writer import Share, Writer
from hybrid.links import AgreedError, RankLinks, run_threads


def test_a_half_written_checkpoint_does_not_count(tmp_path) -> None:
    saved(tmp_path, step=7)
    (tmp_path / ".00000008.partial").mkdir()
    (tmp_path / "00000009").mkdir()
    assert [folder.name for folder in checkpoint.complete(tmp_path)] == ["00000007"]


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [1, 2, 3]), (1, [3]), (2, [2, 3])])
def test_the_newest_checkpoints_are_kept(tmp_path, keep_last: int, kept: list[int]) -> None:
    cut, optimizers = trained(1, 0)
    for step in (1, 2, 3):
        run_threads(1, lambda links, n=step: save(tmp_path, n, links, cut, optimizers, keep_last))
    assert [int(folder.name) for folder in checkpoint.complete(tmp_path)] == kept


@pytest.fixture
def slow(monkeypatch) -> threading.Event:
    """Holds back every file until it is set."""
    gate, write = threading.Event(), checkpoint.write_durably

    def slowly(path: Path, content: bytes | str) -> None:
        assert gate.wait(20)
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_durably", slowly)
    return gate


def test_steps_taken_while_it_is_written_do_not_change_a_checkpoint(tmp_path, slow) -> None:
    cut, optimizers = trained(2, 0)
    expected = {name: value.clone() for name, value in cut.model.state_dict().items()}

    def program(links: RankLinks) -> bool:
        writer, totals, residual = Writer(tmp_path, links, 0), {"images": 1.0}, [0.5]
        manifest = {"totals": [totals], "residual": residual}
        writer.begin(7, units_of(links.rank, cut, optimizers), {}, manifest)
        totals["images"], residual[0] = 2.0, 0.75
        with torch.no_grad():
            for tensor in cut.module(links.rank).state_dict().values():
                tensor.add_(1)
        writer._exchange()
        unfinished = checkpoint.complete(tmp_path) == []
        links.all_gather(None)
        slow.set()
        writer.finish()
        return unfinished

    assert run_threads(2, program) == [True, True]
    (folder,) = checkpoint.complete(tmp_path)
    manifest = checkpoint.read_manifest(folder)
    assert (manifest["totals"], manifest["residual"]) == ([{"images": 1.0}], [0.5])
    assert_same(checkpoint.load_model(folder, manifest), expected)


def test_training_waits_for_the_copy_only(tmp_path, slow) -> None:
    cut, optimizers = trained(1, 0)

    def program(links: RankLinks) -> tuple[float, float]:
        writer = Writer(tmp_path, links, 0)
        writer.begin(7, units_of(0, cut, optimizers), {}, MANIFEST)
        copying = writer.blocked_seconds
        sleep(0.05)
        writer._exchange()
        going_on = writer.blocked_seconds
        threading.Timer(0.05, slow.set).start()
        writer.finish()
        return going_on - copying, writer.blocked_seconds - copying

    going_on, waiting = run_threads(1, program)[0]
    assert going_on == 0 < waiting


def test_the_ranks_reports_alone_make_a_checkpoint_whole(tmp_path) -> None:
    cut, optimizers = trained(3, 0)

    def program(links: RankLinks) -> None:
        writer = Writer(tmp_path, links, 0)
        writer.begin(7, units_of(links.rank, cut, optimizers), {}, MANIFEST)
        limit = perf_counter() + 20
        while not all(links.all_gather(bool(checkpoint.complete(tmp_path)))):
            assert perf_counter() < limit
            writer._exchange()
            sleep(0.01)

    run_threads(3, program)


@pytest.mark.parametrize("told", ["hear", "finish"])
@pytest.mark.parametrize("failing", ["head.safetensors", "manifest.json"])
def test_one_rank_that_cannot_write_stops_all_and_leaves_nothing(
    tmp_path, monkeypatch, failing: str, told: str
) -> None:
    import hybrid.folder.writer

    write = checkpoint.write_durably

    def full(path: Path, content: bytes | str) -> None:
        if path.name == failing:
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    for module in (checkpoint, hybrid.folder.writer):
        monkeypatch.setattr(module, "write_durably", full)
    cut, optimizers = trained(2, 0)

    def program(links: RankLinks) -> str:
        writer = Writer(tmp_path, links, 0)
        writer.begin(7, units_of(links.rank, cut, optimizers), {}, MANIFEST)
        try:
            for _ in range(2000 if told == "hear" else 0):
                sleep(0.01)
                writer._exchange()
            writer.finish()
        except AgreedError as error:
            assert writer.share == Share()
            return str(error)
        return "written"

    said = run_threads(2, program)
    assert said[0] == said[1]
    assert f"{failing}: No space left on device" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_later_checkpoint_waits_for_the_one_before(tmp_path) -> None:
    cut, optimizers = trained(2, 0)

    def program(links: RankLinks) -> None:
        writer = Writer(tmp_path, links, 0)
        for step in (1, 2, 3):
            writer.begin(step, units_of(links.rank, cut, optimizers), {}, MANIFEST)
        writer.finish()

    run_threads(2, program)
    assert [int(folder.name) for folder in checkpoint.complete(tmp_path)] == [1, 2, 3]


def test_what_is_kept_beside_the_units_stands_in_the_manifest(tmp_path) -> None:
    cut, optimizers = trained(2, 0)
    kept: list[dict[str, Any]] = [{"nothing": {}}, {"cut before x/y": {"lam": torch.ones(3)}}]

    def program(links: RankLinks) -> None:
        writer = Writer(tmp_path, links, 0)
        units = units_of(links.rank, cut, optimizers)
        writer.begin(7, units, kept[links.rank], MANIFEST)
        writer.finish()

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
