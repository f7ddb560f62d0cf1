"""A text in windows: the next byte of each, what is held out, and which files are read."""

import os

import pytest
import torch
import torch.nn.functional as F
from answers import refusal
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data import load_text
from hybrid.data.texts import bits_per_byte
from hybrid.solvers.state import State


def written(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def bytes_of(data, number, targets=False):
    rows = data.targets if targets else data.batch
    return bytes(rows(torch.tensor([number]), 0, 0)[0].tolist())


@pytest.fixture
def numbered(tmp_path):
    """A file whose 4-byte words are their own numbers."""

    def make(count):
        words = b"".join(f"{i:04x}".encode() for i in range(count))
        return written(tmp_path, {"text": words}) / "text"

    return make


@given(data=st.data(), length=st.integers(2, 40))
def test_every_window_lies_in_one_half_and_is_followed_by_its_targets(
    tmp_path_factory, data, length
):
    size = data.draw(st.integers(20 * (length + 1), 20 * (length + 1) + 3000))
    generator = torch.Generator().manual_seed(size)
    text = bytes(torch.randint(1, 256, (size,), generator=generator).tolist())
    file = written(tmp_path_factory.mktemp("text"), {"a": text}) / "a"
    halves = load_text(file, length)
    places: list[set[int]] = []
    for half in halves:
        assert len(half) > 0
        covered: set[int] = set()
        for number, start in enumerate(half.starts.tolist()):
            assert bytes_of(half, number) == text[start : start + length]
            assert bytes_of(half, number, targets=True) == text[start + 1 : start + length + 1]
            covered |= {*range(start, start + length + 1)}
        places.append(covered)
    assert not places[0] & places[1]
    # what no window has is less than one of each stretch
    assert size - len(places[0] | places[1]) <= 21 * length + size % (size // 20)


def test_a_folder_is_its_text_files_by_their_paths(tmp_path):
    files = {
        "b.py": b"second" * 30,
        "a/z.txt": b"third." * 30,
        "a.txt": b"first." * 30,
        "image.png": b"\x89PNG\0" + b"x" * 5000,
        ".hidden": b"no" * 500,
        ".git/config": b"no" * 500,
        "empty": b"",
    }
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    os.mkfifo(tmp_path / "pipe")
    train, _ = load_text(written(tmp_path, files), 4)
    assert bytes(train.text.tolist()) == b"first." * 30 + b"second" * 30 + b"third." * 30


@pytest.mark.parametrize(
    ("files", "place", "said"),
    [
        ({"a": b"short"}, "a", "has 5 bytes of text, in 1 files: 2580 are needed"),
        ({}, "", "has 0 bytes of text, in 0 files"),
        ({"a.bin": b"\0" * 9000}, "", "in 0 files"),
        ({"a.bin": b"\0" * 9000}, "a.bin", "in 0 files"),
    ],
)
def test_too_little_text_is_one_line(tmp_path, files, place, said):
    assert said in refusal(load_text, written(tmp_path, files) / place, 128)


def test_ranks_compare_their_texts_and_keep_none_that_they_do_not_read(numbered, tmp_path):
    train, test = load_text(numbered(2000), 16)
    other, _ = load_text(written(tmp_path, {"other": b"0" * 8000}) / "other", 16)
    assert train.fingerprint() == test.fingerprint() != other.fingerprint()
    assert train.only(True, False).fingerprint() == train.fingerprint()
    nothing = train.only(False, False)
    assert nothing.fingerprint() == train.fingerprint()
    assert nothing.text.untyped_storage().nbytes() == 1
    assert nothing.batch(torch.arange(2), 0, 0).shape == (2, 16)


def test_a_run_does_not_go_on_with_another_text(numbered, tmp_path):
    train, _ = load_text(numbered(2000), 16)
    state = train.state()
    train.only(False, False).load_state(state)
    train.load_state(State())  # of a run that kept none
    changed, _ = load_text(numbered(2001), 16)
    assert "has 8004 bytes that are not those of before" in refusal(changed.load_state, state)


def test_run_folders_are_no_text(tmp_path):
    files = {"a": b"text" * 300, "run/config.toml": b"x" * 99, "run/metrics.jsonl": b"x" * 99}
    train, _ = load_text(written(tmp_path, {**files, "run/checkpoints/1/manifest.json": b"x"}), 4)
    assert bytes(train.text.tolist()) == files["a"]


def test_bits_are_minus_log2_of_the_probability():
    p = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(2, 3, 4).transpose(1, 2)
    targets = torch.tensor([[0, 1, 2], [3, 3, 0]])
    assert bits_per_byte(p, targets).tolist() == [[1, 2, 3], [3, 3, 1]]
    assert torch.allclose(
        bits_per_byte(p, targets).mean(), F.cross_entropy(p, targets) / torch.tensor(2.0).log()
    )
