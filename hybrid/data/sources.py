"""The catalog of data sets: where their files are, what they hold, how to get them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybrid.data.augment import Augmentation
from hybrid.data.dataset import Dataset
from hybrid.data.files.download import Download
from hybrid.data.files.formats import check_labels, read_cifar_binary, read_idx
from hybrid.data.files.pickled import read_cifar_python
from hybrid.data.generated import digits, synthetic
from hybrid.errors import one_line
from hybrid.solvers.checks import unknown
from hybrid.solvers.named import Added

GROUP = "hybrid.data"
"""The entry points by which another package adds data sets: NAME = "its.module:function", which
takes nothing and gives (training, test) data."""


def reference(name: str) -> str:
    """The module:function of a data set that is not of this package; empty for one that is.

    `name` is the reference itself, or that of an entry point.
    """
    if ":" in name:
        return name
    point = _added().points().get(name)
    return "" if point is None else point.value


def _added() -> Added:
    return Added("data set", GROUP, NAMES)


def load(name: str, directory: str | Path | None = None, limit: int = 0) -> tuple[Dataset, Dataset]:
    """The training and the test set called `name`, its files fetched first if they are missing.

    CIFAR's training images are augmented by crops after padding of 4 and by flips, the others'
    by nothing. `directory` is as in `fetch`; a positive `limit` keeps the first so many training
    images. Raises ValueError on an unknown name, a damaged file or a limit out of range,
    FileNotFoundError if the files are not to be had.
    """
    fetch(name, directory)
    _, source = CATALOG[name]
    train, test = source.read(_data_folder(directory)) if isinstance(source, Source) else source()
    return train.take(limit) if limit else train, test


def fetch(name: str, directory: str | Path | None = None) -> None:
    """Make sure that the files of data set `name` exist; download those that are missing.

    They may be in `directory` itself or in the folder their archive makes there. The default is
    the environment variable HYBRID_DATA, or else `~/.cache/hybrid`. Raises FileNotFoundError,
    naming the missing files, if the network is of no help.
    """
    if name not in NAMES:
        raise ValueError(unknown(name, [*NAMES, *_added().points()], "data set"))
    _, source = CATALOG[name]
    if not isinstance(source, Source):
        return
    folder = _data_folder(directory)
    *_, lacking = source.find_files(folder)
    try:
        for download in source.downloads if lacking else ():
            download.into(folder)
    except OSError as error:
        # the text of a network error is no sentence
        why = one_line(error) if error.strerror else type(error).__name__
        raise FileNotFoundError(
            f"{name} lacks {', '.join(lacking)} in {folder} and cannot be downloaded ({why}): "
            f"put the files there, or name their folder with --data-dir"
        ) from error


def _data_folder(directory: str | Path | None) -> Path:
    if directory:
        return Path(directory)
    return Path(os.environ.get("HYBRID_DATA") or "~/.cache/hybrid").expanduser()


@dataclass(frozen=True)
class Layout:
    """One of the forms in which the files of a data set exist."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[..., tuple[Tensor, Tensor]]
    """(the files of one half, `records`: the images in each of them) -> images and labels."""
    suffixes: tuple[str, ...] = ("",)

    def find(self, directory: Path) -> dict[str, Path]:
        """The files that exist, by name, in `folder` of `directory` or in `directory` itself."""
        places = [
            {
                name: path
                for name in self.train + self.test
                for suffix in reversed(self.suffixes)
                if (path := place / (name + suffix)).is_file()
            }
            for place in (directory / self.folder, directory)
        ]
        return max(places, key=len)


