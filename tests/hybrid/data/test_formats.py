"""Readers accept the official formats and name the fault of anything else."""

import builtins
import contextlib
import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.formats import read_cifar_binary, read_cifar_python, read_idx

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
LABELS = [3, 0, 9, 1]


def idx(shape=(2, 3), data=bytes(range(6)), magic=b"\x00\x00\x08"):
    return magic + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def write(path, content):
    path.write_bytes(content)
    return path


def write_pickle(path, content, protocol=2):
    return write(path, pickle.dumps(content, protocol=protocol))


def fault(call, *arguments, **settings):
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_has_the_shape_of_its_header(tmp_path, pack):
    tensor = read_idx(write(tmp_path / "x", pack(idx())))
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor.dtype == torch.uint8


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("data", "found"), [(bytes(5), "17 bytes"), (bytes(90), "19 or more bytes"), (b"", "12 bytes")]
)
def test_an_idx_file_of_another_size_names_bytes_found_and_expected(tmp_path, pack, data, found):
    path = write(tmp_path / "x", pack(idx(data=data)))
    message = fault(read_idx, path)
    assert f"{path} has {found}, expected 18" in message


@pytest.mark.parametrize(
    "content", [b"", b"\x00", b"\x89PNG....", idx(magic=b"\x00\x00\x0d"), idx(shape=())]
)
def test_a_file_that_is_not_idx_is_refused(tmp_path, content):
    path = write(tmp_path / "x", content)
    assert f"{path} is not an IDX file" in fault(read_idx, path)


def test_a_header_that_ends_early_is_refused(tmp_path):
    assert "10 bytes" in fault(read_idx, write(tmp_path / "x", idx()[:10]))


def test_a_header_that_claims_more_than_the_memory_holds_is_refused(tmp_path):
    huge = idx(shape=(2**32 - 1,) * 3)
    assert "22 bytes, expected" in fault(read_idx, write(tmp_path / "x", huge))


@pytest.mark.parametrize("cut", [2, 5, 15, -4])
def test_a_truncated_gzip_file_is_refused(tmp_path, cut):
    path = write(tmp_path / "x.gz", gzip.compress(idx())[:cut])
    assert str(path) in fault(read_idx, path)


def test_a_gzip_file_with_a_flipped_bit_is_refused(tmp_path):
    content = bytearray(gzip.compress(idx()))
    content[-6] ^= 1
    path = write(tmp_path / "x.gz", bytes(content))
    assert f"{path} is damaged" in fault(read_idx, path)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path, content):
    path = write(tmp_path / "x", content)
    for read in (read_idx, read_cifar_python):
        with contextlib.suppress(ValueError):
            read(path)
            continue
        assert str(path) in fault(read, path)


def binary(labels, pixels=PIXELS):
    return b"".join(bytes(x) + row.tobytes() for x, row in zip(labels, pixels, strict=True))


def test_cifar10_records_hold_a_label_and_the_pixels(tmp_path):
    path = write(tmp_path / "x.bin", binary([[x] for x in LABELS]))
    images, labels = read_cifar_binary([path, path], 1, records=4)
    assert labels.tolist() == LABELS * 2
    assert np.array_equal(images[4:].numpy().reshape(4, 3072), PIXELS)
    assert images.is_contiguous()


def test_cifar100_records_hold_the_fine_label_second(tmp_path):
    path = write(tmp_path / "x.bin", binary([[7, 10 * x] for x in LABELS]))
    assert read_cifar_binary([path], 2)[1].tolist() == [30, 0, 90, 10]


@pytest.mark.parametrize("size", [0, 1, 3072, 3074, 4 * 3073 - 1])
def test_a_cifar_file_of_incomplete_records_is_refused(tmp_path, size):
    path = write(tmp_path / "x.bin", bytes(size))
    assert f"{path} has {size} bytes, expected" in fault(read_cifar_binary, [path], 1)


def test_a_cifar_file_of_fewer_records_than_official_is_refused(tmp_path):
    path = write(tmp_path / "x.bin", bytes(2 * 3073))
    message = fault(read_cifar_binary, [path], 1, 10_000)
    assert f"{path} has 6146 bytes, expected 30730000 (10000 records of 3073)" in message


def test_a_cifar_label_of_no_class_is_refused(tmp_path):
    path = write(tmp_path / "x.bin", binary([[0], [1], [10], [2]]))
    assert f"{path} has the label 10 at image 2, outside 0..9" in fault(
        read_cifar_binary, [path], 1
    )


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("encode", [str, str.encode])
@pytest.mark.parametrize("name", ["labels", "fine_labels"])
def test_a_pickled_batch_is_read_whatever_its_protocol_and_keys(tmp_path, protocol, encode, name):
    content = {encode("data"): PIXELS, encode(name): LABELS, encode("filenames"): [b"a.png"]}
    path = write_pickle(tmp_path / "x", content, protocol)
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


