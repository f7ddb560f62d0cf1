"""Readers accept the official formats and name the fault of anything else."""

import contextlib
import gzip
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.files.formats import read_cifar_binary, read_idx
from hybrid.data.files.pickled import read_cifar_python

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
LABELS = [3, 0, 9, 1]
PACKS = (bytes, gzip.compress)


def idx(shape=(2, 3), data=bytes(range(6)), magic=b"\x00\x00\x08"):
    return magic + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def binary(labels):
    return b"".join(bytes(x) + row.tobytes() for x, row in zip(labels, PIXELS, strict=True))


def pickled(**changes):
    return pickle.dumps({"data": PIXELS, "labels": LABELS} | changes, 2)


def cifar10(path, *rest):
    return read_cifar_binary([path], 1, *rest)


def official_binary(path):
    return cifar10(path, 10_000)


def official_python(path):
    return read_cifar_python(path, 10, 10_000)


def write(path, content):
    path.write_bytes(content)
    return path


def fault(read, path):
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pack", PACKS)
def test_an_idx_file_has_the_shape_of_its_header(tmp_path, pack):
    tensor = read_idx(write(tmp_path / "x", pack(idx())))
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor.dtype == torch.uint8


FLIPPED = bytearray(gzip.compress(idx()))
FLIPPED[-6] ^= 1
REFUSED = {
    read_idx: [
        *((pack(idx(data=bytes(5))), "has 17 bytes, expected 18") for pack in PACKS),
        *((pack(idx(data=bytes(90))), "has 19 or more bytes, expected 18") for pack in PACKS),
        *((pack(idx(data=b"")), "has 12 bytes, expected 18") for pack in PACKS),
        *((content, "is not an IDX file") for content in (b"", b"\x00", b"\x89PNG....")),
        (idx(magic=b"\x00\x00\x0d"), "is not an IDX file"),
        *((idx(shape=(1,) * n), "is not an IDX file") for n in (0, 9, 255)),
        (idx()[:10], "10 bytes"),
        (idx(shape=(2**32 - 1,) * 3), "22 bytes, expected"),  # more than the memory holds
        *((gzip.compress(idx())[:cut], "") for cut in (2, 5, 15, -4)),
        (bytes(FLIPPED), "is damaged"),
    ],
    cifar10: [
        *((bytes(n), f"has {n} bytes, expected") for n in (0, 1, 3072, 3074, 4 * 3073 - 1)),
        (binary([[0], [1], [10], [2]]), "has the label 10 at image 2, outside 0..9"),
    ],
    official_binary: [
        (bytes(2 * 3073), "has 6146 bytes, expected 30730000 (10000 records of 3073)")
    ],
    official_python: [(pickled(), "has 4 images and 4 labels, expected 10000")],
    read_cifar_python: [
        *(
            (pickled(data=data), "is not a CIFAR batch (its data is no array of uint8 of")
            for data in (
                *(np.array([[None] * 3072], dtype=object), PIXELS.astype(np.int8), PIXELS[:, :-1]),
                *(PIXELS.astype(np.int16), PIXELS.reshape(-1), PIXELS.tolist(), 5),
            )
        ),
        (pickled(labels=[0, 1, 2]), "4 images and 3 labels"),
        (pickled(labels=[0, 1, 2, 10]), "the label 10 at image 3"),
        (pickled(labels=[0, -1, 2, 3]), "the label -1 at image 1"),
        *(
            (pickled(labels=labels), "labels")
            for labels in (*([0, 1, 2, x] for x in (10**5000, 3.0, True)), (0, 1), np.arange(4))
        ),
        (pickle.dumps({"labels": LABELS}, 2), "its data is no array"),
        (pickle.dumps({"data": PIXELS}, 2), "its labels are not a list of 64-bit integers"),
        (pickle.dumps({"data": PIXELS, "labels": LABELS}, 4), "it is no pickle of protocol 2"),
    ],
}


@pytest.mark.parametrize(
    ("read", "content", "what"),
    [(read, *case) for read, cases in REFUSED.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_a_file_that_is_not_of_the_format_is_refused_by_name(tmp_path, read, content, what):
    message = fault(read, write(tmp_path / "x", content))
    assert all(part in message for part in what.split("..."))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path, content):
    path = write(tmp_path / "x", content)
    for read in (read_idx, read_cifar_python):
        with contextlib.suppress(ValueError):
            read(path)
            continue
        fault(read, path)


def test_cifar10_records_hold_a_label_and_the_pixels(tmp_path):
    path = write(tmp_path / "x.bin", binary([[x] for x in LABELS]))
    images, labels = read_cifar_binary([path, path], 1, records=4)
    assert labels.tolist() == LABELS * 2
    assert np.array_equal(images[4:].numpy().reshape(4, 3072), PIXELS)
    assert images.is_contiguous()


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("encode", [str, str.encode])
@pytest.mark.parametrize("name", ["labels", "fine_labels"])
def test_a_pickled_batch_is_read_whatever_its_keys_and_order(tmp_path, order, encode, name):
    pixels = np.array(PIXELS, order=order)
    content = {encode("data"): pixels, encode(name): LABELS, encode("filenames"): [b"a.png"]}
    path = write(tmp_path / "x", pickle.dumps(content, 2))
    images, labels = read_cifar_python(path, records=4)
    assert np.array_equal(images.numpy().reshape(4, 3072), PIXELS)
    assert labels.tolist() == LABELS


def test_a_python_2_pickle_is_read(tmp_path):
    raw = PIXELS[:1].tobytes()
    content = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00"
    ) + (raw + b"tbU\x06labels]K\x05au.")
    images, labels = read_cifar_python(write(tmp_path / "x", content))
    assert images.numpy().tobytes() == raw
    assert labels.tolist() == [5]
