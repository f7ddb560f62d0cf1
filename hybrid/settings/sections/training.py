"""[model], [data] and [train]: what is trained, on what, for how long and in which numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from hybrid.registries import LONGEST_TEXT, TEXT
from hybrid.settings.sections.base import (
    MANY,
    TESTED,
    TRAIN,
    TRAIN_OR_PLAN,
    Section,
    is_reference,
)
from hybrid.solvers.acting import REPLICAS, Acts, Needs

OWN_MODEL = Acts(
    "model.name is a network of this package", lambda run: not is_reference(run.model.name)
)
OWN_DATA = Acts("data.name is a data set of this package", lambda run: not run.own_data)
IMAGES = Acts(
    "data.name is a data set of images of this package",
    lambda run: not run.own_data and run.data.name != TEXT,
)
OF_TEXT = Acts(f"data.name is {TEXT}", lambda run: run.data.name == TEXT)
READS = Acts(
    "data.name is your own function, since this package's data are in memory",
    lambda run: run.own_data,
)


class ModelSettings(Section):
    """[model] the network."""

    name: str = "resnet8"
    """resnet20 (6n+2), wrn-16-4, revnet20, resnet18; of text gpt-4-128 (layers, width); your own:
    module:function."""
    survival: Annotated[float, OWN_MODEL] = Field(default=1.0, gt=0, le=1)
    """Probability that a pass in training takes the last residual unit (stochastic depth)."""
    weights: Annotated[str, TRAIN_OR_PLAN] = ""
    """Safetensors file, or folder of such, of which each rank reads its own block's weights."""


class DataSettings(Section):
    """[data] the samples."""

    name: str = "digits"
    """digits, cifar10, cifar100, synthetic, text; your own: module:function."""
    dir: Annotated[str, OWN_DATA] = ""
    """Folder of the data files; empty: $HYBRID_DATA, else ~/.cache/hybrid. Of text: a
    file or a folder, which has to be given."""
    limit: Annotated[int, OWN_DATA] = Field(default=0, ge=0, le=MANY)
    """Train on the first so many samples; 0: all."""
    length: Annotated[int, OF_TEXT] = Field(default=256, ge=2, le=LONGEST_TEXT)
    """Bytes of a sample of text, of each of which the network predicts the next."""
    augment: Annotated[bool, IMAGES] = True
    """Augment as usual for the data set (CIFAR: crop after padding by 4, flip; others: nothing)."""
    workers: Annotated[int, READS] = Field(default=0, ge=0, le=1024)
    """Processes that read samples of your own data ahead; 0: none."""


