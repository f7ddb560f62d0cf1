"""Crafted pickles: the right arrays or one line, in bounded time and memory, and nothing is run."""

import contextlib
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.files.pickled import read_cifar_python

GUARDED = Path(__file__).parents[2] / "support" / "guarded_load.py"
PIXELS = np.arange(3072, dtype=np.uint8)[None]
BATCH = {b"data": PIXELS, b"labels": [7], b"filenames": [b"a.png"]}


def text(word):
    return b"\x8c" + bytes([len(word)]) + word.encode()


def asks_for(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def array(shape=b"K\x01M\x00\x0c\x86", code=b"u1", raw=b"C\x01x", version=b"K\x01"):
    dtype = asks_for("numpy", "dtype") + b"U" + bytes([len(code)]) + code + b"K\x00K\x01\x87R"
    made = asks_for("numpy.core.multiarray", "_reconstruct") + asks_for("numpy", "ndarray")
    return made + b"K\x00\x85U\x01b\x87R(" + version + shape + dtype + b"\x89" + raw + b"tb"


def batch(data, labels=b"]K\x07a"):
    return b"\x80\x02}(U\x04data" + data + b"U\x06labels" + labels + b"u."


SYSTEM = asks_for("os", "system")
MARKER = b"U\x0etouch /tmp/ran"
HOSTILE = {
    "reduce in a batch": batch(SYSTEM + MARKER + b"\x85R"),
    "stack global": b"\x80\x04" + text("os") + text("system") + b"\x93" + MARKER + b"\x85R.",
    "inst": b"(" + MARKER + b"ios\nsystem\n.",
    "newobj": SYSTEM + MARKER + b"\x85\x81.",
    "extension 1": b"\x80\x02\x82\x01.",
    "persistent id": b"Pos.system\n.",
    "array of arrays": batch(array(raw=array())),
    "array of objects": batch(array(code=b"O8")),
    "negative shape": batch(array(shape=b"J\xff\xff\xff\xffJ\x00\xf4\xff\xff\x86")),
    "shape of a million": batch(array(shape=b"(" + b"K\x01" * 500_000 + b"t")),
    "raw too short": batch(array()),
    "memo place of 4300 digits": b"]p" + b"9" * 4300 + b"\n.",
    "billion laughs": b"\x80\x02]q\x00" + b"](" + b"h\x00" * 100_000 + b"eq\x00" + b".",
    "lists nested deeply as labels": batch(array(), b"]" * 100_000 + b"a" * 99_999),
    "text encoded again and again": (
        asks_for("_codecs", "encode") + b"q\x00X\x40\x42\x0f\x00" + b"x" * 1_000_000 + b"\x85q\x01"
        b"](" + b"h\x00h\x01R" * 10_000 + b"e."
    ),
    "8 GB of text announced": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 33) + b"x.",
    "2 GB of bytes announced": b"\x80\x02T\xff\xff\xff\x7fx.",
    "8 EB frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f}.",
    "2 GB integer announced": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "integer of a million digits": b"L" + b"7" * 1_000_000 + b"L\n.",
    "label of a million bytes": (
        batch(array(), b"]\x8b\x40\x42\x0f\x00" + b"\x7f" * 1_000_000 + b"a")
    ),
    "name with escapes": b"c\x1b[2J\nsystem\n.",
    "two files": b"K\x01.K\x02.",
}


def test_a_crafted_pickle_is_one_line_within_bounds_and_runs_nothing(tmp_path):
    """And leaves no trace in its process, which reads them all, and one that is good."""
    files = {tmp_path / str(number): name for number, name in enumerate(HOSTILE)}
    for file, name in files.items():
        # The header of protocol 2 comes first, since a file without it is not looked at further.
        file.write_bytes(b"\x80\x02" + HOSTILE[name])
    good = tmp_path / "good"
    good.write_bytes(pickle.dumps(BATCH, 2))
    command = [sys.executable, str(GUARDED), "cifar", *map(str, [*files, good])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["file"]: row for row in map(json.loads, done.stdout.splitlines())}
    for file, name in files.items():
        row = rows[str(file)]
        assert row["error"].startswith(f"ValueError: {file} "), name
        assert row["error"].isprintable(), name
        assert len(row["error"]) < 2000, name
        assert (row["seen"], row["seconds"] < 10) == ([], True), name
    assert not rows[str(good)].get("error")


def test_a_batch_cut_off_anywhere_is_refused(tmp_path):
    content = pickle.dumps(BATCH, 2)
    path = tmp_path / "x"
    ends = [n for n in range(len(content)) if n < 250 or n % 499 == 0 or n > len(content) - 100]
    for end in ends:
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"is not a CIFAR batch"):
            read_cifar_python(path)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255))))
def test_a_batch_with_other_bytes_is_read_or_refused(tmp_path, changes):
    content = bytearray(pickle.dumps(BATCH, 2))
    places = [n for n in range(len(content)) if n < 250 or n > len(content) - 250]
    for place, value in changes:
        content[places[place % len(places)]] = value
    path = tmp_path / "x"
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        images, labels = read_cifar_python(path)
        assert images.shape == (len(labels), 3, 32, 32)
        assert set(labels.tolist()) <= set(range(10))
        return
    with pytest.raises(ValueError, match=rf"^{path} ") as caught:
        read_cifar_python(path)
    assert str(caught.value).isprintable()


def test_a_file_beyond_any_batch_is_not_read_whole(tmp_path):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(ValueError, match="more than 268435456 bytes"):
        read_cifar_python(path)
