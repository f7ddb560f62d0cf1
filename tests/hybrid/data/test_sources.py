"""The catalog finds, fetches and reads every data set it names."""

import dataclasses
import gzip
import io
import pickle
import struct
import sys
import tarfile
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pooch
import pytest
import requests
import torch
from answers import refusal
from torch.utils.data import TensorDataset

from hybrid.data import Augmentation, fetch, load, sources
from hybrid.settings.config import DataSettings
from hybrid.solvers import named
from hybrid.training import build

CIFAR10_FILES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
MNIST_FILES = [
    f"{half}-{what}-ubyte" for half in ("train", "t10k") for what in ("images-idx3", "labels-idx1")
]


def of_files():
    found = {name: source for name, (_, source) in sources.CATALOG.items()}
    return {name: source for name, source in found.items() if isinstance(source, sources.Source)}


@pytest.fixture(autouse=True)
def small_and_offline(monkeypatch):
    """Files of four images count as complete, and there is no network."""
    for name, source in of_files().items():
        small = sources.CATALOG[name][0], dataclasses.replace(source, records=(4, 4))
        monkeypatch.setitem(sources.CATALOG, name, small)

    def offline(*_args, **_settings):
        raise requests.ConnectionError("no\nnetwork")

    monkeypatch.setattr(pooch, "retrieve", offline)


def records(start, label_bytes=1):
    labels = [bytes(label_bytes - 1) + bytes([start + i]) for i in range(4)]
    return b"".join(label + bytes([start]) * 3072 for label in labels)


def batch(start, key):
    data = np.full((4, 3072), start, dtype=np.uint8)
    return pickle.dumps({b"data": data, key: [start + i for i in range(4)]}, protocol=2)


def idx(name, start):
    shape = (4, 28, 28) if "images" in name else (4,)
    header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    return header + bytes([start]) * int(np.prod(shape))


CIFAR10_BINARY = {f"{name}.bin": records(i) for i, name in enumerate(CIFAR10_FILES)}
CIFAR10_PYTHON = {name: batch(i, b"labels") for i, name in enumerate(CIFAR10_FILES)}
CIFAR100_BINARY = {"train.bin": records(40, 2), "test.bin": records(90, 2)}
CIFAR100_PYTHON = {"train": batch(40, b"fine_labels"), "test": batch(90, b"fine_labels")}
MNIST = {name: idx(name, i) for i, name in enumerate(MNIST_FILES)}
MNIST_ZIPPED = {f"{name}.gz": gzip.compress(content) for name, content in MNIST.items()}


def put(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


CIFAR = Augmentation(pad=4, flip=True)
CIFAR10 = [start + i for start in range(5) for i in range(4)], [5, 6, 7, 8], (3, 32, 32), 10, CIFAR
CIFAR100 = [40, 41, 42, 43], [90, 91, 92, 93], (3, 32, 32), 100, CIFAR
DIGITS = [1] * 4, [3] * 4, (1, 28, 28), 10, Augmentation()


@pytest.mark.parametrize(
    ("name", "folder", "contents", "expected"),
    [
        *(("cifar10", f, CIFAR10_BINARY, CIFAR10) for f in ("cifar-10-batches-bin", "")),
        *(("cifar10", f, CIFAR10_PYTHON, CIFAR10) for f in ("cifar-10-batches-py", "")),
        ("cifar100", "cifar-100-binary", CIFAR100_BINARY, CIFAR100),
        ("cifar100", "cifar-100-python", CIFAR100_PYTHON, CIFAR100),
        *((name, name, MNIST, DIGITS) for name in ("mnist", "fashion-mnist")),
        *((name, "", MNIST_ZIPPED, DIGITS) for name in ("mnist", "fashion-mnist")),
    ],
)
def test_a_set_is_found_in_every_layout_and_in_the_folder_itself(
    tmp_path, name, folder, contents, expected
):
    put(tmp_path / folder, contents)
    train, test = load(name, tmp_path)
    found = train.labels.tolist(), test.labels.tolist(), train.shape, train.classes
    assert (*found, train.augmentation) == expected
    images = train.images[:, 0, 0, 0].tolist()
    assert images == [i for i in range(5) for _ in range(4)] or name != "cifar10"
    assert int(test.images.max()) == 2 or train.shape[0] == 3


def test_the_folder_may_be_a_text(tmp_path, monkeypatch):
    put(tmp_path / "data" / "mnist", MNIST)
    monkeypatch.chdir(tmp_path)
    train, test = load("mnist", "data")
    assert (train.labels.tolist(), test.labels.tolist()) == DIGITS[:2]
    fetch("mnist", str(tmp_path / "data"))
    with pytest.raises(FileNotFoundError, match="in elsewhere and cannot be downloaded"):
        fetch("mnist", "elsewhere")


def test_a_complete_layout_is_preferred_to_an_incomplete_one(tmp_path):
    put(tmp_path / "cifar-10-batches-bin", CIFAR10_BINARY)
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").unlink()
    put(tmp_path / "cifar-10-batches-py", CIFAR10_PYTHON)
    assert len(load("cifar10", tmp_path)[0]) == 20


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "cifar-10-batches-bin/data_batch_4.bin"),
        ("mnist", "mnist/t10k-labels-idx1-ubyte"),
    ],
)
def test_without_a_network_the_missing_files_are_named_in_one_line(tmp_path, name, file):
    with pytest.raises(FileNotFoundError, match=r"^.+$") as caught:
        load(name, tmp_path)
    message = str(caught.value)
    for part in (name, file, str(tmp_path), "ConnectionError", "--data-dir"):
        assert part in message
    assert "\n" not in message


