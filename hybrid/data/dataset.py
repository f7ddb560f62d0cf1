"""What training asks of any data set, and images in memory that answer it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybrid.data.augment import Augmentation
from hybrid.data.sampling import epoch_order
from hybrid.solvers.layers.bundle import Bundle
from hybrid.solvers.metrics import LEFT_OUT, Metric
from hybrid.solvers.state import State
from hybrid.solvers.windows import on_its_way

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_ON_GPU = 1 << 30
"""The most bytes of images that a GPU holds from the start of a training."""
VALIDATION = 1 << 30
"""Of the permutation that is drawn, one that no epoch takes."""


class Order(Protocol):
    """The order of the samples in every epoch."""

    def of_epoch(self, seed: int, epoch: int) -> Tensor:
        """Samples 0 .. N - 1, int64 (M,), some perhaps several times: a pure function."""
        ...


def numbered(samples: Tensor, count: int, times: Counter[int]) -> Tensor:
    """Numbers (M,) of samples (M,) of `count`: the v-th time, from 0, sample i is i + v count.

    `times` says how often each sample came before, and counts these.
    """
    numbers = []
    for sample in samples.tolist():
        numbers.append(sample + count * times[sample])
        times[sample] += 1
    return torch.tensor(numbers, dtype=torch.int64)


class Data(ABC):
    """Samples by number: a pure function of (seed, epoch, number) on every rank.

    Number n is sample n mod N of the N there are. Where a sampler takes a sample several times in
    an epoch it asks for n, n + N, n + 2 N, ...: what is drawn for the sample differs each time.
    """

    inputs: Bundle | None = None
    """The structure of the network's inputs, if they are not one tensor."""
    answers: Bundle | None = None
    """The structure of the targets, if they are not one tensor."""
    joint: bool = False
    """Whether a replica's share of a mini-batch is read at once and then divided."""
    augmented: bool = False
    """Whether augmentation makes other samples in every epoch."""
    streamed: bool = False
    """Whether samples can only be read in their order."""
    batch_size: int | None = None
    """Samples of a mini-batch, on all replicas, where a DataLoader says it."""
    others: Sequence[tuple[Any, Any]] = ()
    """More like `sample`, of other lengths."""
    varies: bool = False
    """Whether samples are known to have several lengths."""
    order: Order | None = None
    """The order of every epoch, where a DataLoader's sampler decides it."""
    metrics: Mapping[str, Metric] | None = None
    """The metrics by default; None: the accuracy, of classes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, ids: Tensor, seed: int, epoch: int, augment: bool = True) -> Tensor:
        """The network's inputs for the samples of numbers `ids`, int64 (B,): (B, ...)."""

    @abstractmethod
    def targets(self, ids: Tensor, seed: int = 0, epoch: int = 0) -> Tensor:
        """The targets of those samples: (B, ...)."""

    @abstractmethod
    def sample(self, count: int) -> tuple[Any, Any]:
        """Inputs and targets like those of `count` samples, as the network and the loss get them.

        They serve to learn shapes, so their values may be made up.
        """

    def expect_classes(self, count: int) -> None:  # noqa: B027
        """Expect targets to be classes below `count`, or LEFT_OUT; 0: expect nothing.

        Raises ValueError for any other target; `targets` raises it where they are not known yet.
        """

    def leaves_out(self, target: int) -> bool:
        """Whether some target may be `target`, which the loss leaves out."""
        return True

    def expect(self, batches: list[Tensor], seed: int, epoch: int) -> None:  # noqa: B027
        """Announce the next mini-batches, in their order."""

    def subset(self, ids: Tensor) -> Self:
        """The samples `ids`, int64 (M,); ValueError where they cannot be had apart."""
        raise ValueError(
            f"no samples of a {type(self).__name__} can be held out: give a validation set"
        )

    def take(self, limit: int) -> Self:
        """The first `limit` samples; ValueError unless 1 <= limit <= N."""
        if not 1 <= limit <= len(self):
            raise ValueError(
                f"limit is {limit} but the data set has {len(self)} samples: "
                f"choose a limit from 1 to {len(self)}"
            )
        return self.subset(torch.arange(limit))

    def only(self, images: bool, labels: bool) -> Data:
        """The data set for a rank that asks for inputs, for targets, for both or for neither."""
        return self

    def test_order(self) -> Tensor:
        """The numbers of the samples of a test, int64 (N,): all, or those that `order` takes."""
        if self.order is None:
            return torch.arange(len(self))
        return numbered(self.order.of_epoch(0, 0), len(self), Counter())

    def keep(self, samples: int) -> None:  # noqa: B027
        """Set how many recent samples must stay cached."""

    def fingerprint(self) -> str:
        """A hash of the samples that ranks compare; empty: they compare `some`."""
        return ""

    def some(self, one: int | None = None) -> list[Any]:
        """Read a few samples, or one of them, anew for a comparison between ranks."""
        return []

    def state(self) -> State:
        """Return the state of the reading for a checkpoint; it may be empty."""
        return State()

    def load_state(self, state: State) -> None:  # noqa: B027
        """Continue reading from a state."""

    def close(self) -> None:  # noqa: B027
        """Close files and workers that read samples."""


