"""The catalog finds, fetches and reads every data set that it names, or names the fault."""

import dataclasses
import io
import sys
import tarfile
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

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

CIFARS = [name for name, (_, kind) in sources.CATALOG.items() if isinstance(kind, sources.Cifar)]
CIFAR10_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]


@pytest.fixture(autouse=True)
def small_and_offline(monkeypatch):
    """Files of four images count as complete, and there is no network."""
    for name in CIFARS:
        description, source = sources.CATALOG[name]
        small = description, dataclasses.replace(source, records=(4, 4))
        monkeypatch.setitem(sources.CATALOG, name, small)

    def offline(*_args, **_settings):
        raise requests.ConnectionError("no\nnetwork")

    monkeypatch.setattr(pooch, "retrieve", offline)


def records(start, label_bytes=1):
    labels = [bytes(label_bytes - 1) + bytes([start + i]) for i in range(4)]
    return b"".join(label + bytes([start]) * 3072 for label in labels)


CIFAR10 = {name: records(i) for i, name in enumerate(CIFAR10_FILES)}
CIFAR100 = {"train.bin": records(40, 2), "test.bin": records(90, 2)}


def put(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def packed(folder, contents):
    """An archive of these files."""
    path = folder / "x.tar.gz"
    with tarfile.open(path, mode="w:gz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", ""])
def test_cifar10_is_found_in_its_folder_and_in_the_directory_itself(tmp_path, folder):
    put(tmp_path / folder, CIFAR10)
    train, test = load("cifar10", tmp_path)
    assert train.labels.tolist() == [start + i for start in range(5) for i in range(4)]
    assert test.labels.tolist() == [5, 6, 7, 8]
    assert train.images[:, 0, 0, 0].tolist() == [i for i in range(5) for _ in range(4)]
    assert (train.shape, train.classes) == ((3, 32, 32), 10)
    assert train.augmentation == Augmentation(pad=4, flip=True)


def test_of_cifar100_the_fine_labels_are_taken(tmp_path):
    put(tmp_path / "cifar-100-binary", CIFAR100)
    train, test = load("cifar100", tmp_path)
    assert train.labels.tolist() == [40, 41, 42, 43]
    assert test.labels.tolist() == [90, 91, 92, 93]
    assert train.classes == 100


def test_without_a_network_the_missing_files_are_named_in_one_line(tmp_path):
    put(tmp_path / "cifar-10-batches-bin", CIFAR10)
    (tmp_path / "cifar-10-batches-bin/data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"^.+$") as caught:
        load("cifar10", tmp_path)
    message = str(caught.value)
    assert message.startswith(f"cifar10 lacks cifar-10-batches-bin/data_batch_4.bin in {tmp_path}")
    for part in ("ConnectionError", "directory="):
        assert part in message
    assert "\n" not in message


def test_a_failing_download_is_quick_and_logs_nothing(tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.undo()

    def offline(*_args, **_settings):
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "get", offline)
    with pytest.raises(FileNotFoundError):
        fetch("cifar100", tmp_path)
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


def test_a_download_is_extracted_and_read(tmp_path, monkeypatch):
    archive = packed(tmp_path, {f"cifar-10-batches-bin/{k}": v for k, v in CIFAR10.items()})

    def retrieve(url, known_hash, fname, path):
        assert url == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
        assert known_hash == "md5:c32a1d4ab5d03f1284b67883e8d87530"
        assert (fname, Path(path)) == ("cifar-10-binary.tar.gz", tmp_path)
        return str(archive)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    train, _ = load("cifar10", tmp_path)
    assert len(train) == 20
    assert (tmp_path / "cifar-10-batches-bin/test_batch.bin").is_file()


def test_what_a_server_sends_in_place_of_the_file_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.undo()

    def other(_self, _url, dest, *_args):
        Path(dest).write_bytes(b"not it")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", other)
    with pytest.raises(ValueError, match="does not have the MD5 checksum"):
        fetch("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", CIFAR10["test_batch.bin"][:-1]])
def test_a_file_that_is_not_of_the_format_is_refused_by_name(tmp_path, content):
    put(tmp_path, CIFAR10 | {"data_batch_2.bin": content})
    said = f"{tmp_path / 'data_batch_2.bin'} has {len(content)} bytes, expected 12292 (4 records of"
    assert refusal(load, "cifar10", tmp_path).startswith(said)


def test_another_package_adds_a_data_set_by_an_entry_point(monkeypatch):
    points = EntryPoints([EntryPoint("data.noise", "theirs:noise", "hybrid")])
    monkeypatch.setattr(named, "entry_points", lambda: points)
    pair = TensorDataset(torch.zeros(2, 3), torch.ones(2).long())
    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(noise=lambda: (pair, pair)))
    train, test = build.load_data_sets(DataSettings(name="noise"))
    assert (len(train), len(test)) == (2, 2)
    assert train.sample(1)[1].tolist() == [1]
    assert "did you mean 'noise'?" in refusal(load, "noize")
    assert (
        "data.limit is 1, which has an effect only where data.name is a built-in data set"
        in refusal(build.load_data_sets, DataSettings(name="noise", limit=1))
    )
