"""The catalog of data sets: their files, contents, and how to download or make them."""

import logging
import os
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hybrid.data.augment import Augmentation
from hybrid.data.dataset import Dataset
from hybrid.data.sampling import uniform
from hybrid.errors import given_by, one_line
from hybrid.files import read_whole
from hybrid.registries import TEXT
from hybrid.solvers.acting import unknown
from hybrid.solvers.named import Named

PIXELS = 3 * 32 * 32
"""Bytes of one of CIFAR's images."""
# means and standard deviations are those of the training halves
_DIGITS_MEAN, _DIGITS_STD = (0.3056,), (0.3761,)
_DIGITS = Path(__file__).with_name("digits.safetensors")
_DIGITS_TEST = 360

_SYNTHETIC_POOL = 2000
_SYNTHETIC_MEAN, _SYNTHETIC_STD = (0.484, 0.502, 0.498), (0.182, 0.178, 0.182)


def reference(name: str) -> str:
    """The module:function of a data set that is not of this package; empty for one that is.

    `name` is the reference itself, or that of an entry point.
    """
    if ":" in name:
        return name
    point = KNOWN.points().get(name)
    return "" if point is None else point.value


def load(name: str, directory: str | Path | None = None, limit: int = 0) -> tuple[Dataset, Dataset]:
    """The training and the test set called `name`, its files fetched first if they are missing.

    CIFAR's training images are augmented by crops after padding of 4 and by flips, the others'
    by nothing. `directory` is as in `fetch`; a positive `limit` keeps as many training
    images. Raises ValueError on an unknown name, a damaged file or a limit out of range,
    FileNotFoundError if the files are not to be had.
    """
    if name == TEXT:
        raise ValueError("data.load has images: read a text with data.load_text(path)")
    fetch(name, directory)
    _, source = CATALOG[name]
    train, test = source.read(_data_folder(directory)) if isinstance(source, Cifar) else source()
    return train.take(limit) if limit else train, test


def fetch(name: str, directory: str | Path | None = None) -> None:
    """Make sure that the files of data set `name` exist; download those that are missing.

    They may be in `directory` itself or in the folder their archive makes there. The default is
    the environment variable HYBRID_DATA, or else `~/.cache/hybrid`. Raises FileNotFoundError,
    naming the missing files, if the network is of no help.
    """
    if name not in NAMES:
        raise ValueError(unknown(name, KNOWN, KNOWN.kind))
    _, source = CATALOG.get(name, ("", None))
    if not isinstance(source, Cifar):
        return
    folder = _data_folder(directory)
    there = source.find_files(folder)
    missing = [f"{source.folder}/{name}" for name in source.names if name not in there]
    try:
        if missing:
            source.download(folder)
    except OSError as error:
        # the text of a network error is no sentence
        why = one_line(error) if error.strerror else type(error).__name__
        raise FileNotFoundError(
            f"{name} lacks {', '.join(missing)} in {folder} and cannot be downloaded ({why}): "
            f"put the files there, or name their folder: {given_by('--data-dir', 'directory=')}"
        ) from error


def _data_folder(directory: str | Path | None) -> Path:
    if directory:
        return Path(directory)
    return Path(os.environ.get("HYBRID_DATA") or "~/.cache/hybrid").expanduser()


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100 in its binary form."""

    classes: int
    folder: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    records: tuple[int, int]
    """Images in each file of the training half and of the test half."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.train + self.test

    def download(self, directory: Path) -> None:
        """Put the files into `folder` of `directory`; none ever has its name half-written.

        Raises OSError if the archive cannot be had, ValueError if it is not the one expected.
        """
        # the archive stays beside its folder: another rank may still be reading it
        name = f"cifar-{self.classes}-binary.tar.gz"
        archive = retrieve(f"https://www.cs.toronto.edu/~kriz/{name}", name, self.md5, directory)
        folder = directory / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar, tempfile.TemporaryDirectory(dir=folder) as scratch:
            for name in self.names:
                content = tar.extractfile(f"{self.folder}/{name}")
                assert content is not None
                part = Path(scratch, name)
                part.write_bytes(content.read())
                os.replace(part, folder / name)

    def find_files(self, directory: Path) -> dict[str, Path]:
        """The files that exist, by name, in `folder` of `directory` or in `directory` itself."""
        folders = directory / self.folder, directory
        there = ({n: each / n for n in self.names if (each / n).is_file()} for each in folders)
        return max(there, key=len)

    def read(self, directory: Path) -> tuple[Dataset, Dataset]:
        """The training and the test half; the files must be there."""
        files = self.find_files(directory)
        halves = zip((self.train, self.test), self.records, strict=True)
        train, test = (self._half([files[name] for name in names], n) for names, n in halves)
        return train, test

    def _half(self, paths: Sequence[Path], records: int) -> Dataset:
        """The images of files one after another, each a label, of CIFAR-100 two, and its pixels.

        Of two labels the second is the fine one. ValueError for a file of another size.
        """
        label_bytes = 1 if self.classes == 10 else 2
        record = label_bytes + PIXELS
        parts = []
        for path in paths:
            size = path.stat().st_size
            if size != record * records:
                raise ValueError(
                    f"{path} has {size} bytes, expected {record * records} ({records} records of "
                    f"{record}): download it again"
                )
            content = bytearray(read_whole(path, size, links=True))
            parts.append(torch.frombuffer(content, dtype=torch.uint8))
        rows = torch.cat(parts).view(-1, record)
        images = rows[:, label_bytes:].reshape(-1, 3, 32, 32)
        labels = rows[:, label_bytes - 1].long()
        augmentation = Augmentation(pad=4, flip=True)
        return Dataset(images, labels, self.classes, self.mean, self.std, augmentation)