def test_a_fortran_ordered_array_is_read(tmp_path):
    content = {"data": np.asfortranarray(PIXELS), "labels": LABELS}
    images, _ = read_cifar_python(write_pickle(tmp_path / "x", content))
    assert np.array_equal(images.numpy().reshape(4, 3072), PIXELS)


class Malice:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function", [os.system, builtins.eval, builtins.exec])
def test_a_pickle_that_calls_a_function_is_refused_and_runs_nothing(tmp_path, function, protocol):
    mark = tmp_path / "ran"
    script = f"touch {mark}" if function is os.system else f"open({str(mark)!r}, 'w').close()"
    path = write_pickle(tmp_path / "x", {"data": Malice(function, script)}, protocol)
    message = fault(read_cifar_python, path)
    assert str(path) in message
    assert f".{function.__name__}, refused" in message
    assert not mark.exists()


@pytest.mark.parametrize("name", ["numpy.load", "numpy.ndarray.tofile", "torch.load", "sys.exit"])
def test_no_other_name_is_found(tmp_path, name):
    module, _, attribute = name.partition(".")
    content = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
    content += b"\x8c" + bytes([len(attribute)]) + attribute.encode() + b"\x93."
    assert f"{name}, refused" in fault(read_cifar_python, write(tmp_path / "x", content))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (np.array([[None] * 3072], dtype=object), "dtype 'O8'"),
        (PIXELS.astype(np.int16), "dtype 'i2'"),
        (PIXELS[:, :-1], r"shape (4, 3071)"),
        (PIXELS.reshape(-1), r"shape (12288,)"),
        (PIXELS.tolist(), "a list"),
        (5, "a int"),
    ],
)
def test_data_that_is_not_rows_of_bytes_is_refused(tmp_path, data, what):
    path = write_pickle(tmp_path / "x", {"data": data, "labels": LABELS})
    message = fault(read_cifar_python, path)
    assert str(path) in message
    assert what in message
    assert "expected uint8 of shape (n, 3072)" in message


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ([0, 1, 2], "3 labels for 4 images"),
        ([0, 1, 2, 10], "the label 10 at image 3"),
        ([0, -1, 2, 3], "the label -1 at image 1"),
        ([0, 1, 2, 10**5000], "not a list of 64-bit integers"),
        ([0, 1, 2, 3.0], "not a list of 64-bit integers"),
        ([0, 1, 2, True], "not a list of 64-bit integers"),
        ((0, 1, 2, 3), "not a list of 64-bit integers"),
        (np.arange(4), "not a list of 64-bit integers"),
    ],
)
def test_labels_that_are_not_class_numbers_are_refused(tmp_path, labels, what):
    path = write_pickle(tmp_path / "x", {"data": PIXELS, "labels": labels})
    message = fault(read_cifar_python, path)
    assert str(path) in message
    assert what in message


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([1], "a list, not the dict"),
        ({"labels": LABELS}, "no 'data'"),
        ({"data": 1}, "no 'labels'"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path, content, what):
    assert what in fault(read_cifar_python, write_pickle(tmp_path / "x", content))


def test_a_pickle_of_fewer_images_than_official_is_refused(tmp_path):
    path = write_pickle(tmp_path / "x", {"data": PIXELS, "labels": LABELS})
    assert f"{path} has 4 images, expected 10000" in fault(read_cifar_python, path, 10, 10_000)


@pytest.mark.parametrize("keep", [0, 1, 40, 6000, -1])
def test_a_truncated_pickle_is_refused(tmp_path, keep):
    content = pickle.dumps({"data": PIXELS, "labels": LABELS}, protocol=2)
    path = write(tmp_path / "x", content[:keep])
    assert f"{path} is not a CIFAR batch" in fault(read_cifar_python, path)


@pytest.mark.parametrize(
    "state",
    [
        (1, (10**5000, 3072), np.dtype("u1"), False, b"x"),
        (1, (1, 3072), np.dtype("u1"), False, 7),
        (1, (1, 3072), "u1", False, bytes(3072)),
        (1, 5, np.dtype("u1"), False, b"x"),
        (1,),
    ],
)
def test_an_array_of_impossible_state_is_refused_in_one_line(tmp_path, state):
    class Forged:
        def __reduce__(self):
            return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), state

    path = write_pickle(tmp_path / "x", {"data": Forged(), "labels": LABELS})
    assert str(path) in fault(read_cifar_python, path)