class Sets(NamedTuple):
    """The data of a run."""

    train: Data
    test: Data | None
    validation: Data | None = None

    def only(self, images: bool, labels: bool) -> Sets:
        """For a rank that asks for inputs, for targets, for both or for neither."""
        train, *others = self
        rest = (None if each is None else each.only(images, labels) for each in others)
        return Sets(train.only(images, labels), *rest)


def hold_out(train: Data, share: float, seed: int) -> tuple[Data, Data]:
    """The training set without a share of it, and this share, a function of `seed` alone.

    ValueError for a stream, for a DataLoader whose sampler decides the order, and for a share that
    leaves one of the two without samples.
    """
    asked = f"the validation share is {share:g}"
    if train.streamed or train.order is not None:
        raise ValueError(
            f"{asked}, but a stream, or a DataLoader's sampler, decides the order of all samples: "
            "give a validation set, or a DataLoader with shuffle=True"
        )
    count = len(train)
    held = round(share * count) if 0 < share < 1 else 0
    if not 0 < held < count:
        least = 1 / count
        raise ValueError(
            f"{asked} of {count} training samples, which leaves {held} to validate on and "
            f"{count - held} to train on: choose a share from {least:.2g} to {1 - least:.2g}"
        )
    order = epoch_order(seed, 0, count, VALIDATION)
    training, validation = (train.subset(ids.sort().values) for ids in (order[held:], order[:held]))
    train.close()  # its workers have read a sample
    return training, validation