def retrieve(url: str, name: str, md5: str, directory: Path) -> Path:
    """The file `name` in `directory`, downloaded unless it is there with this checksum."""
    import pooch  # here, since it brings an HTTP client along

    logger: logging.Logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=name, path=directory))
    except ValueError as error:
        raise ValueError(
            f"{url} does not have the MD5 checksum {md5}: try again, or get the file elsewhere"
        ) from error
    finally:
        logger.setLevel(level)


def digits() -> tuple[Dataset, Dataset]:
    """1,797 handwritten digits, 1x8x8: 1,437 to train on and 360 to test.

    The test half of E. Alpaydin and C. Kaynak's Optical Recognition of Handwritten Digits (UCI
    Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0), 0 to 16 a pixel, as in
    scikit-learn. The split is stratified and always the same, whatever the seed of the run.
    """
    raw = load_file(_DIGITS)
    images = (raw["images"].double() * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    labels = raw["labels"].long()
    n, test = len(labels), torch.zeros(len(labels), dtype=torch.bool)
    # labels first, a random order within each: evenly spaced picks then keep the proportions
    order = (labels + uniform(0, 0, torch.arange(n), 0)).argsort()
    test[order[torch.arange(_DIGITS_TEST) * n // _DIGITS_TEST]] = True

    def part(chosen: Tensor) -> Dataset:
        return Dataset(images[chosen], labels[chosen], 10, _DIGITS_MEAN, _DIGITS_STD)

    return part(~test), part(test)


def synthetic() -> tuple[Dataset, Dataset]:
    """50,000 and 10,000 images in the shape of CIFAR-10: noisy versions of ten patterns.

    For measurements of time only: each half repeats a pool of 2,000 different images.
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(10, 3, 4, 4, generator=generator)
    patterns = F.interpolate(coarse, size=(32, 32), mode="bilinear") * 127 + 64
    train, test = (_make_noisy_images(patterns, n, generator) for n in (50_000, 10_000))
    return train, test


def _make_noisy_images(patterns: Tensor, n: int, generator: torch.Generator) -> Dataset:
    labels = torch.arange(_SYNTHETIC_POOL) % len(patterns)
    pool = patterns[labels]
    noise = torch.rand(pool.shape, generator=generator) * 128 - 64
    images, copies = (pool + noise).to(torch.uint8), n // _SYNTHETIC_POOL
    parts = images.repeat(copies, 1, 1, 1), labels.repeat(copies)
    return Dataset(*parts, len(patterns), _SYNTHETIC_MEAN, _SYNTHETIC_STD)


CATALOG: dict[str, tuple[str, Cifar | Callable[[], tuple[Dataset, Dataset]]]] = {
    "digits": ("1,797 handwritten digits of 8 x 8 pixels, which come with the package", digits),
    "cifar10": (
        "60,000 photographs of 32 x 32 pixels, ten classes",
        Cifar(
            10,
            "cifar-10-batches-bin",
            "c32a1d4ab5d03f1284b67883e8d87530",
            train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            test=("test_batch.bin",),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            records=(10_000, 10_000),
        ),
    ),
    "cifar100": (
        "60,000 photographs of 32 x 32 pixels, a hundred classes",
        Cifar(
            100,
            "cifar-100-binary",
            "03b5dce01913d631647c71ecec9e9cb8",
            train=("train.bin",),
            test=("test.bin",),
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            records=(50_000, 10_000),
        ),
    ),
    "synthetic": (
        "generated images of 32 x 32 pixels, ten classes, for measuring speed",
        synthetic,
    ),
}
"""Name -> description, and its files or the function that makes it."""

NAMES = {name: description for name, (description, _) in CATALOG.items()} | {
    TEXT: "the bytes of a text file or folder (--data-dir); a twentieth is held out for testing"
}
"""Name -> description."""

KNOWN = Named("data set", NAMES)
"""Those of other packages are functions that take nothing and give (training, test) data."""