@dataclass(frozen=True)
class Source:
    """A data set made of files."""

    layouts: tuple[Layout, ...]
    downloads: tuple[Download, ...]
    records: tuple[int, int]
    """Images in each file of the training half and of the test half."""
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation = field(default_factory=Augmentation)

    def find_files(self, directory: Path) -> tuple[Layout, dict[str, Path], list[str]]:
        """The most complete layout, its files that are there, by name, and those it lacks."""
        found = [(layout, layout.find(directory)) for layout in self.layouts]
        best, files = max(found, key=lambda pair: len(pair[1]))
        lacking = [f"{best.folder}/{x}" for x in best.train + best.test if x not in files]
        return best, files, lacking

    def read(self, directory: Path) -> tuple[Dataset, Dataset]:
        """The training and the test half; the files must be there."""
        layout, files, _ = self.find_files(directory)

        def half(names: tuple[str, ...], records: int) -> Dataset:
            images, labels = layout.read([files[name] for name in names], records=records)
            return Dataset(images, labels, self.classes, self.mean, self.std, self.augmentation)

        return half(layout.train, self.records[0]), half(layout.test, self.records[1])


def _read_python(paths: Sequence[Path], records: int, classes: int) -> tuple[Tensor, Tensor]:
    images, labels = zip(*(read_cifar_python(x, classes, records) for x in paths), strict=True)
    return torch.cat(images), torch.cat(labels)


def _read_mnist(paths: Sequence[Path], records: int) -> tuple[Tensor, Tensor]:
    images, labels = read_idx(paths[0], (records, 28, 28)), read_idx(paths[1], (records,))
    check_labels(paths[1], labels.tolist(), 10)
    return images.unsqueeze(1), labels.long()


def _mnist(url: str, folder: str, mean: float, std: float, *md5: str) -> Source:
    train = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
    test = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    files = zip(train + test, md5, strict=True)
    layout = Layout(folder, train, test, _read_mnist, ("", ".gz"))
    downloads = tuple(Download(f"{url}{name}.gz", checksum, folder) for name, checksum in files)
    return Source((layout,), downloads, (60_000, 10_000), 10, (mean,), (std,))


def _cifar(classes: int, md5: str, mean: tuple[float, ...], std: tuple[float, ...]) -> Source:
    """CIFAR in its binary form, which is downloaded, or in that of Python."""
    train: tuple[str, ...]
    if classes == 10:
        folders = "cifar-10-batches-bin", "cifar-10-batches-py"
        train, test = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
    else:
        folders = "cifar-100-binary", "cifar-100-python"
        train, test = ("train",), "test"
    read_binary = partial(read_cifar_binary, label_bytes=1 if classes == 10 else 2)
    binary = tuple(f"{name}.bin" for name in train), (f"{test}.bin",)
    url = f"https://www.cs.toronto.edu/~kriz/cifar-{classes}-binary.tar.gz"
    return Source(
        (
            Layout(folders[0], *binary, read_binary),
            Layout(folders[1], train, (test,), partial(_read_python, classes=classes)),
        ),
        (Download(url, md5, folders[0], sum(binary, ())),),
        (50_000 // len(train), 10_000),
        classes,
        mean,
        std,
        Augmentation(4, True),
    )


CATALOG: dict[str, tuple[str, Source | Callable[[], tuple[Dataset, Dataset]]]] = {
    "digits": (
        "1,797 handwritten digits of 8 x 8 pixels, which come with the package",
        digits,
    ),
    "mnist": (
        "70,000 handwritten digits of 28 x 28 pixels",
        _mnist(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "mnist",
            0.1307,
            0.3081,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": (
        "70,000 pictures of clothes, 28 x 28 pixels, ten classes",
        _mnist(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "fashion-mnist",
            0.2860,
            0.3530,
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "cifar10": (
        "60,000 photographs of 32 x 32 pixels, ten classes",
        _cifar(
            10,
            "c32a1d4ab5d03f1284b67883e8d87530",
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
        ),
    ),
    "cifar100": (
        "60,000 photographs of 32 x 32 pixels, a hundred classes",
        _cifar(
            100,
            "03b5dce01913d631647c71ecec9e9cb8",
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
        ),
    ),
    "synthetic": (
        "made-up images of 32 x 32 pixels, ten classes, for measuring speed",
        synthetic,
    ),
}
"""Name -> description, and its files or what makes it; missing files are downloaded."""

NAMES = {name: description for name, (description, _) in CATALOG.items()}
"""Name -> description."""
