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
DOUBLING = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
HOSTILE = {
    "reduce": SYSTEM + MARKER + b"\x85R.",
    "reduce in a batch": batch(SYSTEM + MARKER + b"\x85R"),
    "stack global": b"\x80\x04" + text("os") + text("system") + b"\x93" + MARKER + b"\x85R.",
    "stack global of a path": b"\x80\x04" + text("numpy") + text("dtype.type.__base__") + b"\x93.",
    "inst": b"(" + MARKER + b"ios\nsystem\n.",
    "obj": b"(" + SYSTEM + MARKER + b"o.",
    "newobj": SYSTEM + MARKER + b"\x85\x81.",
    "newobj of a stand-in": asks_for("numpy", "dtype") + b")\x81.",
    "newobj_ex": b"\x80\x04" + asks_for("numpy", "dtype") + b")}\x92.",
    "extension 1": b"\x80\x02\x82\x01.",
    "extension 2": b"\x80\x02\x83\x01\x00.",
    "extension 4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "persistent id": b"Pos.system\n.",
    "binary persistent id": b"U\x02osQ.",
    "next buffer": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05\x97\x98.",
    "set": b"\x80\x04\x8f.",
    "state of a function": asks_for("_codecs", "encode") + b"}U\x0c__defaults__)sb.",
    "slots of a function": asks_for("_codecs", "encode") + b"N}X\x08\0\0\0__code__Ns\x86b.",
    "state of a class": asks_for("numpy", "ndarray") + b"}U\x05shapeNsb.",
    "state of a dict": b"}}b.",
    "call of a text": b"U\x02os)R.",
    "call with a list": asks_for("numpy", "dtype") + b"]R.",
    "dtype of an array": asks_for("numpy", "dtype") + array() + b"\x85R.",
    "array of arrays": batch(array(raw=array())),
    "array of objects": batch(array(code=b"O8")),
    "array of strings": batch(array(code=b"V1")),
    "negative shape": batch(array(shape=b"J\xff\xff\xff\xffJ\x00\xf4\xff\xff\x86")),
    "shape of a million": batch(array(shape=b"(" + b"K\x01" * 500_000 + b"t")),
    "shape that overflows": batch(array(shape=b"\x8a\x09" + b"\xff" * 8 + b"\x7fK\x00\x86")),
    "shape with itself": batch(array(shape=b"]q\x00h\x00a")),
    "raw is a list": batch(array(raw=b"]")),
    "raw too short": batch(array()),
    "memo place of 4 billion": b"\x80\x02]r\xff\xff\xff\xff.",
    "memo place of 4300 digits": b"]p" + b"9" * 4300 + b"\n.",
    "memo place unknown": b"h\x05.",
    "tuples doubled 60 times": b"\x80\x02)q\x00" + DOUBLING + b".",
    "tuples doubled 60 times as a key": b"\x80\x02)q\x00" + DOUBLING + b"q\x01}h\x01K\x01s.",
    "billion laughs": b"\x80\x02]q\x00" + b"](" + b"h\x00" * 100_000 + b"eq\x00" + b".",
    "tuples nested deeply as a key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "tuples nested too deeply": b"\x80\x02)" + b"\x85" * 1_100_000 + b".",
    "lists nested deeply": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "lists nested deeply as labels": batch(array(), b"]" * 100_000 + b"a" * 99_999),
    "marks": b"(" * 100_000 + b".",
    "text encoded again and again": (
        asks_for("_codecs", "encode") + b"q\x00X\x40\x42\x0f\x00" + b"x" * 1_000_000 + b"\x85q\x01"
        b"](" + b"h\x00h\x01R" * 10_000 + b"e."
    ),
    "8 GB of text announced": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 33) + b"x.",
    "4 GB of text announced": b"\x80\x02X\xff\xff\xff\xffx.",
    "2 GB of bytes announced": b"\x80\x02T\xff\xff\xff\x7fx.",
    "8 GB of bytes announced": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 33) + b"x.",
    "8 GB of bytearray announced": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b"x.",
    "more than a size announced": b"\x80\x05\x96" + b"\xff" * 8 + b"x.",
    "8 EB frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f}.",
    "2 GB integer announced": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "negative integer length": b"\x80\x02\x8b\xff\xff\xff\xff\x01.",
    "integer of a million bytes": b"\x80\x02\x8b\x40\x42\x0f\x00" + b"\x7f" * 1_000_000 + b".",
    "integer of a million digits": b"L" + b"7" * 1_000_000 + b"L\n.",
    "label of a million bytes": batch(
        array(), b"]\x8b\x40\x42\x0f\x00" + b"\x7f" * 1_000_000 + b"a"
    ),
    "name of a million characters": b"c" + b"x" * 1_000_000 + b"\ny\n.",
    "name with escapes": b"c\x1b[2J\nsystem\n.",
    "pop": b"0.",
    "nothing on the stack": b".",
    "append to nothing": b"K\x01a.",
    "items of a text": b"U\x01a(U\x01bK\x01u.",
    "odd items": b"}(U\x01au.",
    "two files": b"K\x01.K\x02.",
}


def test_a_crafted_pickle_is_one_line_within_bounds_and_runs_nothing(tmp_path):
    """And leaves no trace in its process, which reads them all, and one that is good."""
    files = {tmp_path / str(number): name for number, name in enumerate(HOSTILE)}
    for file, name in files.items():
        file.write_bytes(HOSTILE[name])
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


def check(path, content):
    """The arrays of one image, or one line."""
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        images, labels = read_cifar_python(path)
        assert images.shape == (len(labels), 3, 32, 32)
        assert set(labels.tolist()) <= set(range(10))
        return
    with pytest.raises(ValueError, match=rf"^{path} ") as caught:
        read_cifar_python(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_batch_cut_off_anywhere_is_refused(tmp_path, protocol):
    content = pickle.dumps(BATCH, protocol)
    path = tmp_path / "x"
    ends = [n for n in range(len(content)) if n < 250 or n % 499 == 0 or n > len(content) - 100]
    for end in ends:
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"is not a CIFAR batch"):
            read_cifar_python(path)


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255))))
def test_a_batch_with_other_bytes_is_read_or_refused(tmp_path, protocol, changes):
    content = bytearray(pickle.dumps(BATCH, protocol))
    places = [n for n in range(len(content)) if n < 250 or n > len(content) - 250]
    for place, value in changes:
        content[places[place % len(places)]] = value
    check(tmp_path / "x", bytes(content))


PIECES = [
    *(bytes([code]) for code in b"().0]}aestuRb2\x81\x85\x86\x87\x88\x89\x90\x93\x94"),
    *(b"K\x07", b"U\x04data", b"U\x06labels", b"h\x00", b"q\x00", b"h\x01", b"q\x01", b"N"),
    *(asks_for("numpy", "dtype"), asks_for("_codecs", "encode"), asks_for("os", "system")),
    *(asks_for("numpy.core.multiarray", "_reconstruct"), text("numpy"), text("ndarray"), array()),
]


@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_any_program_of_opcodes_is_read_or_refused(tmp_path, pieces):
    check(tmp_path / "x", b"\x80\x04" + b"".join(pieces) + b".")


def test_a_file_beyond_any_batch_is_not_read_whole(tmp_path):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(ValueError, match="more than 268435456 bytes"):
        read_cifar_python(path)