ALIKE = Needs(
    "replicas have the same weights after every step (sync.name is all-reduce)",
    lambda run: run.replicas == 1 or run.sync.exact,
    "leave it out, or choose sync.name=all-reduce",
)
ALIKE_IN_FLOAT16 = Needs(
    "in float16 replicas have the same weights after every step (sync.name is all-reduce)",
    lambda run: run.train.precision != "float16" or run.replicas == 1 or run.sync.exact,
    "choose bfloat16, or sync.name=all-reduce",
)
ADDS_ALIKE = Needs(
    "in float16 no waits are filled, since its scale may change between the passes of a step",
    lambda run: run.train.precision != "float16" or not run.setup.fills,
    "choose bfloat16, or fill.name=none",
)
NO_DRAWS = Needs(
    "no layer of the model draws random numbers, which then would not be repeatable",
    lambda run: not run.draws,
)
PASSES_ALONE = Needs(
    "train.sync_batchnorm is off, with which a pass talks to other ranks",
    lambda run: run.replicas == 1 or not run.train.sync_batchnorm,
    "leave one of the two out",
)
TESTS_BEFORE_END = Acts(
    "a test that it counts comes before the last epoch (train.epochs, train.evaluate_every)",
    lambda run: (
        (every := run.train.evaluate_every) * (1 - -run.train.early_stop // every)
        < run.train.epochs
    ),
)
NORMS = Acts("the network has BatchNorm", lambda run: run.normed)
EQUAL_SHARES = Needs(
    "all replicas have equal shares of a mini-batch",
    lambda run: run.train.batch_size % run.replicas == 0,
    "take a train.batch_size that is a multiple of the replicas",
    here=lambda run: f"{run.replicas} replicas share {run.train.batch_size} samples",
)


class TrainSettings(Section):
    """[train] length, batch, numerics."""

    epochs: Annotated[int, TRAIN_OR_PLAN] = Field(default=12, ge=1, le=10**6)
    """Passes over the training data."""
    batch_size: int = Field(default=128, ge=1, le=MANY)
    """Images a mini-batch; solver.micro_batches accumulates gradients over parts of it."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, order and augmentation."""
    loss: Annotated[str, TRAIN_OR_PLAN] = "cross-entropy"
    """cross-entropy, mse, l1, huber, bce (logits of many labels), model (that a network computes of
    labels among its inputs, as Hugging Face's do); your own: module:function."""
    label_smoothing: Annotated[float, TRAIN_OR_PLAN] = Field(default=0.0, ge=0, lt=1)
    """Of cross-entropy in training: the share of a target that all classes get alike."""
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], TRAIN, ADDS_ALIKE, ALIKE_IN_FLOAT16
    ] = "float32"
    """Number format of the forward and backward passes; 16 bits run under autocast."""
    frozen: Annotated[dict[str, int], TRAIN] = Field(default={})
    """Parameters whose names begin so, and the epochs for which they are not trained; 0: all.
    train.frozen.bert.embeddings = 2, or a list of names that are never trained."""
    ema: Annotated[float, TRAIN_OR_PLAN, ALIKE] = Field(default=0.0, ge=0, lt=1)
    """Average the weights over steps, and test and export the average: give the share of itself
    that it keeps at each step, such as 0.999 (about the last 1,000 steps). 0: no average."""
    report_every: Annotated[int, TRAIN_OR_PLAN] = Field(default=16, ge=1, le=MANY)
    """Mini-batches between reports and stops; K times as many if a report drains."""
    evaluate_every: Annotated[int, TRAIN_OR_PLAN, TESTED] = Field(default=1, ge=1, le=MANY)
    """Epochs between measurements of the test accuracy; the last epoch always is one."""
    early_stop: Annotated[int, TRAIN_OR_PLAN, TESTS_BEFORE_END] = Field(default=0, ge=0, le=10**6)
    """Stop once so many epochs have passed since the one with the best test metric, or training
    loss where there is no test set; 0: never."""
    verify: Annotated[Literal["auto", "always", "never"], TRAIN] = "auto"
    """Compare the gradient of a pass with the undivided network's before the first step, and now
    and then the loss of a mini-batch with that of its parts; auto: of your own network, data or
    loss."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads per rank; 0: OMP_NUM_THREADS, else the rank's cores, shared with the ranks that use
    the same ones. Another number of threads can give other bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a block lives; auto: the local rank's GPU if there is one."""
    kernels: Literal["auto", "torch", "cupy"] = "auto"
    """Who computes between the passes; auto: fused kernels on a GPU with CuPy, else torch."""
    compile: Annotated[bool, TRAIN, NO_DRAWS, PASSES_ALONE] = False
    """Compile the blocks with torch.compile."""
    sync_batchnorm: Annotated[bool, TRAIN_OR_PLAN, REPLICAS, EQUAL_SHARES, NORMS] = False
    """BatchNorm over the samples of all replicas; off: each normalizes by its own share."""

    @field_validator("frozen", mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        """A name or a list of names as a table, and tables within it as dotted names."""
        names = [given] if isinstance(given, str) else given
        if isinstance(names, list | tuple):
            return dict.fromkeys(map(str, names), 0)
        return dict(_flattened(given)) if isinstance(given, Mapping) else given

    @field_validator("frozen")
    @classmethod
    def _epochs_of_frozen(cls, frozen: dict[str, int]) -> dict[str, int]:
        for name, epochs in frozen.items():
            if not 0 <= epochs <= 10**6:
                raise ValueError(f"{name} is frozen for {epochs} epochs: choose 0 (all) to 1000000")
        return frozen


def _flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a table and of the tables within it, by dotted names."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