def digest(value: Any) -> str:
    """A hash of the numbers that a value holds, with their types and shapes."""
    total = blake2b(digest_size=16)
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            total.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            leaf = np.asarray(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        total.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return total.hexdigest()


def spread(count: int, most: int = 8) -> Tensor:
    """Evenly spaced numbers below `count`, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


@dataclass(frozen=True, eq=False)
class Dataset(Data):
    """Labeled images; raises ValueError for a label of no class."""

    images: Tensor
    """uint8 `(N, C, H, W)`."""
    labels: Tensor
    """int64 `(N,)`, each in 0..classes-1."""
    classes: int
    mean: tuple[float, ...]
    """Mean of each channel, pixels scaled to [0, 1]."""
    std: tuple[float, ...]
    """Standard deviation of each channel, pixels scaled to [0, 1]."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    """What `batch` does to images before it normalizes them."""
    digest: str = ""
    """Of images and labels, where some of them are left out."""

    def __post_init__(self) -> None:
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.classes:
            raise ValueError(
                f"labels lie in {low}..{high}, outside 0..{self.classes - 1}: get the files again"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(C, H, W)` of one image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def batch(self, ids: Tensor, seed: int, epoch: int, augment: bool = True) -> Tensor:
        """The images of numbers `ids`, int64 `(B,)`, as a float32 channels_last `(B, C, H, W)`.

        Each is `(x / 255 - mean) / std`, augmented before if `augment`, and a pure function of
        `(seed, epoch, id)`: bitwise the same in any batch.
        """
        ids = on_its_way(ids, self.images.device)
        images = self.images[ids % len(self)]
        if augment:
            images = self.augmentation(images, ids, seed, epoch)
        scale, shift = self._scale_and_shift
        # not addcmul: a fused multiply-add may round otherwise in the tail of a vector loop, and
        # a sample would then depend on its place in the batch
        normalized = images.float().mul_(scale).add_(shift)
        return normalized.contiguous(memory_format=torch.channels_last)

    def targets(self, ids: Tensor, seed: int = 0, epoch: int = 0) -> Tensor:
        return self.labels[on_its_way(ids, self.labels.device) % len(self)]

    @cached_property
    def _scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """1 / (255 std) and -mean / std, each `(1, C, 1, 1)`."""
        mean, std = (torch.tensor(x, dtype=torch.float64) for x in (self.mean, self.std))
        pair = ((1 / (255 * std)).float(), (-mean / std).float())
        scale, shift = (x.view(1, -1, 1, 1).to(self.images.device) for x in pair)
        return scale, shift

    def expect_classes(self, count: int) -> None:
        if count:
            check_classes(self.labels, count)

    def leaves_out(self, target: int) -> bool:
        return 0 <= target < self.classes

    @property
    def augmented(self) -> bool:  # type: ignore[override]
        return self.augmentation != Augmentation()

    def sample(self, count: int) -> tuple[Any, Any]:
        images = torch.zeros(count, *self.shape).to(memory_format=torch.channels_last)
        return images, torch.zeros(count, dtype=torch.int64)

    def fingerprint(self) -> str:
        return self.digest or digest((self.images[spread(len(self), 64)], self.labels))

    def subset(self, ids: Tensor) -> Self:
        return replace(self, images=self.images[ids], labels=self.labels[ids], digest="")

    def on(self, device: torch.device, images: bool, labels: bool) -> Dataset:
        """Hold on a GPU what its rank asks for, if that is little; it is augmented there."""
        if device.type == "cpu" or images * self.images.nbytes > MOST_ON_GPU:
            return self
        return replace(
            self,
            digest=self.fingerprint(),
            images=self.images.to(device) if images else self.images,
            labels=self.labels.to(device) if labels else self.labels,
        )

    def only(self, images: bool, labels: bool) -> Dataset:
        """Copy the data; parts that are not kept read as zeros that take no memory.

        For a rank that holds neither the first nor the last block: N and shapes stay.
        """
        return replace(
            self,
            digest=self.fingerprint(),
            images=self.images if images else self.images.new_zeros(()).expand_as(self.images),
            labels=self.labels if labels else self.labels.new_zeros(()).expand_as(self.labels),
        )


def check_classes(targets: Tensor, count: int, ids: Tensor | None = None) -> None:
    """ValueError for a target (N, ...) that is no class below `count`; its sample is ids[i], or i.

    LEFT_OUT is none, and allowed.
    """
    wrong = ((targets < 0) & (targets != LEFT_OUT)) | (targets >= count)
    if not wrong.any():
        return
    row = int(wrong.flatten(1).any(1).nonzero()[0] if wrong.dim() > 1 else wrong.nonzero()[0])
    raise ValueError(
        f"sample {row if ids is None else int(ids[row])} of the data set has the target "
        f"{int(targets[row][wrong[row]].flatten()[0])}, but the network's output has {count} "
        f"classes, 0 to {count - 1}: correct it, or give the network more outputs"
    )
