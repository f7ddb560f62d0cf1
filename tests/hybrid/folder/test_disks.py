"""Runs whose hosts do not share a disk: whole checkpoints on some, which any ranks go on from."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file
from trainings import assert_same, digests, lines, newest, weights

from hybrid.folder import checkpoint

PROGRAM = "tests.hybrid.folder.disks_program:"
# a learning rate that does not depend on the number of epochs
CONSTANT = ("--set", "schedule.name=constant", "--set", "schedule.warmup_epochs=0")
QUICK = ("--batch-size", "64", "--set", "train.threads=1", "--set", "data.limit=320", *CONSTANT)


@pytest.fixture
def train(world):
    """Train to an epoch on ranks with these folders; what they say, after a success."""

    def run(folders, epochs, *words, weights=()):
        words = ["train", *QUICK, "--epochs", str(epochs), *map(str, words)]
        folders = [str(folder) for folder in folders]
        answers = world.run(len(folders), f"{PROGRAM}hybrid", folders, words, [*map(str, weights)])
        assert {status for status, _, _ in answers} == {0}, answers
        return "".join(out + err for _, out, err in answers)

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of three epochs on one disk."""
    from commands import command

    run = tmp_path_factory.mktemp("runs") / "run"
    assert command("train", *QUICK, "--epochs", "3", "--out", str(run))[0] == 0
    return run


def steps(run):
    return [(line["step"], line["phase"]) for line in lines(run)]


def test_two_disks_have_whole_checkpoints_from_which_any_ranks_go_on(
    train, undisturbed, tmp_path, hybrid
):
    a, b, c, d = (tmp_path / name for name in "abcd")
    said = train([a, b, b, c], 1, "--replicas", 2)
    assert "do not share" in said
    assert not c.exists(), "a third disk keeps nothing"
    assert digests(a) == digests(b)
    assert hybrid("evaluate", str(b))[0] == 0
    for folder in (a, b):
        shutil.rmtree(folder)
    train([a, b], 1)
    # the first disk is lost, a new host comes first
    assert "step 5 comes from" in train([c, b], 2, "--auto-resume")
    # both change places, and one more comes: three blocks
    assert "do not share" in train([b, d, c], 3, "--resume")
    assert steps(b) == steps(d) == steps(undisturbed)
    assert json.loads((b / "summary.json").read_text())["blocks"] == 3
    assert newest(a).name == "00000005"
    shutil.rmtree(b)
    # an older checkpoint, on a disk that was away, is no reason to go back
    assert "step 15 comes from" in train([a, d], 4, "--resume", "--blocks", 2)
    assert newest(a).name == "00000020"


def test_gathered_checkpoints_have_the_bits_of_shared_ones(train, undisturbed, tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    train([a, b], 1)
    train([b, c], 2, "--resume")
    train([c, a], 3, "--resume", "--set", "checkpoint.copies=1")
    assert digests(c) == digests(undisturbed)
    assert newest(a).name == "00000005"


def test_each_disk_may_keep_its_own_part(train, undisturbed, tmp_path, hybrid):
    a, b = tmp_path / "a", tmp_path / "b"
    assert "spread" in train([a, b], 2, "--set", "checkpoint.copies=0")
    parts = [{file.name for file in newest(run).glob("*.safetensors")} for run in (a, b)]
    assert parts[0].isdisjoint(parts[1])
    status, _, err = hybrid("evaluate", str(a))
    assert (status, err.count("\n"), "is on the disk of" in err) == (1, 1, True)
    train([b, a], 3, "--resume")
    for file in newest(b).glob("*.safetensors"):
        shutil.copy(file, newest(a))
    assert_same(weights(a), weights(undisturbed))


def test_weights_may_be_on_the_first_ranks_disk_alone(train, tmp_path):
    from tests.hybrid.folder.disks_program import network

    tensors = {name: 1.5 * x for name, x in network().state_dict().items()}
    files = [tmp_path / name for name in ("w.safetensors", "none.safetensors")]
    save_file(tensors, files[0])
    model = ("--model", f"{PROGRAM}network", "--set", "checkpoint.keep_last=0")
    train([tmp_path / "a", tmp_path / "b"], 1, *model, weights=files)
    train([tmp_path / "c"] * 2, 1, *model, weights=files[:1] * 2)
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "c"))
    start = tmp_path / "a" / "checkpoints" / "00000000"
    stored = checkpoint.load_model(start, checkpoint.read_manifest(start))
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def test_files_go_among_all_ranks_at_once(world, tmp_path):
    random.seed(0)
    sizes = {
        (rank, f"{i}"): random.choice((0, 1, 999, 1000, 5500)) for rank in range(3) for i in "ab"
    }
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    for (rank, name), size in sizes.items():
        (tmp_path / str(rank) / name).write_bytes(random.randbytes(size))
    assert world.run(3, f"{PROGRAM}moved", str(tmp_path), sizes, -1) == [""] * 3
    for (source, name), size in sizes.items():
        for target in {0, 1, 2} - {source}:
            there = (tmp_path / str(target) / f"from {source}, {name}").read_bytes()
            assert there == (tmp_path / str(source) / name).read_bytes()
            assert len(there) == size
    (tmp_path / "3").mkdir()
    errors = world.run(4, f"{PROGRAM}moved", str(tmp_path), sizes, 3)
    assert len({*errors}) == 1
    assert "No such file" in errors[0]


def test_ranks_find_out_which_of_them_share_a_disk(world, tmp_path):
    folders = [str(tmp_path / name) for name in "abab"]
    found = world.run(4, f"{PROGRAM}found", folders)
    assert [(here, is_root) for here, is_root, *_ in found] == [
        *((0, True), (1, True), (0, False), (1, False))
    ]
    assert {str(rest) for _, _, *rest in found} == {str([[0, 1], found[0][3], []])}
    assert list(tmp_path.iterdir()) == [], "what nobody needs is removed"


def test_checkpoints_of_different_runs_are_never_mixed(world, tmp_path, hybrid):
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        assert hybrid("train", *QUICK, "--epochs", "1", "--out", folder)[0] == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    words = ["train", *QUICK, "--epochs", "2", "--auto-resume"]
    (status, _, err), other = world.run(2, f"{PROGRAM}hybrid", folders, words)
    assert (status, err.count("\n"), "checkpoints of different runs" in err) == (1, 1, True)
    assert other[0] == 1
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_damaged_file_that_was_brought_is_named_where_it_came_from(
    train, undisturbed, world, tmp_path
):
    a, b = tmp_path / "a", tmp_path / "b"
    shutil.copytree(undisturbed, a)
    file = newest(a) / "head.safetensors"
    file.write_bytes(file.read_bytes()[::-1])
    words = ["train", *QUICK, "--epochs", "4", "--resume"]
    (status, _, err), _ = world.run(2, f"{PROGRAM}hybrid", [str(a), str(b)], words)
    there = b / "checkpoints" / newest(a).name  # on hosts it has the same path
    assert (status, err.count("\n")) == (1, 1)
    assert f"{there / file.name} is not what was written" in err
    assert f"remove {there} to resume from another disk's copy, or from an earlier one" in err
    shutil.rmtree(newest(a))
    train([a, b], 4, "--resume")
    assert newest(b).name == "00000020"