def test_a_file_of_another_shape_is_named(tmp_path):
    put(tmp_path, {name: idx("labels", 1) for name in MNIST_FILES})
    with pytest.raises(ValueError, match=r"train-images.* shape \(4,\), expected \(4, 28, 28\)"):
        load("mnist", tmp_path)


def test_only_what_the_fullest_layout_lacks_is_named(tmp_path):
    put(tmp_path / "cifar-10-batches-py", CIFAR10_PYTHON)
    (tmp_path / "cifar-10-batches-py/data_batch_2").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks cifar-10-batches-py/data_batch_2 in"):
        load("cifar10", tmp_path)


def test_a_failing_download_is_quick_and_logs_nothing(tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.undo()

    def offline(*_args, **_settings):
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "get", offline)
    with pytest.raises(FileNotFoundError):
        fetch("mnist", tmp_path)
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


def test_a_download_is_extracted_and_read(tmp_path, monkeypatch):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in CIFAR10_BINARY.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))

    def retrieve(url, known_hash, fname, path):
        assert url == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
        assert known_hash == "md5:c32a1d4ab5d03f1284b67883e8d87530"
        (Path(path) / fname).write_bytes(packed.getvalue())
        return str(Path(path) / fname)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    train, _ = load("cifar10", tmp_path)
    assert len(train) == 20
    assert (tmp_path / "cifar-10-batches-bin/test_batch.bin").is_file()


def test_a_limit_keeps_the_first_images_of_the_directory_in_the_environment(tmp_path, monkeypatch):
    put(tmp_path, CIFAR10_BINARY)
    monkeypatch.setenv("HYBRID_DATA", str(tmp_path))
    train, test = load("cifar10", limit=6)
    assert train.labels.tolist() == [0, 1, 2, 3, 1, 2]
    assert len(test) == 4


@pytest.mark.parametrize("call", [load, fetch])
def test_an_unknown_name_gets_the_nearest(call):
    with pytest.raises(ValueError, match=r"'cifar11'; did you mean 'cifar10'\?"):
        call("cifar11")


def test_official_sizes_are_expected(monkeypatch):
    monkeypatch.undo()
    sizes = {name: source.records for name, source in of_files().items()}
    assert (sizes["cifar10"], sizes["cifar100"]) == ((10_000, 10_000), (50_000, 10_000))
    assert sizes["mnist"] == sizes["fashion-mnist"] == (60_000, 10_000)


def test_generated_sets_need_no_directory():
    fetch("digits")
    assert torch.equal(load("digits", limit=5)[0].images, load("digits")[0].images[:5])


def test_another_package_adds_a_data_set_by_an_entry_point(monkeypatch):
    points = EntryPoints([EntryPoint("noise", "theirs:noise", sources.GROUP)])
    monkeypatch.setattr(named, "entry_points", lambda group: points.select(group=group))
    pair = TensorDataset(torch.zeros(2, 3), torch.ones(2).long())
    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(noise=lambda: (pair, pair)))
    train, test = build.load_data_sets(DataSettings(name="noise"))
    assert (len(train), len(test)) == (2, 2)
    assert train.sample(1)[1].tolist() == [1]
    assert "did you mean 'noise'?" in refusal(load, "noize")
    assert "data.limit is 1, which has an effect only where data.name is a data set of" in refusal(
        build.load_data_sets, DataSettings(name="noise", limit=1)
    )
    points = EntryPoints([EntryPoint("digits", "theirs:noise", sources.GROUP)])
    assert len(build.load_data_sets(DataSettings(name="digits"))[1]) > 2
